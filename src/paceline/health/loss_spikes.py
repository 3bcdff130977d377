"""Detect loss spikes (``recovery.rollback_on_loss_spike``)."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.config.schema.recovery import RecoveryConfig


@dataclass(frozen=True)
class LossSpike:
    """A loss spike. ``median`` is the median of the ``num_compared`` previous losses, or NaN if
    there were too few."""

    loss: float
    median: float
    num_compared: int


@dataclass(frozen=True)
class LossSpikeDetector:
    """Compares the loss of a step with the median of the previous losses."""

    settings: RecoveryConfig

    def observe(self, loss: float, history: Sequence[float]) -> LossSpike | None:
        """Return a spike if ``loss`` is not finite, or ``loss_spike_factor`` times larger than the
        median of ``history``, which must have at least ``loss_spike_window`` / 2 entries.

        Args:
            loss: mean loss of the step over all ranks, so that every rank gets the same result.
            history: losses of the last steps that were not spikes.
        """
        median = math.nan
        if 2 * len(history) >= self.settings.loss_spike_window:
            median = statistics.median(history)
        if math.isfinite(loss) and not (
            median > 0 and loss > self.settings.loss_spike_factor * median
        ):
            return None
        return LossSpike(loss, median, len(history))
