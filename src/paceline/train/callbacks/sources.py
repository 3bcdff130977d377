"""The losses, samples and tokens of each source, if there are several."""

from collections.abc import Sequence

import numpy as np
import torch

from paceline.core.report import SourceStep
from paceline.data.collate import SourceLosses
from paceline.data.loader import MicroBatch
from paceline.distributed.communicator import wide_dtype
from paceline.distributed.host_copies import tensor_of


class SourceRecorder:
    """Sums the losses of this rank's micro-batches by source, on the device. The sums are gathered
    together with the other figures of a logged step.

    Args:
        names: names of the sources.
        computes_loss: whether the losses of this rank count.
        reports_counts: whether the samples and tokens of this rank count.
        device: the device on which they are summed.
    """

    def __init__(
        self,
        names: Sequence[str],
        computes_loss: bool,
        reports_counts: bool,
        device: torch.device,
    ) -> None:
        self.names = names
        self.computes_loss, self.reports_counts = computes_loss, reports_counts
        self._sums = torch.zeros(2, len(names), device=device)
        self._counts = np.zeros((2, len(names)))
        self._current: list[SourceLosses] = []

    def observe(self, micro_batches: list[MicroBatch]) -> None:
        """Note the micro-batches of a step, before they are used."""
        # A filler has none, and neither have the batches of a task with its own `collate`.
        self._current = [
            batch.data["source_losses"]
            for batch in micro_batches
            if batch.samples and "source_losses" in batch.data
        ]

    def add_step(self) -> None:
        """Add the losses and the counts of the step."""
        for losses in self._current:
            if self.reports_counts:
                self._counts += [losses.num_samples, losses.num_tokens]
            if self.computes_loss and losses.sums is not None:
                self._sums += losses.sums.to(self._sums.device)

    def take(self) -> torch.Tensor:
        """Return the sums since the last call [4 × sources], on the device: the losses of each
        source, its label tokens, its samples, and its tokens."""
        device, dtype = self._sums.device, wide_dtype(self._sums.device)
        counts = tensor_of(self._counts.flatten().tolist(), dtype, device)
        sums = torch.cat([self._sums.flatten().to(dtype), counts])
        self._sums.zero_()
        self._counts[:] = 0
        return sums

    def figures(self, rows: Sequence[Sequence[float]]) -> list[SourceStep]:
        """Return the figures of each source since the last call of :meth:`take`.

        Args:
            rows: the result of :meth:`take` of each rank.
        """
        losses, labels, samples, tokens = np.sum(rows, axis=0).reshape(4, -1)
        return [
            {
                "name": name,
                "loss": float(losses[number] / labels[number]) if labels[number] else None,
                "samples": round(samples[number]),
                "tokens": round(tokens[number]),
            }
            for number, name in enumerate(self.names)
        ]
