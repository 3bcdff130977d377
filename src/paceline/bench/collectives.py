"""`paceline bench collectives`: latency and bandwidth of each collective on this machine, by size
and number of ranks."""

from dataclasses import dataclass
from typing import Any

from paceline.bench.measure import NATIVE, bus_bandwidth, fits, measure_rank
from paceline.bench.page import model_words
from paceline.core.files import human_bytes
from paceline.distributed.collectives.schedules import ALGORITHMS

_KEYS = ("collective", "algorithm", "world_size", "bytes", "latency_s", "bus_bandwidth_bytes_s")


@dataclass(frozen=True)
class BenchOptions:
    """What is measured: numbers of ranks, message sizes in bytes, and algorithms."""

    ranks: tuple[int, ...]
    sizes: tuple[int, ...]
    algorithms: tuple[str, ...]

    @property
    def cases(self) -> list[tuple[str, str]]:
        """Pairs of a collective and an algorithm that it supports."""
        supported = {name: (NATIVE, *algorithms) for name, algorithms in ALGORITHMS.items()}
        return [
            (collective, algorithm)
            for collective, algorithms in supported.items()
            for algorithm in self.algorithms
            if algorithm in algorithms
        ]


def measure(options: BenchOptions, world_size: int) -> list[dict[str, Any]]:
    """Measure on ``world_size`` ranks.

    Returns:
        An entry for each collective, algorithm and size: ``collective, algorithm, world_size,
        bytes, latency_s, bus_bandwidth_bytes_s``.
    """
    from paceline.launch.rank_pool import run_on_ranks, warm_up

    warm_up(["paceline.bench.measure", "paceline.distributed.collectives.run"])
    results = []
    for case in run_on_ranks(
        measure_rank, world_size, options.sizes, options.cases, timeout_s=1800
    )[0]:
        rate = bus_bandwidth(case["collective"], world_size, case["bytes"], case["latency_s"])
        entry = {**case, "world_size": world_size, "bus_bandwidth_bytes_s": rate}
        results.append({key: entry[key] for key in _KEYS})
    return results


def table(results: list[dict[str, Any]]) -> str:
    """The results as text, relative to the backend's own collective where that was measured, and
    the fitted cost models."""
    native = {
        (case["collective"], case["world_size"], case["bytes"]): case
        for case in results
        if case["algorithm"] == NATIVE
    }
    lines = []
    groups = dict.fromkeys((case["collective"], case["world_size"]) for case in results)
    for collective, world_size in groups:
        lines += [
            "",
            f"{collective}, {world_size} ranks",
            f"  {'size':>10}  {'algorithm':<9}  {'latency':>11}  {'bus bandwidth':>14}  × native",
        ]
        lines += [
            _row(case, native.get((collective, world_size, case["bytes"])))
            for case in results
            if (case["collective"], case["world_size"]) == (collective, world_size)
        ]
    models = fits(results)
    if models:
        lines += [
            "",
            (
                "t = α · messages + β · bytes (of the rank that sends most; native counted as a"
                " ring), by least squares:"
            ),
        ]
    for model in models:
        name = f"{model['collective']} {model['algorithm']}, {model['world_size']} ranks"
        alpha, rate, residual = model_words(model)
        lines.append(f"  {name:<30} α {alpha:>11}   1/β {rate:>13}   residual {residual}")
    return "\n".join(lines).lstrip("\n")


def _row(case: dict[str, Any], native: dict[str, Any] | None) -> str:
    ratio = f"{native['latency_s'] / case['latency_s']:.2f}" if native else ""
    rate = f"{human_bytes(case['bus_bandwidth_bytes_s'])}/s"
    latency = f"{1e3 * case['latency_s']:.3f} ms"
    return (
        f"  {human_bytes(case['bytes']):>10}  {case['algorithm']:<9}  {latency:>11} "
        f" {rate:>14}  {ratio:>8}".rstrip()
    )
