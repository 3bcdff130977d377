"""What runs over a slow network come to: times to a loss, ratios to plain DDP, tables and plots."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from paceline.core.files import human_bytes
from paceline.observe.report.charts import DrawnPlot, Plot, Series, draw

#: name → what is asked of it over the slow link (100 Mbit/s, 10 ms): (what, as in WHAT; bound)
SLOW_GOALS = [
    ("powersgd", "sooner", 4.0),
    ("topk", "sooner", 4.0),
    ("diloco", "less_comm_in_all", 15.0),
    ("diloco", "final_loss_difference", 0.01),
]
GOAL_STEPS = 200  # shorter runs are a look at the link: there the compressors' loss still lags
# over such a link a step may take so many times that of plain DDP
FAST_RATE, FAST_AT_MOST = 1e9, 1.10
WHAT = {
    "sooner": "× sooner at the loss of DDP's last step",
    "less_comm_in_all": "× less time in communication, of the whole run, its further steps too",
    "final_loss_difference": "loss at its end, relative difference to that of DDP's",
    "step_ratio": "× the time of DDP's step",
}
_COLOURS = (
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
    """``seconds``: in training steps so far; evaluations, start and checkpoint left out."""

    step: int
    seconds: float
    loss: float


@dataclass(frozen=True)
class Run:
    """One method's run, as its event log and report tell it.

    Args:
        trained: (step, seconds in training so far, seconds of them that the slowest rank stood
            still for communication, mean training loss since the entry before).
        bytes_per_step: that the busiest rank handed to collectives, as the run counted; a mean
            where steps differ.
        wire_bytes: that each host's device sent from start to end, evaluations too.
    """

    name: str
    parameters: int
    evaluations: list[Evaluation]
    trained: list[tuple[int, float, float, float]]
    bytes_per_step: int
    wire_bytes: list[int]
    wall_s: float

    def at(self, step: int) -> tuple[float, float]:
        """(seconds in training, seconds in communication) up to a step."""
        return next((seconds, comm) for at, seconds, comm, _ in self.trained if at == step)

    def loss_at(self, step: int) -> float:
        return next(evaluation.loss for evaluation in self.evaluations if evaluation.step == step)

    def text(self, steps: int) -> str:
        """A line for who waits."""
        seconds, comm = self.at(steps)
        return (
            f"{steps} steps in {seconds:7.1f} s, {comm:7.1f} s of them in communication; "
            f"{human_bytes(self.bytes_per_step):>9} a step; loss {self.loss_at(steps):.4f}"
        )


def read_run(name: str, folder: Path, wire_bytes: list[int], wall_s: float) -> Run:
    """From a run's folder."""
    events = [
        json.loads(line)
        for line in (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    trained: list[tuple[int, float, float, float]] = []
    evaluations = []
    last, seconds, comm = 0, 0.0, 0.0
    for event in events:
        if event["type"] == "step":
            seconds += (event["step"] - last) * event["step_time_s"]
            comm += (event["step"] - last) * event["comm_wait_s"]
            last = event["step"]
            trained.append((last, seconds, comm, event["loss"]))
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


def reached(points: Sequence[tuple[float, float]], loss: float) -> float | None:
    """Where the line through the points (x, loss) first comes down to ``loss``; None where it does
    not."""
    if points and points[0][1] <= loss:
        return points[0][0]
    for (x, before), (next_x, after) in pairwise(points):
        if after <= loss:
            return x + (next_x - x) * (before - loss) / (before - after)
    return None


# -- figures


def summary(runs: dict[str, Run], steps: int, conditions: dict[str, Any]) -> dict[str, Any]:
    """The table's rows, the goals, and everything behind them. ``steps``: of plain DDP, the first
    run."""
    mark = runs["ddp"].loss_at(steps)
    rows: list[dict[str, Any]] = []
    for name, run in runs.items():
        seconds, comm = run.at(steps)
        to_mark = reached(
            [(evaluation.seconds, evaluation.loss) for evaluation in run.evaluations], mark
        )
        first = rows[0] if rows else None
        row = {
            "method": name,
            "seconds_per_step": seconds / steps,
            "bytes_per_step": run.bytes_per_step,
            "comm_s": comm,
            "loss": run.loss_at(steps),
            "final_steps": run.evaluations[-1].step,
            "final_loss": run.evaluations[-1].loss,
            "final_comm_s": run.trained[-1][2],
            "steps_to_mark": reached(
                [(evaluation.step, evaluation.loss) for evaluation in run.evaluations], mark
            ),
            "seconds_to_mark": to_mark,
        }
        base = first or row
        row |= {
            "sooner": base["seconds_to_mark"] / to_mark if to_mark else None,
            "less_comm": base["comm_s"] / comm if comm else None,
            "less_comm_in_all": base["final_comm_s"] / row["final_comm_s"]
            if row["final_comm_s"]
            else None,
            "loss_difference": run.loss_at(steps) / mark - 1,
            "final_loss_difference": run.evaluations[-1].loss / mark - 1,
            "step_ratio": row["seconds_per_step"] / base["seconds_per_step"],
            "fewer_bytes": base["bytes_per_step"] / run.bytes_per_step
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
    """What is asked over this link; nothing over others than the two for which bounds are
    stated."""
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
                    f"≤ {FAST_AT_MOST}",
                    by_method[name]["step_ratio"] <= FAST_AT_MOST,
                )
            )
    return [{"method": name, "what": key, "value": by_method[name][key], "bound": bound, "met": met}
            for name, key, bound, met in bounds]  # fmt: skip


def verdict(row: dict[str, Any]) -> str:
    """Whether a method pays on the link that was measured."""
    if row["method"] == "ddp":
        return "the measure"
    if row["sooner"] is None:
        return "does not come to DDP's loss"
    return "pays" if row["sooner"] > 1 else "does not pay on this link"


# -- words and pictures


def as_markdown(result: dict[str, Any], why: dict[str, str]) -> str:
    machine, link, steps = result["machine"], result["link_measured"], result["steps"]
    lines = [
        f"# A slow network, {result['link']['text']}: {result['date']}",
        "",
        f"{result['hosts']} hosts (network namespaces), one CPU rank on each, of a machine of "
        f"{machine['cores']} cores "
        f"({machine['architecture']}), {machine['memory_gib']} GiB; Python {machine['python']}, "
        f"torch {machine['torch']}.",
        "",
        f"- the link: {link['how']}; measured before the training: round trip "
        f"{1e3 * link['round_trip_s']:.2f} ms, one TCP "
        f"stream {link['stream_bits_per_s'] / 1e6:.1f} Mbit/s (congestion control "
        f"{link['tcp_congestion_control']}, "
        f"tcp_slow_start_after_idle {link['tcp_slow_start_after_idle']})",
        f"- the work: `examples/demo.yaml` with all {result['parameters']:,} parameters trained, "
        "float32, at a learning rate "
        f"that stays after its warm-up; an evaluation every {result['evaluate_every']} steps",
        "- seconds are those in training steps; evaluations, the start and the checkpoint are left "
        "out, for all alike",
        f"- the mark: {result['mark']:.4f}, plain DDP's evaluation loss after {steps} steps; the "
        "others may take "
        f"{result['extra_steps']} steps more to come to it, and so may `diloco`, whose "
        "communication in all is that of all its "
        "steps. Between evaluations a line is drawn, and its first point at the mark counts, DDP's "
        "own too",
        "",
        f"| method | s/step | sent/step | s in communication, {steps} steps | loss after {steps} | "
        "loss at the end | "
        "steps to the mark | s to the mark | × sooner | × less communication | × fewer bytes | |",
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
            verdict(row),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    if result["goals"]:
        lines += ["", "| method | what | | goal | |", "|---|---|---:|---|---|"]
        for goal in result["goals"]:
            digits = ".4f" if goal["what"] == "final_loss_difference" else ".2f"
            lines.append(
                f"| `{goal['method']}` | {WHAT[goal['what']]} |"
                f" {_or_dash(goal['value'], digits)} | {goal['bound']} | "
                f"{'met' if goal['met'] else 'missed'} |"
            )
    lines += ["", "The settings of each:", ""]
    plain = result["settings"]["ddp"]
    for name, settings in result["settings"].items():
        changes = " ".join(
            f"{key}={value}" for key, value in settings.items() if plain.get(key) != value
        )
        lines.append(f"- `{name}`: {f'`{changes}`: ' if changes else ''}{why[name]}")
    return "\n".join(lines)


def _or_dash(value: float | None, digits: str) -> str:
    return "–" if value is None else format(value, digits)


def as_svg(runs: dict[str, Run]) -> str:
    """Evaluation loss by step and by second, side by side."""
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
                _COLOURS[index % len(_COLOURS)],
            )
            for index, (name, run) in enumerate(runs.items())
        ]
        high = max(x for curve in series for x, _ in curve.points)
        drawn = draw(Plot(title, "loss", series), (0.0, high), [])
        panels.append(
            _panel(
                drawn, left + number * (width + gap), top, width, height, f"Evaluation loss {title}"
            )
        )
    legend, x = [], left
    for index, name in enumerate(runs):
        colour = _COLOURS[index % len(_COLOURS)]
        legend.append(
            f'<rect x="{x}" y="14" width="16" height="4" fill="{colour}"/><text x="{x + 22}" '
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
    """One plot of :func:`paceline.observe.report.charts.draw`, whose coordinates are 1000 × 400."""
    across, down = width / 1000, height / 400
    parts = [f'<text x="{left}" y="{top - 10}" font-weight="bold">{escape(title)}</text>']
    for tick in drawn["y_ticks"]:
        y = top + float(tick.svg) * down
        parts.append(f'<path d="M{left} {y:.1f}h{width}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{tick.text}</text>')
    for tick in drawn["x_ticks"]:
        x = left + float(tick.svg) * across
        parts.append(
            f'<text x="{x:.1f}" y="{top + height + 18}" text-anchor="middle">{tick.text}</text>'
        )
    lines = "".join(
        f'<path d="{shape.d}" stroke="{shape.colour}" fill="none" stroke-width="2" '
        'vector-effect="non-scaling-stroke"/>'
        for shape in drawn["shapes"]
    )
    parts.append(
        f'<g transform="translate({left} {top}) scale({across:.4f} {down:.4f})">{lines}</g>'
    )
    return "".join(parts)
