"""Times of collectives on real ranks, and the α–β model fitted to them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from paceline.distributed.collectives.schedules import sent
from paceline.distributed.link import fit

if TYPE_CHECKING:
    from paceline.distributed.communicator import Communicator

NATIVE = "native"
#: a measurement goes on for about this long, within these numbers of repeats
_BUDGET_S = 0.8
_FEWEST, _MOST = 7, 30
_WARM_UP = 2


def measure_rank(
    world: Communicator, sizes: Sequence[int], cases: Sequence[tuple[str, str]]
) -> list[dict[str, Any]]:
    """Time every case at every size, on this rank. The algorithms take turns, so that what else the
    machine does meets all alike.

    Args:
        sizes: bytes of the tensor (float32).
        cases: pairs of collective and algorithm.

    Returns: one entry a case and size: ``collective, algorithm, bytes, latency_s`` (median over the
    repeats of the slowest rank's time) and ``repeats``.
    """
    import torch

    found = []
    for size in sizes:
        tensor = torch.zeros(max(1, size // 4))
        runs = {case: _runner(world, tensor, *case) for case in cases}
        longest = 0.0
        for run in runs.values():
            for _ in range(_WARM_UP):
                longest = max(longest, _timed(world, run))
        slowest = max(world.gather_numbers(longest))
        repeats = max(_FEWEST, min(_MOST, int(_BUDGET_S / max(slowest, 1e-6))))
        times: dict[tuple[str, str], list[float]] = {case: [] for case in cases}
        for _ in range(repeats):
            for case, run in runs.items():
                times[case].append(max(world.gather_numbers(_timed(world, run))))
        for (collective, algorithm), seconds in times.items():
            entry = {"collective": collective, "algorithm": algorithm, "bytes": 4 * tensor.numel()}
            found.append({**entry, "latency_s": median(seconds), "repeats": repeats})
    return found


def _timed(world: Communicator, run: Any) -> float:
    world.barrier()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _runner(world: Communicator, tensor: Any, collective: str, algorithm: str) -> Any:
    import torch.distributed as dist

    from paceline.distributed.collectives import run as collectives

    if collective == "all-reduce":
        if algorithm == NATIVE:
            return lambda: dist.all_reduce(tensor, group=world.group)
        return lambda: collectives.all_reduce(world, tensor, algorithm)
    if algorithm == NATIVE:
        return lambda: dist.broadcast(tensor, src=world.ranks[0], group=world.group)
    return lambda: collectives.broadcast(world, tensor, algorithm)


def bus_bandwidth(collective: str, world_size: int, size_bytes: int, latency_s: float) -> float:
    """Bytes a second, comparable between collectives and world sizes: 2(N-1)/N × bytes / time for
    an all-reduce, bytes / time for a broadcast (nccl-tests, doc/PERFORMANCE.md)."""
    factor = 2 * (world_size - 1) / world_size if collective == "all-reduce" else 1.0
    return factor * size_bytes / latency_s


def load(collective: str, algorithm: str, world_size: int, size_bytes: int) -> tuple[int, int]:
    """Messages and bytes of the rank that sends most; for the backend's own, those of a ring (its
    algorithm is its affair)."""
    ranks = sent(
        "ring" if algorithm == NATIVE else algorithm, world_size, size_bytes // 4, 4, collective
    )
    return max(one.messages for one in ranks), max(one.bytes for one in ranks)


def fits(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The model of each collective, algorithm and world size that was measured at two sizes or
    more."""
    groups: dict[tuple[str, str, int], list[tuple[float, float, float]]] = {}
    for one in results:
        key = (one["collective"], one["algorithm"], one["world_size"])
        groups.setdefault(key, []).append((*load(*key, one["bytes"]), one["latency_s"]))
    found = []
    for (collective, algorithm, world_size), points in groups.items():
        model = fit(points)
        if model is not None:
            found.append(
                {
                    "collective": collective,
                    "algorithm": algorithm,
                    "world_size": world_size,
                    **model,
                }
            )
    return found
