"""The plan as a table for a person."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TextIO

from paceline.core.files import human_bytes
from paceline.core.formatting import counted, short_count
from paceline.planner.estimate import USABLE, Mode

if TYPE_CHECKING:
    from rich.table import Table

    from paceline.planner.api import Plan

#: The hybrids that are shown: of many devices there are dozens.
_SHOWN_HYBRIDS = 6
_WIDTH = 100
_MODE_WIDTH = 28


def show(plan: Plan, stream: TextIO | None = None) -> None:
    """Print the table, what it rests on, and the choice."""
    from rich.console import Console
    from rich.text import Text

    stream = stream or sys.stdout
    width = None if stream.isatty() else _WIDTH
    console = Console(file=stream, width=width, highlight=False, soft_wrap=False)
    for line in _head(plan):
        console.print(Text(line))
    shown, hidden = _shown(plan)
    console.print(_table(plan, shown))
    console.print()
    console.print(Text(_legend(plan)))
    impossible = [one for one in plan.choice.modes if one.cost is None]
    if impossible:
        console.print(Text("\nnot possible here:"))
        for reason, names in _by_reason(impossible).items():
            console.print(Text(f"  {', '.join(names)}: {reason}"))
    if hidden:
        console.print(Text(f"\n{counted(hidden, 'more hybrid')} with `--json`"))
    console.print(Text("\nestimates:", style="bold"))
    for note in plan.notes():
        console.print(Text(f"  {note}"))
    if plan.misfit is not None:
        console.print(Text(f"\nthe config's own: {plan.misfit}", style="bold red"))
    for line in _configured(plan):
        console.print(Text(line))
    console.print(
        Text("\nauto: " + plan.choice.why, style="bold green" if plan.choice.taken else "bold red")
    )


def _head(plan: Plan) -> list[str]:
    trained = (
        "" if plan.trained == plan.parameters else f", {short_count(plan.trained)} of them trained"
    )
    machine = plan.machine
    return [
        f"model     {plan.config.model}: {plan.parameters:,} parameters{trained}",
        f"devices   {machine.count} × {machine.name}, {human_bytes(machine.memory_bytes)} each",
        "",
    ]


def _configured(plan: Plan) -> list[str]:
    """The mode that the config names: what it takes on each rank and on all, and what makes it
    fit."""
    mode = plan.configured
    if mode is None or mode.cost is None:
        return []
    usable = human_bytes(USABLE * plan.machine.memory_bytes)
    fits = "fits" if mode.fits else "does not fit"
    lines = [f"\nas configured: {mode.name} {fits}: {_memory(mode)}; {usable} per rank can be used"]
    advice = plan.advice
    if advice is None:
        return lines
    for change in advice.single:
        verdict = "fits" if change.mode.fits else "does not fit"
        lines.append(f"  with {change.text}: {_memory(change.mode)}, {verdict}")
    smallest = advice.smallest
    if smallest is None:
        return [*lines, "these changes together do not make it fit"]
    lines.append(f"the smallest change that fits: {smallest.text}")
    lines.append(f"  memory: {_memory(smallest.mode)}")
    cost = "; ".join(smallest.costs)
    if mode.step_time_s is not None and smallest.mode.step_time_s is not None:
        cost += (
            f"; {_seconds(smallest.mode.step_time_s)} per step instead of"
            f" {_seconds(mode.step_time_s)}"
        )
    before, after = _traffic(mode), _traffic(smallest.mode)
    if after != before:
        cost += f"; {human_bytes(after)} sent per step instead of {human_bytes(before)}"
    lines.append(f"  cost: {cost}")
    return lines


def _memory(mode: Mode) -> str:
    ranks = mode.layout.world_size
    whole = f", {human_bytes(mode.total * ranks)} on {counted(ranks, 'rank')}" if ranks > 1 else ""
    return f"{human_bytes(mode.total)} per rank{whole}"


def _traffic(mode: Mode) -> int:
    return 0 if mode.cost is None else mode.cost.traffic_per_step


def _shown(plan: Plan) -> tuple[list[Mode], int]:
    """Modes of one axis as they come, then the best hybrids; and how many hybrids are left out."""
    possible = [one for one in plan.choice.modes if one.cost is not None]
    plain = [one for one in possible if one.layout.strategy != "hybrid"]
    hybrids = [one for one in possible if one.layout.strategy == "hybrid"]
    hybrids.sort(
        key=lambda one: (
            one is not plan.choice.taken,
            one is not plan.configured,
            not one.fits,
            -one.per_second,
        )
    )
    return plain + hybrids[:_SHOWN_HYBRIDS], max(0, len(hybrids) - _SHOWN_HYBRIDS)


def _table(plan: Plan, modes: list[Mode]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("mode", no_wrap=True)
    for name in ("weights", "grads", "optim", "activ.", "total", "sent", "step", "smp/s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("fits", no_wrap=True)
    for one in modes:
        table.add_row(
            *_row(plan, one),
            style="bold green" if one is plan.choice.taken else "" if one.fits else "dim",
        )
    return table


def _row(plan: Plan, mode: Mode) -> list[str]:
    assert mode.cost is not None
    cost = mode.cost
    mark = "→ " if mode is plan.choice.taken else "* " if mode is plan.configured else "  "
    sizes = (
        cost.parameters,
        cost.gradients,
        cost.optimizer,
        cost.activations + mode.weight_copies,
        mode.total,
    )
    share = mode.total / plan.machine.memory_bytes
    verdict = (
        f"yes {share:.0%}" if mode.fits else f"no {share:.0%}" if share < 10 else f"no {share:.0f}×"
    )
    return [
        mark
        + (
            mode.name
            if len(mode.name) <= _MODE_WIDTH
            else mode.name.replace(" × ", "×").replace("pipeline", "pipe")
        ),
        *(_short(size) for size in sizes),
        ("≤" if cost.traffic_is_bound else "") + _short(cost.traffic_per_step),
        "?" if mode.step_time_s is None else _seconds(mode.step_time_s),
        "?" if mode.step_time_s is None else short_count(mode.per_second),
        verdict,
    ]


def _short(size_bytes: float) -> str:
    """``13.2G``: a size of at most six characters, in powers of two."""
    for unit in ("", "K", "M", "G"):
        if abs(size_bytes) < 1000:
            return (
                f"{size_bytes:.0f}{unit}"
                if not unit or size_bytes >= 100
                else f"{size_bytes:.1f}{unit}"
            )
        size_bytes /= 1024
    return f"{size_bytes:.1f}T"


def _seconds(seconds: float) -> str:
    """``12 ms``, ``1.3 s``, ``24 min``, ``3.1 h``: a time of at most seven characters."""
    for limit, unit, size in ((1.0, "ms", 1e-3), (99.5, "s", 1.0), (5970.0, "min", 60.0)):
        if seconds < limit:
            return f"{seconds / size:.3g} {unit}" if unit != "min" else f"{seconds / size:.0f} min"
    return f"{seconds / 3600:.3g} h"


def _legend(plan: Plan) -> str:
    parts = [
        (
            "bytes on the fullest rank; sent: by the busiest in a step; smp/s: samples a second of"
            " all ranks"
        ),
        "fits: within 90 % of the device's memory",
    ]
    if any(one.cost is not None and one.cost.traffic_is_bound for one in plan.choice.modes):
        parts.append("≤: at most, with no id twice in a batch")
    parts += ["→ taken by auto"] if plan.choice.taken else []
    parts += (
        ["* named in the config"]
        if plan.configured is not None and plan.configured is not plan.choice.taken
        else []
    )
    if any(one.layout.strategy == "single" for one in plan.choice.modes) and plan.machine.count > 1:
        parts.append("single uses one of the devices")
    return "; ".join(parts)


def _by_reason(modes: list[Mode]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for one in modes:
        found.setdefault(one.reason, []).append(one.name)
    return found
