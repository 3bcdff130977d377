"""The α–β model of the link between the ranks of a group: the latency and bandwidth of all-reduces.

Importing this module does not import torch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from typing import TYPE_CHECKING, Any

from paceline.distributed.collective_bytes import all_reduce_bytes

if TYPE_CHECKING:
    import numpy as np
    import torch

    from paceline.distributed.communicator import Communicator

#: Numbers of float32 elements in the measured all-reduces. The first one measures latency alone.
_NUMELS = (1, 1 << 14, 1 << 16, 1 << 18, 1 << 20)
#: Approximate limit for the total time of the measurement.
_BUDGET_S = 1.5


@dataclass(frozen=True)
class Link:
    """An all-reduce over N ranks takes ``latency_s`` for each of 2(N-1) successive messages, and
    the bytes that a rank sends divided by ``bandwidth_bytes_s``.

    Args:
        latency_s: latency of a message in seconds.
        bandwidth_bytes_s: bytes per second that each rank sends while all ranks send, or None if
            larger messages took no longer.
        num_ranks: number of ranks in the measured group.
        residual: root mean square of (model - measured) / measured.
        sent_bytes: bytes that each rank sent for the measurement. They are not part of the traffic.
        wall_s: duration of the measurement in seconds.
    """

    latency_s: float
    bandwidth_bytes_s: float | None
    num_ranks: int
    residual: float = 0.0
    sent_bytes: int = 0
    wall_s: float = 0.0

    def seconds(self, messages: float, sent_bytes: float) -> float:
        """Return the seconds that successive messages with a total of ``sent_bytes`` take."""
        return messages * self.latency_s + (
            sent_bytes / self.bandwidth_bytes_s if self.bandwidth_bytes_s else 0.0
        )

    def all_reduce_s(self, size_bytes: float) -> float:
        """Return the seconds that an all-reduce of ``size_bytes`` takes."""
        return self.seconds(2 * (self.num_ranks - 1), all_reduce_bytes(size_bytes, self.num_ranks))

    def exposed_s(self, buckets: Sequence[int], backward_s: float) -> float:
        """Return the seconds that data parallelism waits for all-reduces after backward.

        The model assumes that gradients are computed at a constant rate. The all-reduce of a bucket
        starts when the bucket is full and the previous all-reduce has finished (Li et al., "PyTorch
        Distributed: Experiences on Accelerating Data Parallel Training", 2020, section 3.2.3).

        Args:
            buckets: size of each bucket in bytes, in the order in which they are filled.
            backward_s: duration of backward in seconds.
        """
        total = sum(buckets)
        end = 0.0
        for size, filled in zip(buckets, accumulate(buckets), strict=True):
            end = max(end, backward_s * filled / total if total else 0.0) + self.all_reduce_s(size)
        return max(0.0, end - backward_s)


def measure_link(world: Communicator) -> Link | None:
    """Measure the link with all-reduces of increasing size. Return None with one rank.

    The measurement takes tens of milliseconds on a fast link and about a second on a slow one. It
    is a collective, and on an accelerator it waits for the device. Its traffic and waits are not
    counted as the training's. All ranks return the same link, except for ``wall_s``.
    """
    import torch

    from paceline.distributed.traffic import uncounted

    if world.size == 1:
        return None
    begin, waited = time.perf_counter(), world.waits.seconds
    messages = 2 * (world.size - 1)
    points: list[tuple[float, float, float]] = []
    sent_bytes, spent_s = 0, 0.0
    with uncounted():
        for numel in _NUMELS:
            # Four times the elements take up to four times as long, and there are at least two
            # runs: a warm-up and a measurement.
            if len(points) > 1 and spent_s + 2 * 4 * points[-1][2] > _BUDGET_S:
                break
            tensor = torch.zeros(numel, device=world.device)

            def run(tensor: torch.Tensor = tensor) -> None:
                world.wait(world.all_reduce(tensor))

            [seconds], repeats = time_collective(world, [run], longest_warm_up_s=_BUDGET_S)
            size = all_reduce_bytes(4 * numel, world.size)
            points.append((messages, size, seconds))
            sent_bytes += size * (repeats + 1)
            spent_s += seconds * (repeats + 1)
    world.waits.seconds = waited
    # Fit the smallest and the two largest sizes only: bursts through a switch or a traffic shaper
    # make medium sizes look too fast.
    model = fit(points[:1] + points[1:][-2:])
    assert model is not None
    beta = model["beta_s_per_byte"]
    wall_s = time.perf_counter() - begin
    return Link(
        model["alpha_s"],
        1 / beta if beta else None,
        world.size,
        model["residual"],
        sent_bytes,
        wall_s,
    )


def time_collective(
    world: Communicator,
    runs: Sequence[Callable[[], object]],
    *,
    num_warm_up: int = 1,
    min_repeats: int = 1,
    max_repeats: int = 5,
    budget_s: float = 0.2,
    longest_warm_up_s: float = math.inf,
    starts_together: bool = False,
) -> tuple[list[float], int]:
    """Time collectives over the ranks of ``world``, after a warm-up. A collective.

    They run in turns, so that other load on the machine affects all of them equally.

    Args:
        runs: functions; each one runs a collective and waits for it.
        num_warm_up: number of warm-up runs of each collective.
        budget_s: approximate time limit for the repeats of the slowest collective. The number of
            repeats is between ``min_repeats`` and ``max_repeats``.
        longest_warm_up_s: if a warm-up takes longer than this, it is used as the measurement.
        starts_together: whether to run a barrier before each run, so that the time of a rank does
            not include waiting for late ranks.

    Returns:
        The seconds of each collective (the median over the repeats of the slowest rank's time) and
        the number of repeats, the same on every rank.
    """

    def time_each() -> list[float]:
        times = []
        for run in runs:
            if starts_together:
                world.barrier()
            times.append(time_once(world, run))
        return times

    def slowest(rounds: list[list[float]]) -> list[float]:
        """Return the median over the rounds of each run's time on the slowest rank."""
        by_rank: list[Any] = world.gather_objects(rounds)
        return [
            median(max(times[number][run] for times in by_rank) for number in range(len(rounds)))
            for run in range(len(runs))
        ]

    warm_up = [time_each() for _ in range(num_warm_up)]
    longest_s = max(world.gather_numbers(max(max(times) for times in warm_up)))
    if longest_s > longest_warm_up_s:
        return slowest(warm_up), 0
    num_repeats = max(min_repeats, min(max_repeats, int(budget_s / max(longest_s, 1e-6))))
    return slowest([time_each() for _ in range(num_repeats)]), num_repeats


def time_once(world: Communicator, run: Callable[[], object]) -> float:
    """Return the seconds that ``run`` takes on this rank, until its device is idle."""
    import torch

    start = time.perf_counter()
    run()
    if world.device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - start


def fit(points: Sequence[tuple[float, float, float]]) -> dict[str, float] | None:
    """Fit t = α · messages + β · bytes with α and β ≥ 0 (Hockney, "The communication challenge for
    MPP", 1994), by least squares of the relative error, so that small messages count as much as
    large ones.

    Args:
        points: measurements as (number of messages, bytes, seconds).

    Returns:
        ``alpha_s``, ``beta_s_per_byte`` and ``residual`` (root mean square of (model - measured) /
        measured), or None with fewer than two points.
    """
    import numpy as np

    if len(points) < 2:
        return None
    rows = np.array([(messages / seconds, size / seconds) for messages, size, seconds in points])
    solutions = [np.linalg.lstsq(rows, np.ones(len(rows)), rcond=None)[0]]
    if solutions[0].min() < 0:  # use the better model with only one of the two terms
        solutions = list(np.diag(rows.sum(axis=0) / (rows**2).sum(axis=0)))

    def residual(solution: np.ndarray) -> float:
        return float(np.sqrt(((rows @ solution - 1) ** 2).mean()))

    best = min(solutions, key=residual)
    alpha, beta = best.tolist()
    return {"alpha_s": alpha, "beta_s_per_byte": beta, "residual": residual(best)}
