"""What the ``run_start`` event and the report need to know of a run."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from paceline.config.derive import ResolvedValues
from paceline.config.schema import Config
from paceline.core.run_dir import RunDir
from paceline.data.order import SampleOrder
from paceline.models.shape.record import ModelShape
from paceline.parallel.base import Strategy
from paceline.parallel.cost import Workload
from paceline.parallel.parameter_server.cost import distinct_ids
from paceline.parallel.registry import ParallelLayout

#: Steps whose micro-batches are counted to estimate how many distinct ids one has.
_COUNTED_STEPS = 8


@dataclass(frozen=True)
class RunInfo:
    """A run as rank 0 describes it.

    Args:
        data_counts: the accounting of the training data.
        started_at: when the command began, in seconds since the epoch.
        model: as the strategy placed it.
        shape: of the model as the task built it.
        predicts_activations: the model is a language model, whose widths give the size of its
            activations.
    """

    config: Config
    derived: ResolvedValues
    layout: ParallelLayout
    data_counts: dict[str, Any]
    started_at: float
    run_dir: RunDir
    strategy: Strategy
    model: nn.Module
    shape: ModelShape
    train_dataset: Any
    order: SampleOrder
    predicts_activations: bool

    def workload(self, step: int) -> Workload:
        """Return the mean work of a replica in a step, as far as it is known at ``step``."""
        derived = self.derived
        lengths = getattr(self.train_dataset, "lengths", None)
        mean_length = 1.0 if lengths is None else float(np.mean(lengths))
        return Workload(
            derived.gradient_accumulation_steps,
            derived.samples_per_micro_batch * mean_length,
            distinct=self._distinct_ids(step),
        )

    def _distinct_ids(self, step: int) -> tuple[tuple[float, ...], ...]:
        """Return how many ids a micro-batch asks of each table and server, counted in some
        micro-batches of the run; empty if the data have no ids."""
        count_ids = getattr(self.train_dataset, "distinct_ids", None)
        if count_ids is None or self.strategy.name != "parameter_server" or step == 0:
            return ()
        num_parts = self.derived.replicas * self.derived.gradient_accumulation_steps
        steps = sorted({step * number // _COUNTED_STEPS for number in range(_COUNTED_STEPS)})
        micro_batches = (
            part for counted in steps for part in self.order.micro_batches(counted, num_parts)
        )
        counts = [count_ids(part) for part in micro_batches if len(part)]
        num_servers = self.config.parameter_server.servers
        return distinct_ids(counts, self.train_dataset.tables, num_servers)
