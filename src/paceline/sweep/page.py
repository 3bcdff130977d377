"""The results of a sweep: a table for the terminal and ``sweep.html``, which can be opened
offline."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote

from rich.table import Table
from rich.text import Text

from paceline.core import formatting
from paceline.core.event_log import effective_events, read_events
from paceline.core.files import write_atomic
from paceline.messages.pages import PageText
from paceline.observe.report.charts import DrawnPlot, Plot, Series, draw, smooth
from paceline.observe.report.html import template
from paceline.observe.report.parameters import Trial, place_trials
from paceline.sweep.metric import Metric
from paceline.sweep.state import PAGE_FILE, SweepRun, SweepState

#: Runs with a curve in the page: as many as there are colors.
_NUM_CURVES = 8
_MAX_DIGITS = 12
_STYLES = {"done": "green", "failed": "red", "pruned": "yellow", "stopped": "yellow"}


def ranked(runs: Sequence[SweepRun], metric: Metric) -> list[SweepRun]:
    """Return the runs with the best metric first; those that were not made to their end after
    those that were."""
    return sorted(runs, key=lambda run: (run["status"] != "done", *metric.sort_key(run["metric"])))


def result_table(runs: Sequence[SweepRun], metric: Metric) -> Table:
    """Return the table of the terminal, the best run first."""
    keys = _keys(runs)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for key in keys:
        table.add_column(key, overflow="fold")
    table.add_column("status")
    for name in (metric.name, "first step", "time"):
        table.add_column(name, justify="right")
    for run in ranked(runs, metric):
        status = Text(run["status"], _STYLES.get(run["status"], ""))
        table.add_row(*_cells(run, keys), status, *_figures(run))
    return table


def write_page(state: SweepState, runs: Sequence[SweepRun], metric: Metric) -> None:
    """Write ``sweep.html`` into the folder of the sweep.

    Raises:
        OSError: it cannot be written.
    """
    in_order = ranked(runs, metric)
    keys = _keys(runs)
    done = [run for run in in_order if run["status"] == "done" and run["metric"] is not None]
    curves = [run for run in in_order if run["status"] != "pending"][:_NUM_CURVES]
    colours = {run["name"]: f"c{number}" for number, run in enumerate(curves, 1)}
    counts = {
        status: sum(run["status"] == status for run in runs)
        for status in ("done", "failed", "pruned", "stopped", "pending", "running")
    }
    page = {
        "name": state.folder.resolve().name,
        "counts": [
            PageText(f"{{count}} {status}", count=count)
            for status, count in counts.items()
            if count
        ],
        "metric": metric.name,
        "direction": "the highest first" if metric.maximize else "the lowest first",
        "best": _best(done[0], metric) if done else None,
        "keys": keys,
        "rows": [
            {
                "name": run["name"],
                "colour": colours.get(run["name"]),
                "link": _link(state, run),
                "status": run["status"],
                "values": _cells(run, keys),
                "figures": _figures(run),
                "error": run["error"],
            }
            for run in in_order
        ],
        "num_curves": len(curves) if len(curves) < len(runs) else None,
        "plots": _plots(state, curves, metric, colours),
        "parameters": place_trials(
            [Trial(run["name"], run["status"], run["overrides"], run["metric"]) for run in runs],
            metric.name,
            metric.maximize,
        ),
        "importance": state.importance,
    }
    write_atomic(state.folder / PAGE_FILE, template("sweep.html.jinja").render(page))


def _best(run: SweepRun, metric: Metric) -> str:
    return PageText(
        "{metric} {value} with {settings}",
        metric=metric.name,
        value=formatting.loss(run["metric"]),
        settings=", ".join(_short(run)),
    )


def _keys(runs: Sequence[SweepRun]) -> list[str]:
    return list(dict.fromkeys(key for run in runs for key in run["overrides"]))


def _cells(run: SweepRun, keys: Sequence[str]) -> list[str]:
    texts = _texts(run)
    return [texts.get(key, "") for key in keys]


def _texts(run: SweepRun) -> dict[str, str]:
    """Return the values of a run as they were written, the values of a search with four digits."""
    texts = dict(argument.split("=", 1) for argument in run["arguments"])
    for key, value in run["overrides"].items():
        if isinstance(value, float) and len(texts[key]) > _MAX_DIGITS:
            texts[key] = f"{value:.4g}"
    return texts


def _figures(run: SweepRun) -> list[str]:
    return [
        formatting.loss(run["metric"]),
        formatting.duration(run["time_to_first_step_s"]),
        formatting.duration(run["wall_s"]),
    ]


def _link(state: SweepState, run: SweepRun) -> str | None:
    """Return the path of the report relative to the page; None if there is no report."""
    if not state.run_dir(run).report_html.is_file():
        return None
    return f"{quote(run['name'])}/report.html"


def _plots(
    state: SweepState, runs: Sequence[SweepRun], metric: Metric, colours: dict[str, str]
) -> list[DrawnPlot]:
    """Draw the metric of the evaluations and the training loss of each run."""
    evaluations = Plot(metric.name, "", [], wide=True)
    losses = Plot("Training loss", "", [], wide=True)
    for run in runs:
        name, colour = ", ".join(_short(run)), colours[run["name"]]
        events = effective_events(read_events(state.run_dir(run).events))
        values = [
            (event["step"], formatting.finite(metric.of_evaluation(event)))
            for event in events
            if event["type"] == "eval"
        ]
        steps = [
            (event["step"], formatting.finite(event.get("loss")))
            for event in events
            if event["type"] == "step"
        ]
        if metric.is_of_evaluation and values:
            evaluations.series.append(Series(name, list(values), colour))
            if len(values) == 1:
                evaluations.series[-1].kind = "dots"
        if steps:
            losses.series.append(Series(name, smooth(steps), colour))
    plots = [plot for plot in (evaluations, losses) if plot.has_values()]
    all_steps = [x for plot in plots for series in plot.series for x, _ in series.points]
    if not all_steps:
        return []
    return [draw(plot, (min(all_steps), max(all_steps)), []) for plot in plots]


def _short(run: SweepRun) -> list[str]:
    """Return the overrides with the last part of each key."""
    return [f"{key.rpartition('.')[2]}={text}" for key, text in _texts(run).items()]
