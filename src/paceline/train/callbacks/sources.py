"""The losses, samples and tokens of each source of a mixture."""

from collections.abc import Sequence

import numpy as np
import torch

from paceline.core.row_figures import SourceStep
from paceline.data.collate import SourceLosses
from paceline.data.loader import MicroBatch
from paceline.data.order.base import Order, sample_shares
from paceline.data.order.build import SourceSize


class SourceRecorder:
    """Sums the losses of this rank's micro-batches by source, on the device. The sums are gathered
    together with the other figures of a logged step.

    Args:
        sources: the sources of the mixture.
        order: the order of samples.
        lengths: number of tokens of each sample.
        reports_loss: whether the losses of this rank count.
        device: the device on which they are summed.
    """

    def __init__(
        self,
        sources: Sequence[SourceSize],
        order: Order,
        lengths: np.ndarray,
        reports_loss: bool,
        device: torch.device,
    ) -> None:
        self.names = [source.name for source in sources]
        self.ends = np.cumsum([source.num_samples for source in sources])
        self.order = order
        self.lengths = lengths
        self.reports_loss = reports_loss
        self._sums = torch.zeros(2, len(sources), device=device)
        self._current: list[SourceLosses] = []

    def observe(self, micro_batches: list[MicroBatch]) -> None:
        """Note the micro-batches of a step, before they are used."""
        self._current = [batch.data["source_losses"] for batch in micro_batches if batch.samples]

    def add_step(self) -> None:
        """Add the losses of the step."""
        if self.reports_loss:
            for losses in self._current:
                if losses.sums is not None:
                    self._sums += losses.sums.to(self._sums.device)

    def take(self) -> list[float]:
        """Return the sums since the last call: the losses of each source, then its label tokens."""
        sums: list[float] = self._sums.flatten().tolist()
        self._sums.zero_()
        return sums

    def figures(self, rows: Sequence[Sequence[float]], steps: range) -> list[SourceStep]:
        """Return the figures of each source in some steps.

        Args:
            rows: the result of :meth:`take` of each rank after these steps.
        """
        losses, labels = np.sum(rows, axis=0).reshape(2, -1)
        samples, tokens = self._counts(steps)
        return [
            {
                "name": name,
                "loss": float(losses[number] / labels[number]) if labels[number] else None,
                "samples": int(samples[number]),
                "tokens": round(tokens[number]),
            }
            for number, name in enumerate(self.names)
        ]

    def _counts(self, steps: range) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of samples and tokens of each source, [sources]."""
        samples, tokens = np.zeros((2, len(self.names)))
        for step in steps:
            keys = self.order.global_batch(step)
            sources = np.searchsorted(self.ends, keys[:, 1], "right")
            lengths = self.lengths[keys[:, 1]] * sample_shares(keys, self.lengths)
            samples += np.bincount(sources, minlength=len(self.names))
            tokens += np.bincount(sources, lengths, minlength=len(self.names))
        return samples, tokens
