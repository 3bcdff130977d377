"""What the ranks tell each other of a step while its first forward runs."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

from paceline.data.loader import MicroBatch
from paceline.distributed.progress import PROGRESS

if TYPE_CHECKING:
    from paceline.train.trainer import Session


class StepCounts:
    """Global sums over one step: the loss's count, tokens, samples, how many ranks wish to stop,
    and the first one's wish to save. Where the strategy's replicas train on their own, the loss is
    divided by their own count (``near``), and nobody waits for the global ones."""

    def __init__(self, session: Session, micro_batches: list[MicroBatch]) -> None:
        task, world = session.task, session.world
        kept = [one for one in micro_batches if one.weight and session.strategy.reports_loss]
        numbers = [
            float(sum(task.count(one.data) for one in kept)),
            float(sum(task.num_tokens(one.data) or 0 for one in kept)),
            float(sum(one.samples for one in kept)),
            float(session.stop.wanted),
            session.saver.wish(),
        ]
        self.world = world
        self.saves_begun = session.saver.num_begun
        self.own = numbers[0]
        self.tensor = torch.tensor(numbers, dtype=world.wide_dtype, device=world.device)
        group = session.strategy.count_group
        self.near: torch.Tensor | None = None
        if group is not world:
            self.near = self.tensor[0].clone()
            world.wait(group.all_reduce(self.near))
            self.near *= world.size // group.size
        self.work = world.all_reduce(self.tensor)
        self._lock = threading.Lock()  # a strategy may run micro-batches in threads
        self._on_host: tuple[torch.Tensor, torch.Event] | None = None

    def denominator(self) -> torch.Tensor:
        """What the loss is divided by: the global count, or its estimate from that of this rank's
        group; a float32 scalar on the device, at least 1."""
        count = self.read()[0] if self.near is None else self.near
        return count.clamp(min=1.0).float()

    def read(self) -> torch.Tensor:
        """The global sums, when they have come."""
        with self._lock:
            if self.work is not None:
                self.world.wait(self.work)
                self.work = None
                self._copy_to_host()
        return self.tensor

    def _copy_to_host(self) -> None:
        # On an accelerator the host must not wait for the whole step to learn of a stop: copy now,
        # look later.
        if self.tensor.device.type != "cpu":
            host = torch.empty(self.tensor.shape, dtype=self.tensor.dtype, pin_memory=True)
            host.copy_(self.tensor, non_blocking=True)
            event = torch.Event(self.tensor.device)
            event.record()
            self._on_host = (host, event)

    def stop_wanted(self) -> bool:
        return self._number(3) > 0

    def save_wish(self) -> float:
        """See :meth:`paceline.checkpoint.saver.Saver.wish`."""
        return self._number(4)

    def _number(self, place: int) -> float:
        tensor = self.read()
        if self._on_host is not None:
            tensor, event = self._on_host
            with PROGRESS.waiting("the device"):
                event.synchronize()
        return float(tensor[place])
