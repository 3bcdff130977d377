"""What lies between the ranks of a group: latency and bandwidth as an all-reduce over it meets
them, by the α–β model, and what follows for the gradients' all-reduce. Importing this does not
import torch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from typing import TYPE_CHECKING, Any

from paceline.distributed.collectives.schedules import all_reduce_bytes

if TYPE_CHECKING:
    import numpy as np
    import torch

    from paceline.distributed.communicator import Communicator

#: Elements (float32) of the small all-reduce, whose time is latency alone, and of the larger ones,
#: tried one after the other for as long as the budget lasts.
_SMALL = 1
_MIDDLE = (1 << 14, 1 << 16, 1 << 18, 1 << 20)
#: About what all of them together may take.
_BUDGET_S = 1.5


@dataclass(frozen=True)
class Link:
    """An all-reduce over ``num_ranks`` takes ``latency_s`` for each of 2(N-1) messages in a row and
    the bytes that a rank sends divided by ``bandwidth_bytes_s``.

    Args:
        latency_s: of a message.
        bandwidth_bytes_s: what a rank sends in a second, while the others do the same; None where
            larger messages took no longer.
        num_ranks: of the group that was measured.
        residual: root mean square of (model - measured) / measured.
        sent_bytes: what each rank sent to measure. Not in the count of traffic.
        wall_s: how long that took.
    """

    latency_s: float
    bandwidth_bytes_s: float | None
    num_ranks: int
    residual: float = 0.0
    sent_bytes: int = 0
    wall_s: float = 0.0

    def seconds(self, messages: float, sent_bytes: float) -> float:
        """Of ``messages``, one after the other, that are ``sent_bytes`` in all."""
        return messages * self.latency_s + (
            sent_bytes / self.bandwidth_bytes_s if self.bandwidth_bytes_s else 0.0
        )

    def all_reduce_s(self, size_bytes: float) -> float:
        """Seconds of an all-reduce of ``size_bytes``."""
        return self.seconds(2 * (self.num_ranks - 1), all_reduce_bytes(size_bytes, self.num_ranks))

    def exposed_s(self, buckets: Sequence[int], backward_s: float) -> float:
        """Seconds that plain data parallelism waits, after a backward of ``backward_s``, for the
        all-reduces of its buckets, given by their bytes in the order in which they are filled.

        Gradients are taken to come in evenly over backward; a bucket's all-reduce begins when it is
        full and the one before is done (Li et al., "PyTorch Distributed: Experiences on
        Accelerating Data Parallel Training", 2020, section 3.2.3).
        """
        total = sum(buckets)
        end = 0.0
        for size, so_far in zip(buckets, accumulate(buckets), strict=True):
            end = max(end, backward_s * so_far / total if total else 0.0) + self.all_reduce_s(size)
        return max(0.0, end - backward_s)


def measure_link(world: Communicator) -> Link | None:
    """Measure by all-reduces over the ranks of ``world``, a small one and ever larger ones: tens of
    milliseconds on a fast link, about a second on a slow one. None with one rank.

    A collective; on an accelerator it waits for the device. What is sent is left out of the count
    of traffic, and the waiting for it is not that of training. All ranks get the same answer (but
    for ``wall_s``).
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
        for numel in (_SMALL, *_MIDDLE):
            # Four times the elements take up to four times as long, and are sent once to warm up
            # and once at least to measure.
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
    # What a switch or a shaper lets through at once, before it slows down, makes the sizes between
    # look too fast.
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
    """Time collectives over the ranks of ``world``, after warming up (connections, the window that
    TCP dares to send at once). They take turns, so that whatever else the machine does meets all
    of them alike. A collective.

    Args:
        runs: each runs one collective and waits for it.
        num_warm_up: runs of each before those that count.
        budget_s: about what the repeats of the slowest one may take, between ``min_repeats`` and
            ``max_repeats`` of them.
        longest_warm_up_s: where a warm-up takes longer, it is the measurement.
        starts_together: all ranks meet before each run, so that a rank's time holds no wait for
            one that comes late.

    Returns:
        The seconds of each (the median over the repeats of the slowest rank's time) and the number
        of repeats; the same on every rank.
    """

    def time_each() -> list[float]:
        times = []
        for run in runs:
            if starts_together:
                world.barrier()
            times.append(time_once(world, run))
        return times

    def slowest(rounds: list[list[float]]) -> list[float]:
        """Of several rounds of times, the median of each run's on the slowest rank."""
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
    """Seconds of ``run`` on this rank, until its device is done."""
    import torch

    start = time.perf_counter()
    run()
    if world.device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - start


def fit(points: Sequence[tuple[float, float, float]]) -> dict[str, float] | None:
    """Fit t = α · messages + β · bytes by least squares of the relative error (so that small
    messages count as large ones do), α and β ≥ 0 (Hockney, "The communication challenge for MPP",
    1994).

    Args:
        points: messages, bytes, seconds.

    Returns: ``alpha_s``, ``beta_s_per_byte`` and ``residual`` (root mean square of (model -
    measured) / measured); None for fewer than two points.
    """
    import numpy as np

    if len(points) < 2:
        return None
    rows = np.array([(messages / seconds, size / seconds) for messages, size, seconds in points])
    solutions = [np.linalg.lstsq(rows, np.ones(len(rows)), rcond=None)[0]]
    if solutions[0].min() < 0:  # the better model with one of the two parts
        solutions = list(np.diag(rows.sum(axis=0) / (rows**2).sum(axis=0)))

    def residual(solution: np.ndarray) -> float:
        return float(np.sqrt(((rows @ solution - 1) ** 2).mean()))

    best = min(solutions, key=residual)
    alpha, beta = best.tolist()
    return {"alpha_s": alpha, "beta_s_per_byte": beta, "residual": residual(best)}
