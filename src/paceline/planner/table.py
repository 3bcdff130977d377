"""The plan as a table for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table
from rich.text import Text

from paceline.core.files import human_bytes
from paceline.core.formatting import counted, short_count, short_time, significant
from paceline.planner.estimate import USABLE, ModeEstimate
from paceline.planner.search.trials import settings_text

if TYPE_CHECKING:
    from paceline.planner.api import Plan
    from paceline.planner.mode_time import TimeEstimate

#: Only the best hybrids are shown: there are dozens for many devices.
_SHOWN_HYBRIDS = 6
_MODE_WIDTH = 28
_COLUMNS = ("mode", "weights", "grads", "optim", "activ.", "rollout", "total", "sent", "step",
            "80 %", "smp/s", "fits")  # fmt: skip
_ANY_WIDTH = 1000
#: Columns that a narrow terminal does without, in this order.
_OPTIONAL = ("grads", "optim", "activ.", "weights", "rollout", "80 %", "sent", "smp/s")


def plan_table(plan: Plan) -> Group:
    """Return the table, its assumptions, and the choice."""
    trained = f", {short_count(plan.trained)} of them trained"
    machine = plan.machine
    lines = [
        Text(
            f"model     {plan.config.model}: {plan.parameters:,} parameters"
            + (trained if plan.trained != plan.parameters else "")
        ),
        Text(
            f"devices   {machine.count} × {machine.name}, {human_bytes(machine.memory_bytes)} each"
        ),
        Text(),
    ]
    shown, hidden = _shown(plan)
    notes = [Text(f"\n{_legend(plan)}")]
    reasons: dict[str, list[str]] = {}
    for mode in plan.choice.modes:
        if mode.cost is None:
            reasons.setdefault(mode.reason, []).append(mode.name)
    if reasons:
        notes.append(Text("\nnot possible here:"))
    notes += [Text(f"  {', '.join(names)}: {reason}") for reason, names in reasons.items()]
    if hidden:
        notes.append(Text(f"\n{counted(hidden, 'more hybrid')} with `--json`"))
    notes.append(Text("\nestimates:", style="bold"))
    notes += [Text(f"  {note}") for note in plan.notes()]
    if plan.layout_error is not None:
        notes.append(Text(f"\nas configured: {plan.layout_error}", style="bold red"))
    notes += [Text(line) for line in _configured(plan)]
    style = "bold green" if plan.choice.chosen else "bold red"
    notes.append(Text(f"\nauto: {plan.choice.why}", style))
    notes += [Text(f"  {line}") for line in plan.choice.remarks]
    return Group(*lines, _ModeTable(plan, shown), *notes)


def _configured(plan: Plan) -> list[str]:
    """Describe the configured mode: its memory on each rank and on all, and what makes it fit."""
    mode = plan.configured
    if mode is None or mode.cost is None:
        return []
    usable = human_bytes(USABLE * plan.machine.memory_bytes)
    fits = "fits" if mode.fits else "does not fit"
    lines = [f"\nas configured: {mode.name} {fits}: {_memory(mode)}; {usable} per rank can be used"]
    if plan.run_settings and plan.run_mode is not None:
        return [*lines, *_run(plan, mode, plan.run_mode)]
    if mode.cost.host:
        copied = human_bytes(sum(mode.cost.host_traffic.values()))
        host = f"in host memory: {human_bytes(mode.cost.host)} per rank"
        lines.append(f"  {host}; copied to and from it: {copied} per step")
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
            f"; {short_time(smallest.mode.step_time_s)} per step instead of"
            f" {short_time(mode.step_time_s)}"
        )
    before, after = mode.cost.traffic_per_step, smallest.traffic_bytes_per_step
    if after != before:
        cost += f"; {human_bytes(after or 0)} sent per step instead of {human_bytes(before)}"
    lines.append(f"  cost: {cost}")
    return lines


def _run(plan: Plan, configured: ModeEstimate, mode: ModeEstimate) -> list[str]:
    """Describe the run with the memory settings that are chosen for it."""
    verdict = "fits" if mode.fits else "does not fit"
    settings = settings_text(plan.run_settings)
    lines = [f"`paceline sft` chooses {settings}: {_memory(mode)}, {verdict}"]
    cost = ["the same global batch and, up to rounding, the same loss"]
    if mode.step_time_s is not None and configured.step_time_s is not None:
        cost.append(
            f"{short_time(mode.step_time_s)} per step instead of"
            f" {short_time(configured.step_time_s)}"
        )
    if mode.cost is not None and mode.cost.host:
        cost.append(f"{human_bytes(mode.cost.host)} per rank in host memory")
    return [*lines, f"  cost: {'; '.join(cost)}"]


def _memory(mode: ModeEstimate) -> str:
    ranks = mode.layout.world_size
    on_all_ranks = (
        f", {human_bytes(mode.total * ranks)} on {counted(ranks, 'rank')}" if ranks > 1 else ""
    )
    return f"{human_bytes(mode.total)} per rank{on_all_ranks}"


def _shown(plan: Plan) -> tuple[list[ModeEstimate], int]:
    """Return the modes of one axis, then the best hybrids; and the number of omitted hybrids."""
    possible = [mode for mode in plan.choice.modes if mode.cost is not None]
    plain = [mode for mode in possible if mode.layout.strategy != "hybrid"]
    hybrids = [mode for mode in possible if mode.layout.strategy == "hybrid"]
    hybrids.sort(
        key=lambda mode: (
            not _is_chosen(plan, mode),
            mode is not plan.configured,
            not mode.fits,
            -mode.per_second,
        )
    )
    return plain + hybrids[:_SHOWN_HYBRIDS], max(0, len(hybrids) - _SHOWN_HYBRIDS)


def _is_chosen(plan: Plan, mode: ModeEstimate) -> bool:
    chosen = plan.choice.chosen
    return chosen is not None and (chosen.layout, chosen.name) == (mode.layout, mode.name)


@dataclass(frozen=True)
class _ModeTable:
    """The table of modes. On a narrow terminal it leaves out columns, and says which."""

    plan: Plan
    modes: list[ModeEstimate]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for count in range(len(_OPTIONAL) + 1):
            omitted = _OPTIONAL[:count]
            table = self._table(omitted)
            width = console.measure(table, options=options.update(width=_ANY_WIDTH)).maximum
            if width <= options.max_width:
                break
        yield table
        if omitted:
            names = ", ".join(name for name in _COLUMNS if name in omitted)
            yield Text(f"left out, because the terminal is too narrow: {names}", style="dim")

    def _table(self, omitted: Sequence[str]) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
        hidden = {*omitted, *(() if _has_ranges(self.plan) else ("80 %",))}
        hidden |= set() if _has_rollouts(self.plan) else {"rollout"}
        shown = [name for name in _COLUMNS if name not in hidden]
        for name in shown:
            is_text = name in ("mode", "fits")
            table.add_column(name, justify="left" if is_text else "right", no_wrap=True)
        for mode in self.modes:
            style = "" if mode.fits else "dim"
            if _is_chosen(self.plan, mode):
                style = "bold green"
            cells = dict(zip(_COLUMNS, _row(self.plan, mode), strict=True))
            table.add_row(*(cells[name] for name in shown), style=style)
        return table


def _row(plan: Plan, mode: ModeEstimate) -> list[str]:
    assert mode.cost is not None
    cost = mode.cost
    mark = "→ " if _is_chosen(plan, mode) else "* " if mode is plan.configured else "  "
    sizes = (
        cost.parameters - mode.shared_bytes,
        cost.gradients,
        cost.optimizer,
        cost.activations,
        cost.rollout,
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
        *(short_size(size) for size in sizes),
        ("≤" if cost.traffic_is_bound else "") + short_size(cost.traffic_per_step),
        "?" if mode.step_time_s is None else short_time(mode.step_time_s),
        _range(mode.time),
        "?" if mode.step_time_s is None else short_count(mode.per_second),
        verdict,
    ]


def _has_ranges(plan: Plan) -> bool:
    times = [mode.time for mode in plan.choice.modes if mode.time is not None]
    return any(time.range_s is not None for time in times)


def _has_rollouts(plan: Plan) -> bool:
    return any(mode.rollout is not None for mode in plan.choice.modes)


def _range(time: TimeEstimate | None) -> str:
    """Return a range with the unit of its upper end: ``11–18 s``."""
    if time is None or time.low_s is None or time.high_s is None:
        return ""
    high, _, unit = short_time(time.high_s).partition(" ")
    scale = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}[unit]
    return f"{significant(time.low_s / scale, 2)}–{significant(float(high), 2)} {unit}"


def short_size(size_bytes: float) -> str:
    """Return a size of at most six characters, in powers of two: ``13.2G``."""
    for unit in ("", "K", "M", "G"):
        if abs(size_bytes) < 1000:
            digits = 0 if not unit or size_bytes >= 100 else 1
            return f"{size_bytes:.{digits}f}{unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f}T"


def _legend(plan: Plan) -> str:
    parts = [
        (
            "bytes on the rank that uses most; sent: per step, by the rank that sends most; smp/s:"
            " samples per second of all ranks"
        ),
        "fits: within 90 % of the device's memory",
    ]
    costs = [mode.cost for mode in plan.choice.modes if mode.cost is not None]
    if any(cost.traffic_is_bound for cost in costs):
        parts.append("≤: upper bound, for batches without repeated ids")
    parts += ["→ chosen by auto"] if plan.choice.chosen else []
    if _has_ranges(plan):
        parts.append("80 %: range of the step that 80 % of published results are within")
    if _has_rollouts(plan):
        parts.append(
            "rollout: peak while completions are generated; total: the larger of it and the"
            " peak of the update"
        )
    if plan.configured is not None and not _is_chosen(plan, plan.configured):
        parts.append("* set in the config")
    strategies = [mode.layout.strategy for mode in plan.choice.modes]
    if "single" in strategies and plan.machine.count > 1:
        parts.append("single uses one of the devices")
    return "; ".join(parts)
