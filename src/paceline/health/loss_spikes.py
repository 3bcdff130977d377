"""Detection of loss spikes (``recovery.rollback_on_loss_spike``)."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.config.schema.recovery import RecoveryConfig


@dataclass(frozen=True)
class LossSpike:
    """A loss that jumped. ``median``: of the losses before it; NaN if they were too few.
    ``num_compared``: how many they were."""

    loss: float
    median: float
    num_compared: int


@dataclass(frozen=True)
class LossSpikeDetector:
    """Compares the loss of a step with the median of the losses before it."""

    settings: RecoveryConfig

    def observe(self, loss: float, history: Sequence[float]) -> LossSpike | None:
        """Return a spike if ``loss`` is not finite, or ``loss_spike_factor`` times larger than the
        median of ``history``, which must be half of ``loss_spike_window`` long.

        Args:
            loss: mean loss of the step over all ranks, so that every rank gets the same answer.
            history: the losses of the last steps without a spike.
        """
        median = math.nan
        if 2 * len(history) >= self.settings.loss_spike_window:
            median = statistics.median(history)
        if math.isfinite(loss) and not (
            median > 0 and loss > self.settings.loss_spike_factor * median
        ):
            return None
        return LossSpike(loss, median, len(history))
