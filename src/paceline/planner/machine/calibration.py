"""``paceline plan --calibrate RUN…``: fit how much longer each kind of work takes on this machine
than predicted, from finished runs. Imports no torch."""

import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import date
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.core.errors import ConfigError
from paceline.core.files import cache_dir, write_json_atomic
from paceline.planner.machine.history import PastRun

_VERSION, _FILE = 1, "calibration.json"
#: Standard deviations of the logarithms of a measured time, and of a factor around 1.
_TIME_WIDTH, _FACTOR_WIDTH = 0.05, 0.4
#: Parts of a step by the factor that they are multiplied by.
_PARTS = {
    "computation": ("products_s", "attention_s", "memory_s", "idle_s"),
    "launches": ("launches_s",),
    "traffic": ("exposed_s", "traffic_s", "host_s"),
    "update": ("optimizer_s",),
}


@dataclass(frozen=True)
class Calibration:
    """Factors on the predicted parts of a step.

    Args:
        computation: matrix products, attention, memory, and idle time of a pipeline.
        update: the optimizer and the fixed costs of a step.
        runs: folders of the runs that they were fitted to.
    """

    device: str
    computation: float
    launches: float
    traffic: float
    update: float
    runs: tuple[str, ...]
    day: str

    def factor_of(self, part: str) -> float:
        """Return the factor of a part of a step, such as ``products_s``."""
        name = next(name for name, parts in _PARTS.items() if part in parts)
        return float(getattr(self, name))

    def seconds(self, parts_s: Mapping[str, float]) -> float:
        """Return the time of a step from its predicted parts."""
        return sum(self.factor_of(part) * seconds for part, seconds in parts_s.items())


def calibrate(runs: Sequence[PastRun]) -> Calibration:
    """Fit the factors to runs on one type of device: least squares of the logarithms of predicted /
    measured, with a log-normal prior around 1, so that a part that the runs do not determine keeps
    its prediction.

    Raises:
        ConfigError: the runs used different devices, or another machine.
    """
    from scipy.optimize import least_squares

    kinds = sorted({run.device for run in runs})
    if len(kinds) > 1:
        raise ConfigError(
            "`--calibrate` has runs on different devices: {kinds}",
            code="different-devices",
            fix="name only runs on one type of device",
            kinds=", ".join(kinds),
        )
    parts = np.array([[_sum(run, names) for names in _PARTS.values()] for run in runs])
    measured = np.array([run.measured_s for run in runs])

    def residuals(logarithms: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        errors = np.log(parts @ np.exp(logarithms) / measured) / _TIME_WIDTH
        return np.concatenate([errors, logarithms / _FACTOR_WIDTH])

    solution = np.exp(least_squares(residuals, np.zeros(len(_PARTS))).x).tolist()
    factors = dict(zip(_PARTS, solution, strict=True))
    folders = tuple(run.output_dir for run in runs)
    return Calibration(kinds[0], **factors, runs=folders, day=date.today().isoformat())


def _sum(run: PastRun, names: Sequence[str]) -> float:
    return sum(run.parts_s.get(name, 0.0) for name in names)


def save(calibration: Calibration) -> Path:
    """Write the calibration of this machine, replacing an earlier one. Return its path."""
    path = cache_dir() / _FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"version": _VERSION, "host": socket.gethostname(), **asdict(calibration)}
    write_json_atomic(path, content)
    return path


def read(device: str) -> Calibration | None:
    """Return the calibration of this machine for a type of device; None if there is none."""
    try:
        content = json.loads((cache_dir() / _FILE).read_text(encoding="utf-8"))
        if content["version"] != _VERSION or content["host"] != socket.gethostname():
            return None
        values = {field.name: content[field.name] for field in fields(Calibration)}
        calibration = Calibration(**(values | {"runs": tuple(values["runs"])}))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return calibration if calibration.device == device else None
