"""What ``paceline sft`` runs on a file, in the JSON of a plan."""

from typing import TypedDict

from paceline.planner.estimate import MemoryReport, ModeEstimate
from paceline.planner.search.trials import Setting, Settings


class RunEstimate(TypedDict):
    """The mode, the settings that are chosen for it, and the memory of the rank that uses most.
    ``mode`` is None if nothing can run."""

    mode: str | None
    settings: dict[str, Setting]
    memory_bytes: MemoryReport | None
    fits: bool
    step_time_s: float | None
    samples_per_second: float | None


def run_estimate(mode: ModeEstimate | None, settings: Settings) -> RunEstimate:
    """Return the JSON of a run.

    Args:
        mode: the estimate with the chosen settings; None if nothing can run.
        settings: the chosen settings, by dotted key.
    """
    report = None if mode is None else mode.as_dict()
    return RunEstimate(
        mode=None if report is None else report["mode"],
        settings=dict(settings),
        memory_bytes=None if report is None else report["memory_bytes"],
        fits=report is not None and report["fits"],
        step_time_s=None if report is None else report["step_time_s"],
        samples_per_second=None if report is None else report["samples_per_second"],
    )
