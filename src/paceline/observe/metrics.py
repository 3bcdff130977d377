"""Measure time, tokens, memory and traffic of the steps. The overhead is low enough to be always
enabled."""

import sys
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.core.events import RankStep, StepFigures
from paceline.distributed.communicator import Communicator
from paceline.distributed.host_copies import HostCopy, tensor_of
from paceline.distributed.timing.progress import DEVICE, PROGRESS
from paceline.distributed.traffic import KINDS, uncounted
from paceline.observe.device_stats import UNKNOWN, DeviceMonitor, device_figures
from paceline.observe.throughput import ModelFlops

#: Phases of a step that are measured on each rank. The other parts of a step are waiting for other
#: ranks (communication) and the rest.
_PHASES = ("data", "forward", "backward", "optimizer")
#: Kinds of traffic. ``other`` is traffic that a strategy counts under other names.
_SENT = (*KINDS, "other")
_UNKNOWN_SIZE = -1.0


class StepMetrics:
    """Accumulates figures on the device, and waits for the device only when they are read
    (:class:`PendingFigures`).

    Args:
        world: all ranks.
        started_at: when the command began, in seconds since the epoch.
        has_tokens: whether samples consist of tokens.
        traffic_period: number of steps after which the traffic repeats.
        sends_between_steps: whether this rank also sends outside of its steps, so that its traffic
            is counted between two gathers.
        devices: monitor of this rank's accelerator, or None.
        flops: the FLOPs of the model, or None if they are unknown.

    Attributes:
        last_step_s: duration of the last step in seconds, on the host.
        last_wait_s: the part of it during which the host waited for other ranks.
        train_s: total seconds of all steps after the first.
        train_steps: number of these steps.
        train_counts: numbers of labels, tokens and samples of these steps.
        extra_by_rank: the argument ``extra`` of each rank in the last :meth:`gather`.
    """

    def __init__(
        self,
        world: Communicator,
        started_at: float,
        has_tokens: bool,
        traffic_period: int = 1,
        sends_between_steps: bool = False,
        devices: DeviceMonitor | None = None,
        flops: ModelFlops | None = None,
    ) -> None:
        self.world = world
        self.traffic_period = traffic_period
        self.sends_between_steps = sends_between_steps
        self.devices = devices
        self.flops = flops
        self.started_at = started_at
        self.has_tokens = has_tokens
        self.time_to_first_step_s: float | None = None
        self.traffic_per_step: list[int] = []
        self.train_s = 0.0
        self.train_steps = 0
        self.last_step_s = self.last_wait_s = 0.0
        self.train_counts = [0.0, 0.0, 0.0]
        self.extra_by_rank: list[list[float]] = []
        self._sent_before = self._sent_at_gather = Counter(world.traffic.snapshot())
        self._sent_in_period: deque[Counter[str]] = deque(maxlen=max(1, traffic_period))
        self._steps_done = 0
        self._device_parts_s: dict[str, float] = {}  # means per step, of the last known steps
        self.reset()

    def reset(self) -> None:
        """Discard the figures since the last :meth:`gather`."""
        self._loss = torch.zeros((), dtype=self.world.wide_dtype, device=self.world.device)
        self._counts = torch.zeros(3, dtype=self.world.wide_dtype, device=self.world.device)
        self._steps = 0
        self._local_count = 0.0
        self._window_s = self._data_s = self._comm_s = 0.0
        self._parts_s = dict.fromkeys((*_PHASES, "communication"), 0.0)
        self._sent = Counter[str]()

    def begin(self) -> None:
        """Start the measurement of a step."""
        self._start = time.perf_counter()
        self._wait_before = self.world.wait_s
        self._sent_before = Counter(self.world.traffic.snapshot())

    def data_ready(self, busy_s: float = 0.0) -> None:
        """Record that the batch of the step has been received.

        Args:
            busy_s: seconds of this time in which the rank did not wait for data.
        """
        self._data_s += max(0.0, time.perf_counter() - self._start - busy_s)

    def count(self, counts: torch.Tensor) -> None:
        """Add the global counts [labels, tokens, samples, …] of a step. May be called one step
        later, but before :meth:`gather`."""
        self._counts += counts[:3]

    def end(self, loss_sum: torch.Tensor, local_count: float, *, drains: bool = False) -> None:
        """End the measurement of a step, after
        :data:`~paceline.distributed.timing.progress.PROGRESS` has ended the step.

        Args:
            loss_sum: sum of this rank's losses.
            local_count: number of labels (or images) in this sum.
            drains: whether the host waits until an accelerator has finished the step. The step
                takes this time too.
        """
        if drains:
            self._wait_for_device()
        self._loss += loss_sum
        self._local_count += local_count
        self._steps += 1
        self._steps_done += 1
        self.last_wait_s = self.world.wait_s - self._wait_before
        parts_s: dict[str, float] = {}
        if PROGRESS.timer is None:
            parts_s = {phase: PROGRESS.spent_s.get(phase, 0.0) for phase in _PHASES}
            parts_s["communication"] = PROGRESS.step_wait_s
        for part, seconds in parts_s.items():
            self._parts_s[part] += seconds
        # The clocks of the step and of its phases do not start at exactly the same time, but a step
        # must not be shorter than its parts.
        self.last_step_s = max(time.perf_counter() - self._start, sum(parts_s.values()))
        if PROGRESS.timer is None:
            self._comm_s += self.last_wait_s
        self._window_s += self.last_step_s
        sent = Counter(self.world.traffic.snapshot()) - self._sent_before
        self.traffic_per_step.append(sent.total())
        self._sent_in_period.append(sent)
        self._sent.update(sent)
        if self._steps_done == 1:
            if self.world.device.type != "cpu":
                torch.accelerator.synchronize()
            self.time_to_first_step_s = time.time() - self.started_at

    def drain(self) -> None:
        """Count the time in which an accelerator finishes the steps so far. Called before something
        else than a step waits for it."""
        start = time.perf_counter()
        self._wait_for_device()
        self._window_s += time.perf_counter() - start

    def _wait_for_device(self) -> None:
        if self.world.device.type != "cpu":
            with PROGRESS.waiting(DEVICE):
                torch.accelerator.synchronize()

    def gather(self, grad_norm: float, extra: Sequence[float] = ()) -> StepFigures:
        """Return the figures since the last call, over all ranks. A collective; see
        :meth:`start_gather`."""
        return self.start_gather(torch.tensor(grad_norm, dtype=torch.float64), extra).read()

    def start_gather(
        self, grad_norm: torch.Tensor, extra: torch.Tensor | Sequence[float] = ()
    ) -> "PendingFigures":
        """Start to gather the figures since the last call, over all ranks. A collective. The host
        of an accelerator does not wait for the device before the result is read.

        Args:
            grad_norm: gradient norm of the last step, a scalar.
            extra: further numbers of this rank [n], which are gathered in :attr:`extra_by_rank`.
        """
        steps = max(1, self._steps)
        self._add_device_steps(steps)
        known_s = list(self._parts_s.values())
        parts_s = [*known_s, max(0.0, self._window_s - sum(known_s))]
        memory = float(memory_now(self.world.device))
        sums = [self._data_s, self._comm_s, memory, self._local_count]
        device = UNKNOWN if self.devices is None else self.devices.last
        columns = [sums, parts_s, self._sent_by_kind(steps), device]
        numbers = [value for column in columns for value in column]
        row = [self._loss, *map(self.as_tensor, (numbers, extra))]
        table = self._gather_rows(torch.cat([part.reshape(-1) for part in row]))
        pending = PendingFigures(
            self,
            HostCopy(table),
            HostCopy(self._counts),
            HostCopy(grad_norm),
            [1 + len(sums), *(len(column) for column in columns[1:]), len(extra)],
            self._window_s,
            steps,
            self._steps_done,
        )
        self.reset()
        return pending

    def as_tensor(self, numbers: torch.Tensor | Sequence[float]) -> torch.Tensor:
        """Return numbers [n] as a tensor of the table, on the device."""
        if isinstance(numbers, torch.Tensor):
            return numbers.to(self.world.wide_dtype)
        return tensor_of(numbers, self.world.wide_dtype, self.world.device)

    def add_window(self, counts: Sequence[float], seconds: float, steps: int) -> None:
        """Add steps after the first to the totals of the run.

        Args:
            counts: numbers of labels, tokens and samples.
        """
        for index, value in enumerate(counts):
            self.train_counts[index] += value
        self.train_s += seconds
        self.train_steps += steps

    def _add_device_steps(self, steps: int) -> None:
        """Add the parts of ``steps`` steps on an accelerator. The last ones may still run, so the
        means are over the steps that it has finished since the last call, or as before if there are
        none."""
        if PROGRESS.timer is None:
            return
        done = PROGRESS.take_device_steps()
        if done:
            sums = {phase: sum(each.spent_s.get(phase, 0.0) for each in done) for phase in _PHASES}
            sums["communication"] = sum(each.exposed_wait_s for each in done)
            self._device_parts_s = {part: total / len(done) for part, total in sums.items()}
        for part, seconds in self._device_parts_s.items():
            self._parts_s[part] += seconds * steps
        self._comm_s += self._parts_s["communication"]

    def _sent_by_kind(self, steps: int) -> list[float]:
        """Return the bytes per step that this rank sent, in the order of :data:`_SENT`: the mean
        since the last gather or, if traffic is periodic, over the last complete period (unknown
        before the first)."""
        sent = self._sent
        if self.sends_between_steps:
            now = Counter(self.world.traffic.snapshot())
            sent, self._sent_at_gather = now - self._sent_at_gather, now
        elif self.traffic_period > 1:
            if len(self._sent_in_period) < self.traffic_period:
                return [_UNKNOWN_SIZE] * len(_SENT)
            steps = self.traffic_period
            sent = sum(self._sent_in_period, Counter[str]())
        known = [sent[name] for name in KINDS]
        return [size / steps for size in (*known, sent.total() - sum(known))]

    def _gather_rows(self, row: torch.Tensor) -> torch.Tensor:
        """Gather the rows [n] of all ranks: [ranks, n]."""
        if self.world.size == 1:
            return row.unsqueeze(0)
        table = row.new_zeros(self.world.size, len(row))
        table[self.world.rank] = row
        with uncounted():
            self.world.wait(self.world.all_reduce(table))
        return table

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second in the steps after the first, excluding evaluations and checkpoints."""
        return self.train_counts[1] / self.train_s if self.has_tokens and self.train_s > 0 else None

    @property
    def samples_per_second(self) -> float | None:
        return self.train_counts[2] / self.train_s if self.train_s > 0 else None

    @property
    def flops_per_device_s(self) -> float | None:
        """Model FLOPs per second and device in the steps after the first; None if unknown."""
        labels, tokens, _ = self.train_counts
        return self.flops_in(labels, tokens, self.train_s)

    def utilization(self, flops_per_device_s: float | None) -> float | None:
        """Return the model FLOPs utilization, from 0 to 1; None if unknown."""
        if self.flops is None or flops_per_device_s is None:
            return None
        return self.flops.utilization(flops_per_device_s)

    def flops_in(self, labels: float, tokens: float, seconds: float) -> float | None:
        """Return the model FLOPs per second and device of steps that took ``seconds``; None if
        unknown."""
        if self.flops is None or seconds <= 0:
            return None
        return self.flops.per_device(labels, tokens) / seconds

    @property
    def usual_traffic(self) -> int | None:
        """Median number of bytes that this rank sent in a step or, if traffic is periodic, the mean
        over the last complete period."""
        if 1 < self.traffic_period <= len(self.traffic_per_step):
            return round(sum(self.traffic_per_step[-self.traffic_period :]) / self.traffic_period)
        ordered = sorted(self.traffic_per_step)
        return ordered[len(ordered) // 2] if ordered else None


@dataclass(frozen=True)
class PendingFigures:
    """Figures that are being gathered, of the ``steps`` steps up to step number ``steps_done`` of
    this attempt.

    Args:
        table: the row of each rank [ranks, columns].
        counts: global numbers of labels, tokens and samples.
        grad_norm: gradient norm of the last step.
        sizes: numbers of columns of each kind.
        window_s: duration of the steps in seconds.
    """

    metrics: StepMetrics
    table: HostCopy
    counts: HostCopy
    grad_norm: HostCopy
    sizes: list[int]
    window_s: float
    steps: int
    steps_done: int

    @property
    def is_ready(self) -> bool:
        """Whether the ranks have gathered the figures."""
        return self.table.is_ready and self.counts.is_ready and self.grad_norm.is_ready

    def read(self) -> StepFigures:
        """Return the figures. Called once, in the order of the steps."""
        metrics, steps = self.metrics, self.steps
        by_rank = [_split(row, self.sizes) for row in self.table.read().tolist()]
        sums = [row[0] for row in by_rank]
        metrics.extra_by_rank = [row[4] for row in by_rank]
        labels, tokens, samples = counts = self.counts.read().tolist()
        if self.steps_done > 1:
            metrics.add_window(counts, self.window_s, steps)
        flops_per_device_s = metrics.flops_in(labels, tokens, self.window_s)
        figures: StepFigures = {
            # Divide by the sum of the ranks' counts, which excludes ranks that were lost during
            # these steps.
            "loss": sum(row[0] for row in sums) / (sum(row[4] for row in sums) or 1.0),
            "grad_norm": float(self.grad_norm.read()),
            "tokens": round(tokens / steps) if metrics.has_tokens else None,
            "samples": round(samples / steps),
            "step_time_s": self.window_s / steps,
            "flops_per_device_s": flops_per_device_s,
            "mfu": metrics.utilization(flops_per_device_s),
            "data_wait_s": max(row[1] for row in sums) / steps,
            "comm_wait_s": max(row[2] for row in sums) / steps if len(sums) > 1 else None,
            "memory_bytes": [int(row[3]) for row in sums],
            "ranks": [_rank_step(rank, row[0], row[1], steps) for rank, row in enumerate(by_rank)],
            "traffic": _max_traffic([row[2] for row in by_rank]),
        }
        devices = device_figures([row[3] for row in by_rank])
        if devices:
            figures["devices"] = devices
        if self.steps_done == 1 and metrics.time_to_first_step_s is not None:
            figures["since_start_s"] = metrics.time_to_first_step_s
        return figures


def _split(row: list[float], sizes: list[int]) -> list[list[float]]:
    values = iter(row)
    return [[next(values) for _ in range(size)] for size in sizes]


def _rank_step(rank: int, sums: Sequence[float], parts_s: Sequence[float], steps: int) -> RankStep:
    data_s, forward_s, backward_s, optimizer_s, communication_s, other_s = (
        round(part_s / steps, 7) for part_s in parts_s
    )
    return {
        "rank": rank,
        "data_wait_s": sums[1] / steps,
        "comm_wait_s": sums[2] / steps,
        "data_s": data_s,
        "forward_s": forward_s,
        "backward_s": backward_s,
        "optimizer_s": optimizer_s,
        "communication_s": communication_s,
        "other_s": other_s,
        "memory_bytes": int(sums[3]),
    }


def _max_traffic(rows: list[list[float]]) -> dict[str, int] | None:
    """Return the traffic of the rank that sent most, or None if it is unknown."""
    row = max(rows, key=sum)
    if min(row) < 0:
        return None
    return {name: round(size) for name, size in zip(_SENT, row, strict=True) if size}


def memory_now(device: torch.device) -> int:
    """Return the bytes allocated on an accelerator, or the resident set size of this process on a
    CPU."""
    if device.type == "cpu":
        return _proc_status("VmRSS")
    if device.type == "mps":  # its allocator has no statistics
        return int(torch.mps.current_allocated_memory())
    return int(torch.accelerator.memory_allocated(device.index))


def memory_peak(device: torch.device) -> int:
    """Return the maximum of :func:`memory_now` so far; on MPS, the bytes that its allocator
    reserves, which it seldom returns."""
    if device.type == "cpu":
        return _proc_status("VmHWM")
    if device.type == "mps":
        return int(torch.mps.driver_allocated_memory())
    return max(
        _EARLIER_PEAKS.get(device, 0), int(torch.accelerator.max_memory_allocated(device.index))
    )


#: The peak of each accelerator before :func:`restart_peak`.
_EARLIER_PEAKS: dict[torch.device, int] = {}


def restart_peak(device: torch.device) -> None:
    """Start a new measurement for :func:`peak_since`. Does nothing on a CPU and on MPS, where the
    peak cannot be reset."""
    if device.type not in ("cpu", "mps"):
        _EARLIER_PEAKS[device] = memory_peak(device)
        torch.accelerator.reset_peak_memory_stats(device.index)


def peak_since(device: torch.device) -> int | None:
    """Return the peak since :func:`restart_peak`, or None if unknown."""
    if device not in _EARLIER_PEAKS:
        return None
    return int(torch.accelerator.max_memory_allocated(device.index))


def _proc_status(field: str) -> int:
    try:
        with open("/proc/self/status") as handle:
            for line in handle:
                if line.startswith(field + ":"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    import resource  # does not exist on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
