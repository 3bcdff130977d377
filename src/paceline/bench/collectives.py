"""`paceline bench collectives`: latency and bandwidth of each collective on this machine, by size
and number of ranks."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.bench.measure import NATIVE, bus_bandwidth, fits, measure_rank
from paceline.bench.page import model_words, render
from paceline.core.errors import EXIT_DONE, EXIT_SIGINT, ConfigError, nearest
from paceline.core.files import human_bytes, write_atomic
from paceline.distributed.collectives.schedules import ALGORITHMS

MAX_RANKS = 16
MAX_BYTES = 1 << 30
_DEFAULT_SIZES = "1KB,64KB,1MB,25MB"
_UNITS = {
    "": 1,
    "B": 1,
    "K": 1 << 10,
    "KB": 1 << 10,
    "M": 1 << 20,
    "MB": 1 << 20,
    "G": 1 << 30,
    "GB": 1 << 30,
}
_KEYS = ("collective", "algorithm", "world_size", "bytes", "latency_s", "bus_bandwidth_bytes_s")


@dataclass(frozen=True)
class Request:
    """What is measured: numbers of ranks, sizes in bytes, and the algorithms; ``output`` is where
    the page goes, or None."""

    ranks: tuple[int, ...]
    sizes: tuple[int, ...]
    algorithms: tuple[str, ...]
    output: Path | None = None

    @property
    def cases(self) -> list[tuple[str, str]]:
        """Pairs of collective and algorithm."""
        known = {name: (NATIVE, *found) for name, found in ALGORITHMS.items()}
        return [
            (name, one) for name, found in known.items() for one in self.algorithms if one in found
        ]


def make_request(what: str, values: dict[str, str]) -> Request:
    """Check the words of the command line.

    Raises:
        ConfigError: an unknown benchmark or algorithm, a size or number that cannot be read or is
            out of range.
    """
    if what != "collectives":
        raise ConfigError(
            f"there is no benchmark `{what}`",
            allowed="collectives",
            fix="type `paceline bench collectives`",
        )
    every = (NATIVE, *ALGORITHMS["all-reduce"])
    algorithms = tuple(dict.fromkeys(_words(values.get("algorithms", ",".join(every)))))
    for one in algorithms:
        if one not in every:
            raise ConfigError(
                f"`{one}` in --algorithms is no algorithm",
                allowed=", ".join(every),
                fix=f"did you mean `{nearest(one, every) or NATIVE}`?",
            )
    ranks = tuple(sorted({_rank_count(one) for one in _words(values.get("ranks", "2,4"))}))
    sizes = tuple(sorted({parse_size(one) for one in _words(values.get("sizes", _DEFAULT_SIZES))}))
    if not (algorithms and ranks and sizes):
        raise ConfigError(
            "an empty list was given",
            allowed="--ranks 2,4 --sizes 1KB,25MB --algorithms native,ring",
        )
    output = Path(values["output"]) if "output" in values else None
    if output is not None and (output.is_dir() or not output.absolute().parent.is_dir()):
        raise ConfigError(
            f"`--output {output}` cannot be written",
            allowed="a file in a folder that exists",
            fix="name an HTML file",
        )
    return Request(ranks, sizes, algorithms, output)


def _words(text: str) -> list[str]:
    return [one.strip() for one in text.split(",") if one.strip()]


def _rank_count(text: str) -> int:
    if not text.isdecimal() or not 2 <= int(text) <= MAX_RANKS:
        raise ConfigError(
            f"`{text}` in --ranks is no number of ranks to measure",
            allowed=f"2 to {MAX_RANKS}, as 2,4,8",
        )
    return int(text)


def parse_size(text: str) -> int:
    """``25MB`` → 26214400: bytes, whole float32 elements; units are powers of 1024.

    Raises:
        ConfigError: not a size, or out of range.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text)
    unit = _UNITS.get(found[2].upper().replace("IB", "B")) if found else None
    if found is None or unit is None:
        raise ConfigError(
            f"`{text}` in --sizes is no size", allowed="a number with B, KB, MB or GB, as 64KB"
        )
    size = int(float(found[1]) * unit) // 4 * 4
    if not 4 <= size <= MAX_BYTES:
        raise ConfigError(
            f"`{text}` in --sizes is out of range", allowed=f"4B to {MAX_BYTES >> 30}GB"
        )
    return size


def measure(request: Request) -> list[dict[str, Any]]:
    """Run it. One entry a collective, algorithm, number of ranks and size: ``collective, algorithm,
    world_size, bytes, latency_s, bus_bandwidth_bytes_s``."""
    from paceline.launch.rank_pool import run_on_ranks, warm_up

    warm_up(["paceline.bench.measure", "paceline.distributed.collectives.run"])
    results = []
    for world_size in request.ranks:
        print(f"measuring {world_size} ranks …", file=sys.stderr, flush=True)
        for one in run_on_ranks(
            measure_rank, world_size, request.sizes, request.cases, timeout_s=1800
        )[0]:
            rate = bus_bandwidth(one["collective"], world_size, one["bytes"], one["latency_s"])
            entry = {**one, "world_size": world_size, "bus_bandwidth_bytes_s": rate}
            results.append({key: entry[key] for key in _KEYS})
    return results


def bench(request: Request, as_json: bool) -> int:
    """Measure, print, write the page. Returns the exit code."""
    try:
        results = measure(request)
    except KeyboardInterrupt:
        print("\nstopped; the ranks are ended", file=sys.stderr)
        return EXIT_SIGINT
    if request.output is not None:
        write_atomic(request.output, render(results, fits(results)))
        print(f"written: {request.output}", file=sys.stderr)
    print(json.dumps(results, indent=2) if as_json else table(results))
    return EXIT_DONE


def table(results: list[dict[str, Any]]) -> str:
    """The results, beside the backend's own where that was measured, and the models fitted."""
    native = {
        (one["collective"], one["world_size"], one["bytes"]): one
        for one in results
        if one["algorithm"] == NATIVE
    }
    lines = []
    groups = dict.fromkeys((one["collective"], one["world_size"]) for one in results)
    for collective, world_size in groups:
        lines += [
            "",
            f"{collective}, {world_size} ranks",
            f"  {'size':>10}  {'algorithm':<9}  {'latency':>11}  {'bus bandwidth':>14}  × native",
        ]
        for one in results:
            if (one["collective"], one["world_size"]) != (collective, world_size):
                continue
            beside = native.get((collective, world_size, one["bytes"]))
            ratio = f"{beside['latency_s'] / one['latency_s']:.2f}" if beside else ""
            rate = f"{human_bytes(one['bus_bandwidth_bytes_s'])}/s"
            latency = f"{1e3 * one['latency_s']:.3f} ms"
            lines.append(
                f"  {human_bytes(one['bytes']):>10}  {one['algorithm']:<9}  {latency:>11} "
                f" {rate:>14}  {ratio:>8}".rstrip()
            )
    found = fits(results)
    if found:
        lines += [
            "",
            (
                "t = α · messages + β · bytes (of the rank that sends most; native counted as a"
                " ring), by least squares:"
            ),
        ]
    for one in found:
        name = f"{one['collective']} {one['algorithm']}, {one['world_size']} ranks"
        alpha, rate, residual = model_words(one)
        lines.append(f"  {name:<30} α {alpha:>11}   1/β {rate:>13}   residual {residual}")
    return "\n".join(lines).lstrip("\n")
