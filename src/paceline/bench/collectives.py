"""`paceline bench collectives`: measure latency and bandwidth of each collective on this machine by
size and number of ranks, and fit the α–β model to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

from paceline.core.files import human_bytes
from paceline.distributed.link import fit, time_collective
from paceline.strategies.reducers.all_reduce.schedules import ALGORITHMS, sent

if TYPE_CHECKING:
    import torch

    from paceline.distributed.communicator import Communicator

NATIVE = "native"
#: approximate duration of a measurement, within these numbers of repeats
_BUDGET_S = 0.8
_MIN_REPEATS, _MAX_REPEATS = 7, 30
_WARM_UP = 2


class Timing(TypedDict):
    """A measured case. ``bytes``: size of the tensor. ``latency_s``: median over the repeats of the
    slowest rank's time."""

    collective: str
    algorithm: str
    world_size: int
    bytes: int
    latency_s: float
    bus_bandwidth_bytes_s: float


@dataclass(frozen=True)
class CostModel:
    """The model of a collective, an algorithm and a world size. ``residual``: root mean square of
    (model - measured) / measured."""

    collective: str
    algorithm: str
    world_size: int
    alpha_s: float
    beta_s_per_byte: float
    residual: float

    def time_s(self, size_bytes: int) -> float:
        messages, moved = load(self.collective, self.algorithm, self.world_size, size_bytes)
        return self.alpha_s * messages + self.beta_s_per_byte * moved

    def texts(self) -> tuple[str, str, str]:
        """Return α, 1/β and the residual as text: ``35.0 µs``, ``1.2 GiB/s``, ``8 %``."""
        rate = "no limit"
        if self.beta_s_per_byte:
            rate = f"{human_bytes(1 / self.beta_s_per_byte)}/s"
        return f"{1e6 * self.alpha_s:.1f} µs", rate, f"{100 * self.residual:.0f} %"


@dataclass(frozen=True)
class BenchOptions:
    """What to measure: numbers of ranks, message sizes in bytes, and algorithms."""

    ranks: tuple[int, ...]
    sizes: tuple[int, ...]
    algorithms: tuple[str, ...]

    @property
    def cases(self) -> list[tuple[str, str]]:
        """Pairs of a collective and an algorithm that it supports."""
        return [
            (collective, algorithm)
            for collective, supported in ALGORITHMS.items()
            for algorithm in self.algorithms
            if algorithm in (NATIVE, *supported)
        ]


def measure(options: BenchOptions, world_size: int) -> list[Timing]:
    """Measure each collective, algorithm and size on ``world_size`` ranks."""
    from paceline.launch.rank_pool import run_on_ranks, warm_up

    warm_up(["paceline.bench.collectives", "paceline.strategies.reducers.all_reduce.run"])
    timings: list[Timing] = run_on_ranks(
        measure_rank, world_size, options.sizes, options.cases, timeout_s=1800
    )[0]
    return timings


def measure_rank(
    world: Communicator, sizes: Sequence[int], cases: Sequence[tuple[str, str]]
) -> list[Timing]:
    """Time every case at every size on this rank. The algorithms alternate, so that other load on
    the machine affects all of them equally.

    Args:
        sizes: bytes of the tensor (float32).
        cases: pairs of collective and algorithm.
    """
    import torch

    timings = []
    for size in sizes:
        tensor = torch.zeros(max(1, size // 4))
        times, _ = time_collective(
            world,
            [_runner(world, tensor, *case) for case in cases],
            num_warm_up=_WARM_UP,
            min_repeats=_MIN_REPEATS,
            max_repeats=_MAX_REPEATS,
            budget_s=_BUDGET_S,
            starts_together=True,
        )
        for (collective, algorithm), seconds in zip(cases, times, strict=True):
            rate = bus_bandwidth(collective, world.size, tensor.nbytes, seconds)
            timings.append(
                Timing(
                    collective=collective,
                    algorithm=algorithm,
                    world_size=world.size,
                    bytes=tensor.nbytes,
                    latency_s=seconds,
                    bus_bandwidth_bytes_s=rate,
                )
            )
    return timings


def _runner(
    world: Communicator, tensor: torch.Tensor, collective: str, algorithm: str
) -> Callable[[], object]:
    import torch.distributed as dist

    from paceline.strategies.reducers.all_reduce import run as collectives

    if collective == "all-reduce":
        if algorithm == NATIVE:
            return lambda: dist.all_reduce(tensor, group=world.group)
        return lambda: collectives.all_reduce(world, tensor, algorithm)
    if algorithm == NATIVE:
        return lambda: dist.broadcast(tensor, src=world.ranks[0], group=world.group)
    return lambda: collectives.broadcast(world, tensor, algorithm)


def bus_bandwidth(collective: str, world_size: int, size_bytes: int, latency_s: float) -> float:
    """Return the bytes per second, comparable between collectives and world sizes: 2(N-1)/N × bytes
    / time for an all-reduce, bytes / time for a broadcast (nccl-tests, doc/PERFORMANCE.md)."""
    factor = 2 * (world_size - 1) / world_size if collective == "all-reduce" else 1.0
    return factor * size_bytes / latency_s


def load(collective: str, algorithm: str, world_size: int, size_bytes: int) -> tuple[int, int]:
    """Return the messages and bytes of the rank that sends most. The backend's collective counts as
    a ring, because its algorithm is not known."""
    schedule = "ring" if algorithm == NATIVE else algorithm
    ranks = sent(schedule, world_size, size_bytes // 4, 4, collective)
    return max(rank.messages for rank in ranks), max(rank.bytes for rank in ranks)


def fits(timings: Sequence[Timing]) -> list[CostModel]:
    """Fit a model to each collective, algorithm and world size that was measured at two or more
    sizes."""
    groups: dict[tuple[str, str, int], list[tuple[float, float, float]]] = {}
    for timing in timings:
        key = (timing["collective"], timing["algorithm"], timing["world_size"])
        point = (*load(*key, timing["bytes"]), timing["latency_s"])
        groups.setdefault(key, []).append(point)
    models = []
    for key, points in groups.items():
        model = fit(points)
        if model is not None:
            costs = (model["alpha_s"], model["beta_s_per_byte"], model["residual"])
            models.append(CostModel(*key, *costs))
    return models


def table(timings: list[Timing]) -> str:
    """Return the results as text, relative to the backend's collective if that was measured, and
    the fitted cost models."""
    lines = []
    for (collective, world_size), cases in groups_of(timings).items():
        lines += [
            "",
            f"{collective}, {world_size} ranks",
            f"  {'size':>10}  {'algorithm':<9}  {'latency':>11}  {'bus bandwidth':>14}  × native",
        ]
        for timing in cases:
            size, rate = human_bytes(timing["bytes"]), timing["bus_bandwidth_bytes_s"]
            lines.append(
                f"  {size:>10}  {timing['algorithm']:<9}"
                f"  {1e3 * timing['latency_s']:>8.3f} ms  {human_bytes(rate) + '/s':>14}"
                f"  {native_ratio(timing, cases):>8}".rstrip()
            )
    models = fits(timings)
    if models:
        lines += [
            "",
            "t = α · messages + β · bytes (of the rank that sends most; native counted as a"
            " ring), by least squares:",
        ]
    for model in models:
        name = f"{model.collective} {model.algorithm}, {model.world_size} ranks"
        alpha, rate_text, residual = model.texts()
        lines.append(f"  {name:<30} α {alpha:>11}   1/β {rate_text:>13}   residual {residual}")
    return "\n".join(lines).lstrip("\n")


def groups_of(timings: list[Timing]) -> dict[tuple[str, int], list[Timing]]:
    """Return the cases of each collective and world size, in their order."""
    groups: dict[tuple[str, int], list[Timing]] = {}
    for timing in timings:
        groups.setdefault((timing["collective"], timing["world_size"]), []).append(timing)
    return groups


def native_ratio(timing: Timing, group: list[Timing]) -> str:
    """Return the speed relative to the backend's collective, which is a case of the same group;
    empty if that was not measured."""
    for other in group:
        if other["algorithm"] == NATIVE and other["bytes"] == timing["bytes"]:
            return f"{other['latency_s'] / timing['latency_s']:.2f}"
    return ""
