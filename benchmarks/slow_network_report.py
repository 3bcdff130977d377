"""Summarize runs over a slow network: times to a loss, ratios to plain DDP, tables and plots."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from paceline.core.files import human_bytes
from paceline.observe.report.charts import DrawnPlot, Plot, Series, draw

#: Goals over the slow link (100 Mbit/s, 10 ms): (method, quantity as in QUANTITIES, bound).
SLOW_GOALS = [
    ("powersgd", "sooner", 4.0),
    ("topk", "sooner", 4.0),
    ("diloco", "less_comm_in_all", 15.0),
    ("diloco", "final_loss_difference", 0.01),
]
#: Shorter runs have no goals, because the loss of the compressors lags in the first steps.
GOAL_STEPS = 200
#: Over a link of this rate, a step may take at most this many times as long as with plain DDP.
FAST_RATE, FAST_MAX_RATIO = 1e9, 1.10
QUANTITIES = {
    "sooner": "speedup to the final loss of DDP, ×",
    "less_comm_in_all": "reduction of the communication time of the whole run, ×",
    "final_loss_difference": "final loss, relative difference to DDP",
    "step_ratio": "step time relative to DDP, ×",
}
_COLORS = (
    "#4a5568",
    "#2563a8",
    "#d9772b",
    "#2c8a72",
    "#b0476b",
    "#6b5fb5",
    "#8a6d1d",
    "#1f9bb3",
    "#a33b2a",
    "#5f8a2c",
)


@dataclass(frozen=True)
class Evaluation:
    """An evaluation. ``seconds``: time in training steps until then, without evaluations, the start
    and checkpoints."""

    step: int
    seconds: float
    loss: float


@dataclass(frozen=True)
class Run:
    """The run of one method, read from its event log and report.

    Args:
        trained: (step, seconds in training so far, part of them that the slowest rank waited for
            communication, mean training loss since the previous entry).
        bytes_per_step: bytes that the busiest rank passed to collectives, averaged over the steps.
        wire_bytes: bytes that the device of each host sent, including evaluations.
    """

    name: str
    parameters: int
    evaluations: list[Evaluation]
    trained: list[tuple[int, float, float, float]]
    bytes_per_step: int
    wire_bytes: list[int]
    wall_s: float

    def times_at(self, step: int) -> tuple[float, float]:
        """Return the seconds in training and in communication until a step."""
        return next((seconds, comm) for logged, seconds, comm, _ in self.trained if logged == step)

    def loss_at(self, step: int) -> float:
        return next(evaluation.loss for evaluation in self.evaluations if evaluation.step == step)

    def text(self, steps: int) -> str:
        """Return a progress line."""
        seconds, comm = self.times_at(steps)
        return (
            f"{steps} steps in {seconds:7.1f} s, of which communication {comm:7.1f} s; "
            f"{human_bytes(self.bytes_per_step):>9} per step; loss {self.loss_at(steps):.4f}"
        )


def read_run(name: str, folder: Path, wire_bytes: list[int], wall_s: float) -> Run:
    """Read the event log and the report of a run."""
    events = [
        json.loads(line)
        for line in (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    trained: list[tuple[int, float, float, float]] = []
    evaluations = []
    previous_step, seconds, comm = 0, 0.0, 0.0
    for event in events:
        if event["type"] == "step":
            seconds += (event["step"] - previous_step) * event["step_time_s"]
            comm += (event["step"] - previous_step) * event["comm_wait_s"]
            previous_step = event["step"]
            trained.append((previous_step, seconds, comm, event["loss"]))
        elif event["type"] == "eval":
            evaluations.append(Evaluation(event["step"], seconds, event["loss"]))
    parameters = next(event for event in events if event["type"] == "run_start")["model"][
        "trainable_parameters"
    ]
    return Run(
        name,
        parameters,
        evaluations,
        trained,
        report["traffic_bytes_per_step"]["measured"],
        wire_bytes,
        wall_s,
    )


def first_crossing(points: Sequence[tuple[float, float]], loss: float) -> float | None:
    """Return the x at which the line through the points (x, loss) first falls to ``loss``, or None
    if it does not."""
    if points and points[0][1] <= loss:
        return points[0][0]
    for (x, before), (next_x, after) in pairwise(points):
        if after <= loss:
            return x + (next_x - x) * (before - loss) / (before - after)
    return None


# -- figures


def summarize(runs: dict[str, Run], steps: int, conditions: dict[str, Any]) -> dict[str, Any]:
    """Return the rows of the table, the goals, and all measurements.

    Args:
        runs: by method; plain DDP is the first.
        steps: steps of plain DDP.
    """
    mark = runs["ddp"].loss_at(steps)
    rows: list[dict[str, Any]] = []
    for name, run in runs.items():
        seconds, comm = run.times_at(steps)
        to_mark = first_crossing(
            [(evaluation.seconds, evaluation.loss) for evaluation in run.evaluations], mark
        )
        row = {
            "method": name,
            "seconds_per_step": seconds / steps,
            "bytes_per_step": run.bytes_per_step,
            "comm_s": comm,
            "loss": run.loss_at(steps),
            "final_steps": run.evaluations[-1].step,
            "final_loss": run.evaluations[-1].loss,
            "final_comm_s": run.trained[-1][2],
            "steps_to_mark": first_crossing(
                [(evaluation.step, evaluation.loss) for evaluation in run.evaluations], mark
            ),
            "seconds_to_mark": to_mark,
        }
        baseline = rows[0] if rows else row
        row |= {
            "sooner": baseline["seconds_to_mark"] / to_mark if to_mark else None,
            "less_comm": baseline["comm_s"] / comm if comm else None,
            "less_comm_in_all": baseline["final_comm_s"] / row["final_comm_s"]
            if row["final_comm_s"]
            else None,
            "loss_difference": run.loss_at(steps) / mark - 1,
            "final_loss_difference": run.evaluations[-1].loss / mark - 1,
            "step_ratio": row["seconds_per_step"] / baseline["seconds_per_step"],
            "fewer_bytes": baseline["bytes_per_step"] / run.bytes_per_step
            if run.bytes_per_step
            else None,
        }
        rows.append(row)
    return {
        **conditions,
        "parameters": runs["ddp"].parameters,
        "mark": mark,
        "methods": rows,
        "goals": goals(rows, conditions["link"], conditions["hosts"])
        if steps >= GOAL_STEPS
        else [],
        "runs": {name: asdict(run) for name, run in runs.items()},
    }


def goals(rows: list[dict[str, Any]], link: dict[str, Any], hosts: int) -> list[dict[str, Any]]:
    """Return the goals for this link. There are goals for two links only."""
    by_method = {row["method"]: row for row in rows}
    rate, delay, loss = link["rate_bits_per_s"], link["delay_s"], link["loss"]
    bounds: list[tuple[str, str, str, bool]] = []
    if (hosts, rate, delay, loss) == (2, 1e8, 1e-2, 0.0):
        for name, key, bound in SLOW_GOALS:
            if name in by_method:
                value = by_method[name][key]
                if key == "final_loss_difference":
                    bounds.append((name, key, f"≤ {bound}", value <= bound))
                else:
                    bounds.append((name, key, f"≥ {bound:g}", value is not None and value >= bound))
    if rate == FAST_RATE:
        for name in list(by_method)[1:]:
            bounds.append(
                (
                    name,
                    "step_ratio",
                    f"≤ {FAST_MAX_RATIO}",
                    by_method[name]["step_ratio"] <= FAST_MAX_RATIO,
                )
            )
    return [{"method": name, "what": key, "value": by_method[name][key], "bound": bound, "met": met}
            for name, key, bound, met in bounds]  # fmt: skip


def describe_benefit(row: dict[str, Any]) -> str:
    """State whether a method pays off on the measured link."""
    if row["method"] == "ddp":
        return "baseline"
    if row["sooner"] is None:
        return "does not reach the loss of DDP"
    return "faster than DDP" if row["sooner"] > 1 else "slower than DDP on this link"


# -- tables and plots


def as_markdown(result: dict[str, Any], reasons: dict[str, str]) -> str:
    machine, link, steps = result["machine"], result["link_measured"], result["steps"]
    lines = [
        f"# A slow network, {result['link']['text']}: {result['date']}",
        "",
        f"{result['hosts']} hosts (network namespaces) with one CPU rank each, on a machine with "
        f"{machine['cores']} cores ({machine['architecture']}), {machine['memory_gib']} GiB;"
        f" Python {machine['python']}, "
        f"torch {machine['torch']}.",
        "",
        f"- Link: {link['how']}. Measured before the training: round trip "
        f"{1e3 * link['round_trip_s']:.2f} ms, one TCP "
        f"stream {link['stream_bits_per_s'] / 1e6:.1f} Mbit/s (congestion control "
        f"{link['tcp_congestion_control']}, "
        f"tcp_slow_start_after_idle {link['tcp_slow_start_after_idle']}).",
        f"- Work: `benchmarks/configs/slow_network.yaml` with all {result['parameters']:,}"
        " parameters trained in float32, "
        "at a learning rate that is constant after the warm-up, with an evaluation every "
        f"{result['evaluate_every']} steps.",
        "- Seconds are those of the training steps. Evaluations, the start and the checkpoint are "
        "excluded for all methods.",
        f"- The mark is {result['mark']:.4f}, the evaluation loss of plain DDP after {steps}"
        " steps. The "
        f"other methods may take {result['extra_steps']} more steps to reach it; the total "
        "communication time includes these steps. A method reaches the mark at the point where the "
        "line between two evaluations first falls to it.",
        "",
        f"| method | s/step | sent/step | communication in {steps} steps (s) | loss after"
        f" {steps} steps | "
        "final loss | steps to the mark | s to the mark | speedup to the mark (×) | "
        "less communication time (×) | fewer bytes (×) | |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for row in result["methods"]:
        cells = [
            f"`{row['method']}`",
            f"{row['seconds_per_step']:.3f}",
            human_bytes(row["bytes_per_step"]),
            f"{row['comm_s']:.1f}",
            f"{row['loss']:.4f} ({100 * row['loss_difference']:+.2f} %)",
            f"{row['final_loss']:.4f} ({100 * row['final_loss_difference']:+.2f} %), step "
            f"{row['final_steps']}",
            _or_dash(row["steps_to_mark"], ".0f"),
            _or_dash(row["seconds_to_mark"], ".1f"),
            _or_dash(row["sooner"], ".2f"),
            _or_dash(row["less_comm"], ".1f"),
            _or_dash(row["fewer_bytes"], ".1f"),
            describe_benefit(row),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    if result["goals"]:
        lines += ["", "| method | quantity | value | goal | |", "|---|---|---:|---|---|"]
        for goal in result["goals"]:
            digits = ".4f" if goal["what"] == "final_loss_difference" else ".2f"
            lines.append(
                f"| `{goal['method']}` | {QUANTITIES[goal['what']]} |"
                f" {_or_dash(goal['value'], digits)} | {goal['bound']} | "
                f"{'met' if goal['met'] else 'missed'} |"
            )
    lines += ["", "Settings that differ from those of `ddp`, and the reasons for them:", ""]
    baseline = result["settings"]["ddp"]
    for name, settings in result["settings"].items():
        changes = " ".join(
            f"{key}={value}" for key, value in settings.items() if baseline.get(key) != value
        )
        lines.append(f"- `{name}`: {f'`{changes}`: ' if changes else ''}{reasons[name]}")
    return "\n".join(lines)


def _or_dash(value: float | None, digits: str) -> str:
    return "–" if value is None else format(value, digits)


def as_svg(runs: dict[str, Run]) -> str:
    """Plot the evaluation loss by step and by second, next to each other."""
    width, height, left, top, gap = 520, 300, 60, 56, 90
    panels = []
    for number, (title, key) in enumerate(
        (("by step", "step"), ("by second of training", "seconds"))
    ):
        series = [
            Series(
                name,
                [
                    (float(getattr(evaluation, key)), evaluation.loss)
                    for evaluation in run.evaluations
                ],
                _COLORS[index % len(_COLORS)],
            )
            for index, (name, run) in enumerate(runs.items())
        ]
        x_max = max(x for curve in series for x, _ in curve.points)
        drawn = draw(Plot(title, "loss", series), (0.0, x_max), [])
        panels.append(
            _panel(
                drawn, left + number * (width + gap), top, width, height, f"Evaluation loss {title}"
            )
        )
    legend, x = [], left
    for index, name in enumerate(runs):
        color = _COLORS[index % len(_COLORS)]
        legend.append(
            f'<rect x="{x}" y="14" width="16" height="4" fill="{color}"/><text x="{x + 22}" '
            f'y="20">{escape(name)}</text>'
        )
        x += 44 + 8 * len(name)
    total = left + 2 * width + gap + 20
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {top + height + 40}" '
        'font-family="sans-serif" '
        'font-size="12" fill="#333"><rect width="100%" height="100%" '
        f'fill="#fff"/>{"".join(legend)}{"".join(panels)}</svg>\n'
    )


def _panel(drawn: DrawnPlot, left: int, top: int, width: int, height: int, title: str) -> str:
    """Render a plot of :func:`paceline.observe.report.charts.draw`, which is 1000 × 400 units in
    size."""
    x_scale, y_scale = width / 1000, height / 400
    parts = [f'<text x="{left}" y="{top - 10}" font-weight="bold">{escape(title)}</text>']
    for tick in drawn["y_ticks"]:
        y = top + float(tick.svg) * y_scale
        parts.append(f'<path d="M{left} {y:.1f}h{width}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{tick.text}</text>')
    for tick in drawn["x_ticks"]:
        x = left + float(tick.svg) * x_scale
        parts.append(
            f'<text x="{x:.1f}" y="{top + height + 18}" text-anchor="middle">{tick.text}</text>'
        )
    lines = "".join(
        f'<path d="{shape.d}" stroke="{shape.colour}" fill="none" stroke-width="2" '
        'vector-effect="non-scaling-stroke"/>'
        for shape in drawn["shapes"]
    )
    parts.append(
        f'<g transform="translate({left} {top}) scale({x_scale:.4f} {y_scale:.4f})">{lines}</g>'
    )
    return "".join(parts)
