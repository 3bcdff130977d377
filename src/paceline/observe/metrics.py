"""Time, tokens, memory and traffic of the steps, cheap enough to be always on."""

import time
from collections import deque
from collections.abc import Sequence

import torch

from paceline.core.events import RankStep, StepFigures
from paceline.distributed.communicator import Communicator
from paceline.distributed.progress import PROGRESS
from paceline.distributed.traffic import KINDS, uncounted
from paceline.observe.device_stats import NOTHING, DeviceMonitor, device_figures

#: Phases that a step is made of, as they are told of each rank; beside them its waits for others
#: (communication) and the rest.
_PHASES = ("data", "forward", "backward", "optimizer")
_PARTS = (*_PHASES, "communication", "other")
#: What is sent, by name; ``other``: under names of a strategy's own.
_SENT = (*KINDS, "other")
_UNKNOWN = -1.0


class StepMetrics:
    """Adds up on the device; waits for it only where figures are asked for (:meth:`gather`).

    Args:
        traffic_period: steps after which what is sent in a step repeats.
        serves: this rank only answers others, at any time: what it sends is counted from line to
            line, not within its steps.
        devices: reads this rank's accelerator, where there is one that tells.
    """

    def __init__(
        self,
        world: Communicator,
        started_at: float,
        has_tokens: bool,
        traffic_period: int = 1,
        serves: bool = False,
        devices: DeviceMonitor | None = None,
    ) -> None:
        self.world = world
        self.traffic_period = traffic_period
        self.serves = serves
        self.devices = devices
        self.started_at = started_at  # seconds since the epoch, when the command began
        self.has_tokens = has_tokens
        self.time_to_first_step_s: float | None = None
        self.traffic_per_step: list[int] = []
        self.train_s = 0.0  # seconds in steps after the first, so many:
        self.train_steps = 0
        # of the step made last: as the host saw it, and of it waiting for others
        self.last_step_s = self.last_wait_s = 0.0
        self.train_counts = [0.0, 0.0, 0.0]  # labels, tokens, samples after the first step
        self.all_counts = [0.0, 0.0, 0.0]
        self.extra_by_rank: list[list[float]] = []  # of the last :meth:`gather`
        self._sent_before = self._sent_at_line = world.traffic.so_far()
        # by collective, in the last steps
        self._sent: deque[dict[str, int]] = deque(maxlen=max(1, traffic_period))
        self._reset()
        self._steps_done = 0

    def _reset(self) -> None:
        self._loss = torch.zeros((), dtype=self.world.wide_dtype, device=self.world.device)
        self._counts = torch.zeros(3, dtype=self.world.wide_dtype, device=self.world.device)
        self._steps = 0
        self._own = 0.0
        self._window_s = self._data_s = self._comm_s = 0.0
        self._spent_s = dict.fromkeys((*_PHASES, "communication"), 0.0)
        self._window_sent: dict[str, int] = {}

    def begin(self) -> None:
        self._start = time.perf_counter()
        self._wait_before = self.world.wait_s
        self._sent_before = self.world.traffic.so_far()

    def data_ready(self) -> None:
        self._data_s += time.perf_counter() - self._start

    def count(self, counts: torch.Tensor) -> None:
        """Add a step's global [labels, tokens, samples, …]; perhaps a step late, but before
        :meth:`gather`."""
        self._counts += counts[:3]

    def end(self, loss_sum: torch.Tensor, own_count: float) -> None:
        """The end of a step, when :data:`~paceline.distributed.progress.PROGRESS` has ended it;
        ``loss_sum``: this rank's sum, and what it is over."""
        self._loss += loss_sum
        self._own += own_count
        self._steps += 1
        self._steps_done += 1
        self.last_wait_s = self.world.wait_s - self._wait_before
        parts = {phase: PROGRESS.spent_s.get(phase, 0.0) for phase in _PHASES} | {
            "communication": PROGRESS.step_wait_s
        }
        for part, seconds in parts.items():
            self._spent_s[part] += seconds
        # Begun and ended a moment apart from the phases: a step is no shorter than its parts.
        self.last_step_s = max(time.perf_counter() - self._start, sum(parts.values()))
        self._comm_s += self.last_wait_s
        self._window_s += self.last_step_s
        sent = _more(self.world.traffic.so_far(), self._sent_before)
        self.traffic_per_step.append(sum(sent.values()))
        if self.traffic_period > 1:
            self._sent.append(sent)
        else:
            for name, size in sent.items():
                self._window_sent[name] = self._window_sent.get(name, 0) + size
        if self._steps_done == 1:
            if self.world.device.type != "cpu":
                torch.accelerator.synchronize()
            self.time_to_first_step_s = time.time() - self.started_at

    def forget(self) -> None:
        """Drop what was gathered since the last figures: it is of steps that count no longer."""
        self._reset()

    def gather(self, grad_norm: float, extra: Sequence[float] = ()) -> StepFigures:
        """Figures since the last call, over all ranks; a collective. ``extra``: numbers of this
        rank, which :attr:`extra_by_rank` then has of each."""
        labels, tokens, samples = self._counts.tolist()
        if self.world.device.type != "cpu":
            mark = time.perf_counter()
            with PROGRESS.waiting("the device"):
                torch.accelerator.synchronize()
            self._window_s += time.perf_counter() - mark
        steps = max(1, self._steps)
        loss_sum = self._loss.item()
        mine = [
            loss_sum,
            self._data_s,
            self._comm_s,
            float(memory_now(self.world.device)),
            self._own,
        ]
        parts, sent = self._parts_s(), self._sent_by_kind(steps)
        device = NOTHING if self.devices is None else self.devices.last
        table = self._table([*mine, *parts, *sent, *device, *extra])
        ends = [len(mine), len(mine) + len(parts)]
        ends += [ends[1] + len(sent), ends[1] + len(sent) + len(device)]
        self.extra_by_rank = [row[ends[3] :] for row in table]
        after_first = self._steps_done > 1
        for index, value in enumerate((labels, tokens, samples)):
            self.all_counts[index] += value
            if after_first:
                self.train_counts[index] += value
        if after_first:
            self.train_s += self._window_s
            self.train_steps += self._steps
        figures: StepFigures = {
            # Over what it was summed over: of a rank that was lost meanwhile there is neither.
            "loss": sum(row[0] for row in table) / max(sum(row[4] for row in table), 1.0),
            "grad_norm": grad_norm,
            "tokens": round(tokens / steps) if self.has_tokens else None,
            "samples": round(samples / steps),
            "step_time_s": self._window_s / steps,
            "data_wait_s": max(row[1] for row in table) / steps,
            "comm_wait_s": max(row[2] for row in table) / steps if self.world.size > 1 else None,
            "memory_bytes": [int(row[3]) for row in table],
            "ranks": [
                _rank_step(rank, row, row[ends[0] : ends[1]], steps)
                for rank, row in enumerate(table)
            ],
            "traffic": _busiest([row[ends[1] : ends[2]] for row in table]),
        }
        devices = device_figures([row[ends[2] : ends[3]] for row in table])
        if devices:
            figures["devices"] = devices
        if self._steps_done == 1 and self.time_to_first_step_s is not None:
            figures["since_start_s"] = self.time_to_first_step_s
        self._reset()
        return figures

    def _parts_s(self) -> list[float]:
        """Seconds of this rank's steps, by :data:`_PARTS`. On an accelerator the phases are what
        the host took to hand the work over; what it then waited for the device is in the rest."""
        known = list(self._spent_s.values())
        return [*known, max(0.0, self._window_s - sum(known))]

    def _sent_by_kind(self, steps: int) -> list[float]:
        """Bytes a step that this rank sent, by :data:`_SENT`: the mean since the last line; where
        what is sent has a period, over the last whole one, and not known before there was one."""
        sent = self._window_sent
        if self.serves:
            now = self.world.traffic.so_far()
            sent, self._sent_at_line = _more(now, self._sent_at_line), now
        elif self.traffic_period > 1:
            if len(self._sent) < self.traffic_period:
                return [_UNKNOWN] * len(_SENT)
            steps, sent = self.traffic_period, {}
            for one in self._sent:
                for name, size in one.items():
                    sent[name] = sent.get(name, 0) + size
        named = [sent.get(name, 0) for name in KINDS]
        return [size / steps for size in (*named, sum(sent.values()) - sum(named))]

    def _table(self, mine: list[float]) -> list[list[float]]:
        """One row a rank."""
        if self.world.size == 1:
            return [mine]
        table = torch.zeros(
            self.world.size, len(mine), dtype=self.world.wide_dtype, device=self.world.device
        )
        table[self.world.rank] = torch.tensor(mine, dtype=self.world.wide_dtype)
        with uncounted():
            self.world.wait(self.world.all_reduce(table))
        rows: list[list[float]] = table.tolist()
        return rows

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens a second over the steps after the first, evaluation and checkpoints left out."""
        return self.train_counts[1] / self.train_s if self.has_tokens and self.train_s > 0 else None

    @property
    def samples_per_second(self) -> float | None:
        return self.train_counts[2] / self.train_s if self.train_s > 0 else None

    @property
    def usual_traffic(self) -> int | None:
        """Median bytes this rank sent in a step; where traffic has a period, the mean over the last
        whole one."""
        if 1 < self.traffic_period <= len(self.traffic_per_step):
            return round(sum(self.traffic_per_step[-self.traffic_period :]) / self.traffic_period)
        ordered = sorted(self.traffic_per_step)
        return ordered[len(ordered) // 2] if ordered else None


def _more(now: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    """What was added to a count meanwhile; no zeros."""
    return {
        name: size - before.get(name, 0)
        for name, size in now.items()
        if size != before.get(name, 0)
    }


def _rank_step(rank: int, row: Sequence[float], parts_s: Sequence[float], steps: int) -> RankStep:
    data_s, forward_s, backward_s, optimizer_s, communication_s, other_s = (
        round(part_s / steps, 7) for part_s in parts_s
    )
    return {
        "rank": rank,
        "data_wait_s": row[1] / steps,
        "comm_wait_s": row[2] / steps,
        "data_s": data_s,
        "forward_s": forward_s,
        "backward_s": backward_s,
        "optimizer_s": optimizer_s,
        "communication_s": communication_s,
        "other_s": other_s,
        "memory_bytes": int(row[3]),
    }


def _busiest(rows: list[list[float]]) -> dict[str, int] | None:
    """Of the rank that sent most; None where it is not known yet."""
    row = max(rows, key=sum)
    if min(row) < 0:
        return None
    return {name: round(size) for name, size in zip(_SENT, row, strict=True) if size}


def memory_now(device: torch.device) -> int:
    """Bytes: allocated on the accelerator, or this process's resident set on a CPU."""
    if device.type == "cpu":
        return _proc_status("VmRSS")
    return int(torch.accelerator.memory_allocated(device.index))


def memory_peak(device: torch.device) -> int:
    """Highest so far, as :func:`memory_now`."""
    if device.type == "cpu":
        return _proc_status("VmHWM")
    return max(
        _EARLIER_PEAKS.get(device, 0), int(torch.accelerator.max_memory_allocated(device.index))
    )


#: By accelerator: the highest before :func:`restart_peak`.
_EARLIER_PEAKS: dict[torch.device, int] = {}


def restart_peak(device: torch.device) -> None:
    """Have :func:`peak_since` begin anew. On a CPU nothing: its peak cannot be set back."""
    if device.type != "cpu":
        _EARLIER_PEAKS[device] = memory_peak(device)
        torch.accelerator.reset_peak_memory_stats(device.index)


def peak_since(device: torch.device) -> int | None:
    """Highest since :func:`restart_peak`; None where that is not known."""
    return (
        int(torch.accelerator.max_memory_allocated(device.index))
        if device in _EARLIER_PEAKS
        else None
    )


def _proc_status(field: str) -> int:
    try:
        with open("/proc/self/status") as handle:
            for line in handle:
                if line.startswith(field + ":"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
