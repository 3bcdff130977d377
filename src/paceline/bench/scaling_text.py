"""How the figures of `paceline bench scaling` are shown on the terminal and in its page."""

from collections.abc import Mapping, Sequence

from paceline.bench.scaling import ScalingReport
from paceline.core.formatting import UNKNOWN, counted
from paceline.messages.pages import PageText

#: Labels of the parts of a step, in the order of the result of :func:`shares_of`.
PARTS = ("computation", "communication", "waiting", "rest")
_NOISY = 1.0  # width of an interval, as a share of its center


def shares_of(parts: Mapping[str, float] | None) -> list[float | None]:
    """Return the share of each part of the step; None if unknown."""
    if parts is None:
        return [None] * len(PARTS)
    step_s = sum(parts.values())
    return [part_s / step_s for part_s in parts.values()]


def interval_text(limits: Sequence[float] | None) -> str:
    """Format a confidence interval of shares: ``94 to 97 %``. One that is wider than ± 50 % of its
    center says nothing about the config."""
    if limits is None:
        return UNKNOWN
    low, high = limits
    if high - low > _NOISY * (high + low) / 2:
        return "too noisy: more repeats"
    return PageText("{low} to {high} %", low=f"{100 * low:.0f}", high=f"{100 * high:.0f}")


def notes(report: ScalingReport) -> list[str]:
    """Return what a reader has to know about the figures."""
    units, threads = report["units"], report["threads_per_rank"]
    if report["device"] == "cpu":
        each = "" if threads is None else PageText(", {threads:thread} per rank", threads=threads)
        lines: list[str] = [
            PageText(
                "measured on {cores}{each}",
                cores=counted(units, "CPU core"),
                count=units,
                each=each,
            )
        ]
    else:
        lines = [
            PageText(
                "measured on {count} × {device}; the parts of a step are unknown, because the host"
                " does not wait for the device",
                count=units,
                device=report["device"],
            )
        ]
    if any(row["oversubscribed"] for row in report["rows"]):
        kind = "cores" if report["device"] == "cpu" else "accelerators"
        lines.append(
            PageText(
                "* oversubscribed: more ranks than the {count} {kind}; left out of the fit",
                count=units,
                kind=kind,
            )
        )
    return lines


def fit_notes(report: ScalingReport) -> list[str]:
    """Return how the predictions were made, or why there are none."""
    fit = report["fit"]
    if fit is None:
        return ["no prediction: it needs two numbers of ranks that are not oversubscribed"]
    lines: list[str] = [
        "predicted, not measured: it assumes that further ranks are as fast, and their links as"
        " good, as those measured"
    ]
    if fit["residual"] is not None:
        residual = f"{100 * fit['residual']:.1f}"
        lines.append(
            PageText("the model differs from the measurements by {percent} %", percent=residual)
        )
    return lines
