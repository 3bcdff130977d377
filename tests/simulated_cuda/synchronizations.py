"""Record the calls for which the host of a GPU would wait for the device: reading a value
(`item()`, `tolist()`, `bool()`), operations whose result has a size that depends on values
(`nonzero`, a mask as index), copies that are not asynchronous, explicit synchronization, and
collectives of Python objects, whose sizes the host must know.

Every process with simulated devices records them if :data:`VARIABLE` names a folder.
"""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path

import torch.distributed as dist
from call_sites import find_sites

from paceline.distributed.timing.progress import PROGRESS
from paceline.simulation.cuda import observe_synchronizations

VARIABLE = "PACELINE_TEST_SYNCHRONIZATIONS"
_OBJECT_COLLECTIVES = (
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
)


@dataclass(frozen=True)
class Synchronization:
    """A call for which the host waits.

    Args:
        step: the step that runs, from 1; None before the first.
        phase: see :class:`paceline.distributed.timing.progress.ProgressTracker`.
        site: the innermost line of Paceline, as `train/trainer.py:42 step`; empty for a call of
            autograd's thread.
        library: the innermost line of all, if it is not the same.
        is_late: whether it waits for an event that was recorded before the step began, which ends
            at once unless the host is more than a step ahead of the device.
    """

    name: str
    step: int | None
    phase: str
    site: str
    library: str
    is_late: bool

    def __str__(self) -> str:
        library = f" ({self.library})" if self.library else ""
        return f"{self.name} at {self.site or 'backward'}{library}"


def record_synchronizations() -> None:
    """Record the synchronizations of this process and of those forked from it."""
    observe_synchronizations(_record)
    for name in _OBJECT_COLLECTIVES:
        _wrap(name)


def read_synchronizations(folder: Path) -> Iterator[Synchronization]:
    """Yield the records of all processes."""
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            yield Synchronization(**json.loads(line))


def _wrap(name: str) -> None:
    function = getattr(dist, name)

    @wraps(function)
    def recorded(*args: object, **options: object) -> object:
        _record(f"torch.distributed.{name}", None)
        return function(*args, **options)

    setattr(dist, name, recorded)


def _record(name: str, recorded_at: float | None) -> None:
    folder = os.environ.get(VARIABLE)
    if folder is None:
        return
    site, library = find_sites(sys._getframe(1), (__file__,))
    record = Synchronization(
        name=name,
        step=PROGRESS.step,
        phase=PROGRESS.phase,
        site=site,
        library=library,
        is_late=recorded_at is not None and recorded_at < PROGRESS._step_at,
    )
    with open(Path(folder) / f"{os.getpid()}.jsonl", "a") as file:
        file.write(json.dumps(asdict(record)) + "\n")
