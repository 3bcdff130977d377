"""Count tokens and samples over all ranks, during the first forward pass of a step, and sum its
losses."""

import threading
from collections import deque
from typing import Any

import torch

from paceline.checkpoint.saver import CheckpointManager
from paceline.core.errors import RunError
from paceline.data.loader import MicroBatch
from paceline.distributed.communicator import Communicator
from paceline.distributed.host_copies import HostCopy, tensor_of
from paceline.observe.metrics import StepMetrics
from paceline.train.state import RankContext, TrainComponents


class StepCounts:
    """Global sums over one step: the count that divides the loss, tokens, samples, the number of
    ranks that were requested to stop, and rank 0's save request.

    If the strategy's replicas train independently, the loss is divided by the count of their group
    (``group_count``), and no rank waits for the global counts.

    Args:
        local: sums of this rank, in the order above.
        num_saves: number of saves started so far, which a save request refers to.
    """

    def __init__(
        self, local: list[float], ctx: RankContext, group: Communicator, num_saves: int
    ) -> None:
        self.comm = comm = ctx.comm
        self.num_saves = num_saves
        self.local_count = local[0]
        self.tensor = tensor_of(local, comm.wide_dtype, comm.device)
        self.group_count: torch.Tensor | None = None
        if group is not comm:
            self.group_count = self.tensor[0].clone()
            comm.wait(group.all_reduce(self.group_count))
            self.group_count *= comm.size // group.size
        self.work = comm.all_reduce(self.tensor)
        self.is_added = False  # to the metrics
        self._lock = threading.Lock()  # a strategy may run micro-batches in several threads
        self._on_host: HostCopy | None = None

    def denominator(self) -> torch.Tensor:
        """Return the denominator of the loss, a float32 scalar on the device that is not 0. It is
        the global count, or an estimate of it from the count of this rank's group."""
        count = self.wait()[0] if self.group_count is None else self.group_count
        return (count + (count == 0)).float()

    def wait(self) -> torch.Tensor:
        """Wait for the global sums and return them."""
        self._copied()
        return self.tensor

    def _copied(self) -> HostCopy:
        with self._lock:
            if self._on_host is None:
                self.comm.wait(self.work)
                self.work = None
                self._on_host = HostCopy(self.tensor)
            return self._on_host

    @property
    def stop_requested(self) -> bool:
        return self._read(3) > 0

    @property
    def save_request(self) -> float:
        """See :meth:`paceline.checkpoint.saver.CheckpointManager.next_request`."""
        return self._read(4)

    def _read(self, index: int) -> float:
        return float(self._copied().read()[index])


class CountQueue:
    """The pending counts of recent steps. With accelerators they are read one step later, so that
    the host does not wait for the device; if the loss does not need global counts, a few steps
    later, so that no rank waits for another."""

    def __init__(
        self,
        components: TrainComponents,
        ctx: RankContext,
        checkpoints: CheckpointManager,
        metrics: StepMetrics,
    ) -> None:
        self.task = components.task
        self.strategy = components.strategy
        self.ctx = ctx
        self.checkpoints = checkpoints
        self.metrics = metrics
        self._pending: deque[StepCounts] = deque()
        self._current: StepCounts | None = None

    def start(self, micro_batches: list[MicroBatch]) -> StepCounts:
        """Start to sum the counts of a step. Wait for the counts of earlier steps if this rank is
        as far ahead of the others as the strategy allows."""
        task, strategy = self.task, self.strategy
        counted = [batch for batch in micro_batches if batch.weight and strategy.reports_loss]
        local = [
            float(sum(task.count(batch.data) for batch in counted)),
            float(sum(task.num_tokens(batch.data) or 0 for batch in counted)),
            float(sum(batch.samples for batch in counted)),
            float(self.ctx.stop.wanted),
            self.checkpoints.next_request(),
        ]
        group, num_saves = strategy.count_group, self.checkpoints.num_begun
        self._current = StepCounts(local, self.ctx, group, num_saves)
        num_due = max(0, len(self._pending) - strategy.max_count_lag + 1)
        for counts in list(self._pending)[:num_due]:
            counts.wait()
        return self._current

    def settle(self, now: bool) -> bool:
        """Add the pending counts that are due, or all with ``now``, to the metrics. Return True if
        a stop of any rank was requested in those steps. On accelerators, requests are read a step
        later, even with ``now``."""
        assert self._current is not None
        counts, self._current = self._current, None
        self._pending.append(counts)
        limit = 0 if counts.group_count is None or now else self.strategy.max_count_lag
        if now:
            for pending in self._pending:
                self._add(pending)
        if self.ctx.comm.device_types != {"cpu"}:  # on every rank, for they stop together
            limit += 1
        stop = False
        while len(self._pending) > limit:
            counts = self._pending.popleft()
            self._add(counts)
            stop = counts.stop_requested or stop
            self.checkpoints.accept_request(counts.save_request, counts.num_saves)
        return stop

    def _add(self, counts: StepCounts) -> None:
        """Add counts to the metrics, once."""
        if not counts.is_added:
            counts.is_added = True
            self.metrics.count(counts.wait())


class LossAccumulator:
    """The losses of a step's micro-batches. They are summed in the order of the micro-batches,
    regardless of the order in which a strategy runs them, so that the sum is reproducible."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._losses: dict[int, torch.Tensor] = {}

    def add(self, number: int, loss: torch.Tensor) -> None:
        self._losses[number] = loss.detach()

    def total(self) -> torch.Tensor:
        """Return the float32 sum over the micro-batches whose loss this rank computed."""
        total = torch.zeros((), dtype=torch.float32, device=self.device)
        for number in sorted(self._losses):
            total += self._losses[number]
        return total


def check_task_loss(loss: Any) -> None:
    """Raise RunError if a task's loss is not a scalar that requires a gradient."""
    if isinstance(loss, torch.Tensor) and loss.dim() == 0 and loss.requires_grad:
        return
    if not isinstance(loss, torch.Tensor):
        actual = f"a {type(loss).__name__}"
    elif loss.dim() == 0:
        actual = "a scalar without gradient"
    else:
        actual = f"a tensor of shape {tuple(loss.shape)}"
    raise RunError(
        "the task's loss(model, batch) returned {actual}",
        code="wrong-loss-result",
        allowed="a scalar tensor with gradient: the sum of the loss over the batch",
        fix='return e.g. F.cross_entropy(model(x), y, reduction="sum")',
        actual=actual,
    )
