"""Times of collectives on real ranks, and the α–β model fitted to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paceline.distributed.collectives.schedules import sent
from paceline.distributed.link import fit, time_collective

if TYPE_CHECKING:
    from paceline.distributed.communicator import Communicator

NATIVE = "native"
#: a measurement goes on for about this long, within these numbers of repeats
_BUDGET_S = 0.8
_MIN_REPEATS, _MAX_REPEATS = 7, 30
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

    results = []
    for size in sizes:
        tensor = torch.zeros(max(1, size // 4))
        runs = [_runner(world, tensor, *case) for case in cases]
        times, repeats = time_collective(
            world,
            runs,
            num_warm_up=_WARM_UP,
            min_repeats=_MIN_REPEATS,
            max_repeats=_MAX_REPEATS,
            budget_s=_BUDGET_S,
            starts_together=True,
        )
        for (collective, algorithm), seconds in zip(cases, times, strict=True):
            entry = {"collective": collective, "algorithm": algorithm, "bytes": 4 * tensor.numel()}
            results.append({**entry, "latency_s": seconds, "repeats": repeats})
    return results


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
