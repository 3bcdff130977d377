"""How the figures of `paceline bench tuning` are shown."""

from typing import Literal

from paceline.bench.tuning import ClaimReport, TuningChangeReport
from paceline.core.formatting import UNKNOWN, percent, rate


def ratio_text(change: TuningChangeReport, figure: Literal["speedup", "memory"]) -> str:
    """Format a ratio with its interval: ``1.31 × (1.25 to 1.37)``."""
    if figure == "speedup":
        ratio, limits = change["speedup"], change["speedup_interval"]
    else:
        ratio, limits = change["memory_ratio"], change["memory_interval"]
    if ratio is None:
        return UNKNOWN
    text = f"{ratio:.2f} ×"
    return text if limits is None else f"{text} ({limits[0]:.2f} to {limits[1]:.2f})"


def verdict_text(change: TuningChangeReport, planned_steps: int | None) -> str:
    """Return the verdict, and after how many steps a change with a longer first step pays off."""
    verdict: str = change["verdict"]
    extra_s, steps = change["first_step_extra_s"], change["steps_to_pay_off"]
    limits = change["speedup_interval"]
    if steps is None or limits is None:
        return verdict
    if verdict == "recommended" and steps > 1 and (extra_s or 0) > 1:
        verdict += f", pays off after {steps:,} steps"
    if verdict == "no gain" and limits[0] > 1 and planned_steps and steps > planned_steps:
        verdict += f": pays off after {steps:,} steps, the run has {planned_steps:,}"
    return verdict


def measured_text(claim: ClaimReport) -> str:
    """Format the measured value beside a claim."""
    value, limits = claim["measured"], claim["measured_interval"]
    if value is None:
        return "not measured"
    if claim["figure"] == "throughput":
        text = f"{value:.2f} ×"
        return text if limits is None else f"{text} ({limits[0]:.2f} to {limits[1]:.2f})"
    sign, direction = (1, "less") if value >= 0 else (-1, "more")
    ends = sorted(sign * limit for limit in limits or ())
    interval = f" ({percent(ends[0])} to {percent(ends[1])})" if ends else ""
    return f"{percent(sign * value)} {direction}{interval}"


def result_text(change: TuningChangeReport) -> str:
    """Return whether the change changes the result, and by how much the losses differed:
    ``same (3e-8)``."""
    text = "same" if change["changes_result"] is None else "changed"
    difference = change["loss_difference"]
    return text if difference is None else f"{text} ({rate(difference)})"
