"""Earlier runs on this machine: their predicted and measured step times. Imports no torch."""

import json
import math
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any, Protocol

from paceline.core.errors import ConfigError
from paceline.core.event_log import read_events
from paceline.core.files import cache_dir, write_atomic
from paceline.core.run_dir import RunDir

_FILE = "runs.jsonl"
#: The file keeps this many runs, the latest ones.
_MAX_RUNS = 200
#: A run with fewer measured steps is not part of the history: its mean is not a usual step.
MIN_STEPS = 10
#: Weight of a run with another strategy, and with another number of ranks.
_OTHER_STRATEGY, _OTHER_RANKS = 0.3, 0.3
#: Weight of the prediction without history.
_PRIOR_WEIGHT = 0.5
#: A run counts at most as this factor, because something else may have slowed it down.
_MAX_FACTOR = 3.0


@dataclass(frozen=True)
class PastRun:
    """A finished run.

    Args:
        device: type of the ranks' devices.
        parts_s: the predicted step by kinds of work, without corrections by earlier runs.
        output_dir: its folder.
    """

    host: str
    device: str
    strategy: str
    world_size: int
    model: str
    parts_s: dict[str, float]
    measured_s: float
    day: str
    output_dir: str

    @property
    def predicted_s(self) -> float:
        return sum(self.parts_s.values())

    @property
    def factor(self) -> float:
        """The measured step time in units of the predicted one."""
        return self.measured_s / self.predicted_s


def run_of(report: Mapping[str, Any], model: str, output_dir: str) -> PastRun | None:
    """Return a run from its report; None if a step time was not measured or not predicted, or if
    too few steps were measured."""
    times = report.get("step_time_s") or {}
    parts, measured = times.get("parts"), times.get("measured")
    if not parts or not measured or (times.get("measured_steps") or 0) < MIN_STEPS:
        return None
    return PastRun(
        host=socket.gethostname(),
        device=str(report["device"]),
        strategy=str(report["strategy"]),
        world_size=int(report["world_size"]),
        model=model,
        parts_s={name: float(seconds) for name, seconds in parts.items()},
        measured_s=float(measured),
        day=date.today().isoformat(),
        output_dir=output_dir,
    )


def read_run(folder: Path) -> PastRun:
    """Read a run from its folder.

    Raises:
        ConfigError: the folder has no report, or its report has no predicted and measured time.
    """
    run_dir = RunDir(folder)
    try:
        report = json.loads(run_dir.report.read_text(encoding="utf-8"))
        starts = [event for event in read_events(run_dir.events) if event["type"] == "run_start"]
        model = str(starts[-1]["model"]["name"])
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ConfigError(
            "`--calibrate {folder}`: there is no finished run in this folder",
            code="no-finished-run",
            allowed="the `output_dir` of a run that is done, with report.json and events.jsonl",
            folder=folder,
        ) from error
    run = run_of(report, model, str(folder))
    if run is None:
        raise ConfigError(
            "`--calibrate {folder}`: the report has no step time that was both predicted and"
            " measured over at least {min_steps} steps",
            code="no-step-time-to-calibrate",
            fix="name a longer run of a language model, on a device that `paceline plan` knows",
            folder=folder,
            min_steps=MIN_STEPS,
        )
    return run


def append(run: PastRun) -> None:
    """Add a run to the history. A run in the same folder is replaced."""
    path = cache_dir() / _FILE
    runs = [each for each in _read() if each.output_dir != run.output_dir]
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(asdict(each)) for each in [*runs, run][-_MAX_RUNS:]]
    write_atomic(path, "\n".join(lines) + "\n")


def read_runs(device: str) -> tuple[PastRun, ...]:
    """Return the earlier runs on this machine's devices of a type, the oldest first."""
    host = socket.gethostname()
    return tuple(run for run in _read() if run.host == host and run.device == device)


def _read() -> list[PastRun]:
    try:
        lines = (cache_dir() / _FILE).read_text(encoding="utf-8").splitlines()
        return [PastRun(**json.loads(line)) for line in lines if line]
    except (OSError, ValueError, TypeError):
        return []


class Corrects(Protocol):
    """A calibration, which earlier runs are compared with instead of the predictions."""

    def seconds(self, parts_s: Mapping[str, float]) -> float: ...


def correction(
    runs: Sequence[PastRun],
    strategy: str,
    world_size: int,
    model: str,
    calibration: Corrects | None = None,
) -> float:
    """Return the factor between a prediction and earlier runs of the same model: their weighted
    geometric mean, drawn towards 1 if there are few similar ones. Runs of other models do not
    count: on CPU ranks they made predictions worse (docs/planner-method.md)."""
    total, logarithms = _PRIOR_WEIGHT, 0.0
    for run in (each for each in runs if each.model == model):
        weight = 1.0
        weight *= 1.0 if run.strategy == strategy else _OTHER_STRATEGY
        weight *= 1.0 if run.world_size == world_size else _OTHER_RANKS
        limit = math.log(_MAX_FACTOR)
        predicted = run.predicted_s if calibration is None else calibration.seconds(run.parts_s)
        error = math.log(run.measured_s / predicted)
        logarithms += weight * min(limit, max(-limit, error))
        total += weight
    return math.exp(logarithms / total)
