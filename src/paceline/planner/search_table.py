"""The results of a search as tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from paceline.core.files import human_bytes
from paceline.core.formatting import short_count, short_time
from paceline.planner.search.machines import Offer
from paceline.planner.search.search import Candidate

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.planner.api import Plan
    from paceline.planner.scale.goodput import Goodput


def print_search(console: Console, plan: Plan) -> None:
    """Print what the options of the plan search for."""
    if plan.goodput is not None:
        _print_goodput(console, plan.goodput)
    if plan.front is not None:
        console.print("\nset-ups that no other beats in both time and memory, the fastest first:")
        console.print(front_table(plan.front))
    if plan.machines is None:
        return
    deadline = plan.options.deadline_s
    text = f"{plan.samples:,} samples in batches of {plan.global_batch_size:,}"
    text += f" within {short_time(deadline)}" if deadline else ""
    if not plan.machines:
        console.print(f"\nno machine of the table of devices trains {text}")
        return
    console.print(f"\nthe cheapest machines that train {text}:")
    console.print(offers_table(plan.machines, plan.options.has_prices))


def _print_goodput(console: Console, goodput: Goodput) -> None:
    console.print(
        f"\nwith failures: {goodput.goodput:.2%} of the time is progress, if a checkpoint is saved"
        f" every {short_time(goodput.interval_s)} (Daly; Young: {short_time(goodput.young_s)})"
    )
    console.print(
        f"  a failure every {short_time(goodput.mtbf_s)}; a checkpoint of"
        f" {human_bytes(goodput.checkpoint_bytes)} pauses the run for"
        f" {short_time(goodput.pause_s)} and is written in {short_time(goodput.write_s)};"
        f" recovery takes {short_time(goodput.recovery_s)}"
    )


def front_table(front: Sequence[Candidate]) -> Table:
    """Return the set-ups that no other beats in both time and memory."""
    table = _table("set-up", "memory", "step", "smp/s", "fits")
    for each in front:
        step, mode = each.mode.step_time_s, each.mode
        table.add_row(
            each.name,
            human_bytes(mode.total),
            "?" if step is None else short_time(step),
            "?" if step is None else short_count(mode.per_second),
            "yes" if mode.fits else "no",
            style="" if mode.fits else "dim",
        )
    return table


def offers_table(offers: Sequence[Offer], has_prices: bool) -> Table:
    """Return the cheapest machines that finish in time."""
    price = ("price",) if has_prices else ()
    table = _table("devices", "run", "device hours", *price, "memory", "set-up")
    for each in offers:
        table.add_row(
            f"{each.machine.count} × {each.machine.name}",
            short_time(each.seconds),
            f"{each.device_hours:,.2f}",
            *([f"{each.price:,.2f}"] if has_prices else []),
            human_bytes(each.candidate.mode.total),
            each.candidate.name,
        )
    return table


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for name in names:
        is_text = name in ("set-up", "devices", "fits")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=name != "set-up")
    return table
