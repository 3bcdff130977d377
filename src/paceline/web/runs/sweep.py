"""The sweep that runs belong to, as `paceline sweep` records it in ``sweep.json``."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict

from pydantic import JsonValue

from paceline.core.formatting import finite
from paceline.observe.report.parameters import ParameterPlots, Trial, place_trials
from paceline.web.files import as_object, as_text, json_inside

_STATE = "sweep.json"


class SweepView(TypedDict):
    """A sweep for its plots.

    Args:
        metric: the name of the metric.
        maximize: whether a higher value of it is better.
        plots: the runs on the axes; None if too few have a result.
        importance: the share of each parameter in being among the best; None if it is unknown.
        ids: the id of each run by its name.
    """

    metric: str
    maximize: bool
    plots: ParameterPlots | None
    importance: dict[str, float] | None
    ids: dict[str, str]


def sweep_of(roots: Sequence[Path], known: Mapping[Path, str]) -> SweepView | None:
    """Return the sweep that all runs belong to; None if they do not belong to one.

    Args:
        roots: the folders of the runs.
        known: the id of each run of the panel by its folder.
    """
    folders = {root.parent for root in roots}
    if len(folders) != 1:
        return None
    folder = folders.pop()
    state = json_inside(folder / _STATE)
    trials = _trials(as_object(state).get("runs"))
    names = {trial.name for trial in trials}
    if state is None or not {root.name for root in roots} <= names:
        return None
    metric = as_object(state.get("metric"))
    name, maximize = as_text(metric.get("name")) or "metric", metric.get("maximize") is True
    return {
        "metric": name,
        "maximize": maximize,
        "plots": place_trials(trials, name, maximize),
        "importance": _importance(state.get("importance")),
        "ids": {root.name: id for root, id in known.items() if root.parent == folder},
    }


def _trials(runs: JsonValue) -> Sequence[Trial]:
    trials = []
    for run in runs if isinstance(runs, list) else []:
        fields = as_object(run)
        name, status = as_text(fields.get("name")), as_text(fields.get("status"))
        if name and status:
            values = as_object(fields.get("overrides"))
            trials.append(Trial(name, status, values, finite(fields.get("metric"))))
    return trials


def _importance(value: JsonValue) -> dict[str, float] | None:
    shares = {key: finite(share) for key, share in as_object(value).items()}
    return {key: share for key, share in shares.items() if share is not None} or None
