"""What a collective did, step by step, as one rank saw it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.distributed.collectives.schedules import Send, Step


@dataclass
class Trace:
    """Give one to :func:`paceline.distributed.collectives.run.all_reduce` and read ``steps``
    afterwards.

    Args:
        first: the values this rank began with.
        steps: one entry a step of the collective: ``phase``, ``step``, ``sends`` (``to``,
            ``chunk``, ``start``, ``stop``, ``bytes``: what this rank really sent), ``held`` (this
            rank's values after the step) and ``time_s`` (since the start).
    """

    first: list[Any] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    _started: float = 0.0

    def begin(self, flat: torch.Tensor) -> None:
        self.first = flat.tolist()
        self._started = time.perf_counter()

    def step(
        self, step: Step, sends: Sequence[Send], element_size: int, flat: torch.Tensor
    ) -> None:
        listed = [
            {
                "to": one.target,
                "chunk": one.chunk,
                "start": one.start,
                "stop": one.stop,
                "bytes": one.count * element_size,
            }
            for one in sends
        ]
        seconds = time.perf_counter() - self._started
        self.steps.append(
            {
                "phase": step.phase,
                "step": step.step,
                "sends": listed,
                "held": flat.tolist(),
                "time_s": round(seconds, 6),
            }
        )
