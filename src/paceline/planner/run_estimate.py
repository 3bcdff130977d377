"""What ``paceline sft`` runs on a file, in the JSON of a plan."""

from typing import TypedDict

from paceline.core.formatting import short_time
from paceline.core.texts import UserText
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
    rollout_time_s: float | None
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
        rollout_time_s=None if report is None else report["rollout_time_s"],
        samples_per_second=None if report is None else report["samples_per_second"],
    )


def rollout_notes(mode: ModeEstimate | None) -> list[str]:
    """Return what the run needs to generate completions, one sentence each; nothing for tasks that
    generate none, or if nothing can run."""
    if mode is None or mode.rollout is None:
        return []
    notes: list[str] = []
    if mode.time is not None:
        text = UserText(
            "completions: estimated to take {rollout} of the {step} of a step of {mode}, if all"
            " have the largest length",
            code="rollout-planned",
            rollout=short_time(mode.rollout.seconds),
            step=short_time(mode.time.seconds),
            mode=mode.name,
        )
        notes.append(text)
    if mode.rollout.gathers_layers:
        text = UserText(
            "completions: weights are gathered layer by layer for each token, which is slow,"
            " because all of them do not fit in the free memory",
            code="rollout-planned-by-layers",
        )
        notes.append(text)
    return notes
