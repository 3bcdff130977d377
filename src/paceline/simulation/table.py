"""The simulation of a plan as a table for the terminal."""

from rich.console import Group
from rich.table import Table
from rich.text import Text

from paceline.core.files import human_bytes
from paceline.core.formatting import rank_names, short_time, significant
from paceline.planner.machine.hardware import Machine
from paceline.planner.table import short_size
from paceline.simulation.records import RESERVED_SHARE, RankReport, Verdict
from paceline.simulation.run import Simulation

_COLUMNS = ("weights", "grads", "optim", "activ.", "temp.", "comm.", "peak", "TFLOP", "≥ step")
_STYLES: dict[Verdict, str] = {"fits": "bold green", "unsure": "bold", "does_not_fit": "bold red"}


def simulation_table(simulation: Simulation, machine: Machine) -> Group:
    """Return memory, messages and least time of the simulated ranks, and the verdict."""
    mode, report = simulation.mode, simulation.report
    if report is None:
        name = "" if mode is None else f" {mode.name}"
        return Group(Text(f"\nnot simulated{name}: {simulation.reason}", style="bold red"))
    assert mode is not None
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("simulated", no_wrap=True)
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for rank in report["ranks"]:
        table.add_row(*_row(rank))
    senders: dict[str, list[int]] = {}
    for rank in report["ranks"]:
        senders.setdefault(_messages(rank), []).append(rank["rank"])
    notes = [
        Text(f"  messages of a step on {rank_names(ranks)}: {text}")
        for text, ranks in senders.items()
    ]
    host = max(rank["host_memory_bytes"] for rank in report["ranks"])
    if host:
        notes.append(Text(f"  offloaded to the host: up to {human_bytes(host)} per rank"))
    return Group(
        Text(f"\nsimulated: {mode.name}, two steps on fake tensors; nothing is measured\n"),
        table,
        Text(
            "\nbytes at the peak of two steps; temp.: what backward and the optimizer allocate and"
            " free; comm.: buffers of messages, gathered weights; ≥ step: the least time, at the"
            " rates of the data sheet and with all messages hidden behind computation"
        ),
        *notes,
        Text(
            f"\nsimulated: {_verdict(report['verdict'], report['peak_memory_bytes'], machine)}",
            style=_STYLES[report["verdict"]],
        ),
    )


def _row(rank: RankReport) -> list[str]:
    memory = rank["memory_bytes"]
    sizes = (
        memory["parameters"],
        memory["gradients"],
        memory["optimizer"],
        memory["activations"],
        memory["temporary"],
        memory["communication"],
    )
    return [
        f"  rank {rank['rank']}",
        *(short_size(size) for size in (*sizes, rank["peak_memory_bytes"])),
        significant(rank["flops"] / 1e12),
        short_time(rank["time_floor_s"]),
    ]


def _messages(rank: RankReport) -> str:
    return (
        ", ".join(
            f"{message['count']:.4g} × {message['collective']} ({human_bytes(message['bytes'])})"
            for message in rank["messages"]
        )
        or "nothing"
    )


def _verdict(verdict: Verdict, peak: int, machine: Machine) -> str:
    memory = f"the tensors take {human_bytes(peak)} of {human_bytes(machine.memory_bytes)}"
    if verdict == "does_not_fit":
        return f"does not fit: {memory}"
    reserved = f"torch reserves about {RESERVED_SHARE} times that"
    return f"{verdict}: {memory}, and {reserved}"
