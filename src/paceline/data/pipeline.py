"""The data of one rank: training batches starting at any step, and the evaluation dataset."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from paceline.data.counts import StreamCounts
from paceline.data.loader import MicroBatch, train_steps
from paceline.data.loader_process import LoaderOptions
from paceline.data.order.base import Order
from paceline.data.streaming.base import StreamedDataset


class DataPipeline:
    """Provides this rank's micro-batches of each step. The iterator is created on demand, so
    :meth:`seek`, :meth:`reshard` and :meth:`set_shares` take effect at the next step.

    Args:
        train_dataset, eval_dataset: the datasets that the task built; ``eval_dataset`` may be None.
        order: the samples of each step.
        collate: converts a list of samples into a batch.
        last_step: number of steps of the run.
        accumulation: number of micro-batches per step on this rank; 0 on a rank without a share of
            the batch.
        replica, num_replicas: index of this rank's share of the global batch, and number of shares.
    """

    #: Seconds of the last :meth:`next` in which something else was done than to load samples.
    busy_s = 0.0

    def __init__(
        self,
        train_dataset: Any,
        eval_dataset: Any | None,
        order: Order,
        collate: Callable[[Sequence[Any]], Any],
        options: LoaderOptions,
        *,
        last_step: int,
        accumulation: int,
        replica: int,
        num_replicas: int,
    ) -> None:
        self.train_dataset = train_dataset
        self.eval_dataset = eval_dataset
        self.order = order
        self.collate = collate
        self.options = options
        self.last_step = last_step
        self.accumulation = accumulation
        self.replica = replica
        self.num_replicas = num_replicas
        #: Number of micro-batches of each replica; None if each has ``accumulation``.
        self.shares: tuple[int, ...] | None = None
        #: Called with the micro-batches of each step, before they are used.
        self.observers: list[Callable[[list[MicroBatch]], None]] = []
        #: The counts of the rows of all ranks so far, if the data is streamed.
        self.counts: StreamCounts | None = None
        if isinstance(train_dataset, StreamedDataset):
            self.counts = StreamCounts()
        self._step = 0  # the step of the next call of :meth:`next`
        self._iterator: Iterator[list[MicroBatch]] | None = None

    def next(self) -> list[MicroBatch]:
        """Return this rank's micro-batches of the next step."""
        if self._iterator is None:
            self._iterator = train_steps(
                self.train_dataset,
                self.order,
                self.collate,
                rank=self.replica,
                world_size=self.num_replicas,
                accumulation=self.accumulation,
                first_step=self._step,
                last_step=self.last_step,
                options=self.options,
                shares=self.shares,
            )
        micro_batches = next(self._iterator)
        self._step += 1
        for observe in self.observers:
            observe(micro_batches)
        return micro_batches

    def seek(self, step: int) -> None:
        """Continue with the batches of ``step``, counted from 0."""
        self.close()
        self._step = step

    def reshard(self, replica: int, num_replicas: int) -> None:
        """Change the share of the global batches from the next step on."""
        self.close()
        self.replica, self.num_replicas = replica, num_replicas

    def set_shares(self, shares: tuple[int, ...] | None) -> None:
        """Set the number of micro-batches of each replica from the next step on; None for equal
        shares."""
        self.close()
        self.shares = shares

    def close(self) -> None:
        """Shut down the loader's worker processes. Without this they are killed when the rank's
        process exits, and torch prints a traceback about them."""
        close = getattr(self._iterator, "close", None)
        self._iterator = None
        if close is not None:
            close()

    @property
    def equal_shares(self) -> tuple[int, ...]:
        return (self.accumulation,) * self.num_replicas

    @property
    def first_micro_batch(self) -> int:
        """Return the index of this rank's first micro-batch within a step."""
        if self.shares is None:
            return self.replica * self.accumulation
        return sum(self.shares[: self.replica])
