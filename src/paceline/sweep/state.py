"""The state of a sweep in its folder: `sweep.json`, which is written atomically after every
change."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, TypedDict, cast

from pydantic import JsonValue

from paceline.config.yaml_read import YamlValue
from paceline.core.errors import ConfigError
from paceline.core.event_log import read_events
from paceline.core.files import write_json_atomic
from paceline.core.formatting import finite
from paceline.core.run_dir import RunDir
from paceline.sweep.metric import Metric
from paceline.sweep.space import folder_name, values_of

STATE_FILE, PAGE_FILE = "sweep.json", "sweep.html"
_VERSION = 1

Status = Literal["pending", "running", "done", "failed", "stopped", "pruned"]


class SweepRun(TypedDict):
    """A run of a sweep.

    Args:
        arguments: its overrides as they are passed to a run, ``key=value``.
        overrides: the keys and values of ``arguments``.
        name: name of its folder in the folder of the sweep.
        metric: value of the metric; None if unknown.
        time_to_first_step_s: from the start of the run, or of the process that runs it; None if no
            step was made.
        wall_s: duration of the run in seconds; None if unknown.
        error: why it failed; None unless it did.
    """

    arguments: list[str]
    overrides: dict[str, YamlValue]
    name: str
    status: Status
    metric: float | None
    time_to_first_step_s: float | None
    wall_s: float | None
    error: str | None


@dataclass
class SweepState:
    """The runs of a sweep, including the runs of earlier commands in the same folder.

    Args:
        metric: the metric of this command; None before it is known.
        importance: the importance of each parameter; None if it is not known.
    """

    folder: Path
    runs: list[SweepRun] = field(default_factory=list)
    metric: Metric | None = None
    importance: dict[str, float] | None = None

    def run_dir(self, run: SweepRun) -> RunDir:
        return RunDir(self.folder / run["name"])

    def find(self, arguments: tuple[str, ...]) -> SweepRun | None:
        """Return the run with these overrides, in any order and notation."""
        overrides = values_of(arguments)
        return next((run for run in self.runs if run["overrides"] == overrides), None)

    def add(self, arguments: tuple[str, ...], name: str | None = None) -> SweepRun:
        """Add a run that is still to be made. ``name``: of its folder; default: from its
        overrides."""
        run: SweepRun = {
            "arguments": list(arguments),
            "overrides": values_of(arguments),
            "name": name or folder_name(arguments),
            "status": "pending",
            "metric": None,
            "time_to_first_step_s": None,
            "wall_s": None,
            "error": None,
        }
        self.runs.append(run)
        return run

    def save(self) -> None:
        """Write the state.

        Raises:
            OSError: it cannot be written.
        """
        metric = None if self.metric is None else asdict(self.metric)
        content = {"metric": metric, "importance": self.importance, "runs": self.runs}
        write_json_atomic(self.folder / STATE_FILE, {"version": _VERSION, **content})

    def read_report(self, run: SweepRun) -> dict[str, JsonValue]:
        """Return the content of ``report.json`` of a run; empty if there is none."""
        try:
            report = json.loads(self.run_dir(run).report.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return report if isinstance(report, dict) else {}

    def set_figures(self, run: SweepRun, metric: Metric, report: Mapping[str, JsonValue]) -> None:
        """Set the metric and the times of a run from its report and its event log."""
        run["metric"] = None
        if run["status"] != "failed":
            run["metric"] = metric.of_run(report, read_events(self.run_dir(run).events))
        run["time_to_first_step_s"] = finite(report.get("time_to_first_step_s"))
        run["wall_s"] = finite(report.get("wall_s"))

    def as_json(self, run: SweepRun) -> dict[str, JsonValue]:
        """Return a run as ``--json`` prints it."""
        return {
            "overrides": cast(JsonValue, run["overrides"]),
            "status": run["status"],
            "metric": run["metric"],
            "output_dir": str(self.folder / run["name"]),
            "time_to_first_step_s": run["time_to_first_step_s"],
            "wall_s": run["wall_s"],
            "error": run["error"],
        }


def load_state(folder: Path) -> SweepState:
    """Return the state of the sweep in a folder. A run that was interrupted is ``stopped``.

    Raises:
        ConfigError: the file exists but cannot be used.
    """
    path = folder / STATE_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return SweepState(folder)
    except (OSError, ValueError) as error:
        raise _unusable(path, str(error)) from error
    if not isinstance(content, dict) or content.get("version") != _VERSION:
        raise _unusable(path, "another version of Paceline wrote it")
    state = SweepState(folder, [_checked(path, run) for run in content.get("runs", [])])
    for run in state.runs:
        if run["status"] == "running":
            run["status"] = "stopped"
    return state


def _checked(path: Path, run: object) -> SweepRun:
    if not isinstance(run, Mapping) or not run.keys() >= SweepRun.__annotations__.keys():
        raise _unusable(path, "a run lacks keys")
    name = str(run["name"])
    if name in ("", ".", "..") or "/" in name:
        raise _unusable(path, f"`{name[:80]}` is not the name of a folder in it")
    return cast(SweepRun, dict(run))


def _unusable(path: Path, reason: str) -> ConfigError:
    return ConfigError(
        "{path} cannot be read as the state of a sweep: {reason}",
        code="sweep-state-unreadable",
        fix="choose another folder with `--folder`, or move the file away",
        path=path,
        reason=reason,
    )
