"""The metrics that a task computes with its loss."""

from collections.abc import Sequence

import numpy as np
import torch

from paceline.data.collate import MetricSums
from paceline.data.loader import MicroBatch
from paceline.tasks.base import Task


class MetricRecorder:
    """Sums the metrics of this rank's micro-batches, on the device. The sums are gathered together
    with the other figures of a logged step.

    Args:
        reports_loss: whether the losses of this rank count.
        device: the device on which they are summed.
    """

    def __init__(self, task: Task, reports_loss: bool, device: torch.device) -> None:
        self.task = task
        self.reports_loss = reports_loss
        self._sums = torch.zeros(2, len(task.step_metrics), device=device)
        self._current: list[MetricSums] = []

    def observe(self, micro_batches: list[MicroBatch]) -> None:
        """Note the micro-batches of a step, before they are used."""
        self._current = [batch.data["metric_sums"] for batch in micro_batches if batch.samples]

    def add_step(self) -> None:
        """Add the metrics of the step."""
        if self.reports_loss:
            for metrics in self._current:
                if metrics.sums is not None:
                    self._sums += metrics.sums.to(self._sums.device)

    def take(self) -> torch.Tensor:
        """Return the sums of the values since the last call, then their numbers
        [2 × metrics], on the device."""
        sums = self._sums.flatten().clone()
        self._sums.zero_()
        return sums

    def means(self, rows: Sequence[Sequence[float]]) -> dict[str, float]:
        """Return the mean of each metric that has values. ``rows``: the result of :meth:`take` of
        each rank."""
        sums, numbers = np.sum(rows, axis=0).reshape(2, -1)
        names = self.task.step_metrics
        means = {
            name: float(total / number)
            for name, total, number in zip(names, sums, numbers, strict=True)
            if number
        }
        return self.task.finish_metrics(means)
