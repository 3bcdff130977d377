"""`paceline bench collectives`: measure latency and bandwidth of the collectives."""

import json
import re
import sys
from argparse import Namespace
from dataclasses import dataclass

from paceline.bench.collectives import NATIVE, BenchOptions, fits, measure, table
from paceline.commands.options import (
    Choice,
    CommaList,
    Integer,
    InvalidValue,
    OptionParser,
    OutputFile,
)
from paceline.commands.reports import write_output
from paceline.core.errors import EXIT_DONE
from paceline.strategies.reducers.all_reduce.schedules import ALGORITHMS

_MAX_RANKS = 16
_MAX_BYTES = 1 << 30
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


@dataclass(frozen=True)
class MessageSize:
    """A size in bytes, rounded down to a multiple of 4 (float32). Units are powers of 1024."""

    allowed: str = f"4B to {_MAX_BYTES >> 30}GB, with a unit of B, KB, MB or GB"

    def __call__(self, text: str) -> int:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text)
        unit = _UNITS.get(match[2].upper().replace("IB", "B")) if match else None
        if match is None or unit is None:
            raise InvalidValue("is not a size", allowed=self.allowed, fix="use e.g. 64KB")
        size = int(float(match[1]) * unit) // 4 * 4
        if not 4 <= size <= _MAX_BYTES:
            raise InvalidValue("is out of range", allowed=self.allowed)
        return size


def add_arguments(parser: OptionParser) -> None:
    parser.add_option(
        "--ranks", CommaList(Integer(2, _MAX_RANKS)), "N,...", "numbers of ranks", default="2,4"
    )
    parser.add_option(
        "--sizes",
        CommaList(MessageSize()),
        "SIZE,...",
        "sizes of the messages",
        default="1KB,64KB,1MB,25MB",
    )
    names = (NATIVE, *ALGORITHMS["all-reduce"])
    parser.add_option(
        "--algorithms",
        CommaList(Choice(names)),
        "NAME,...",
        "algorithms to compare",
        default=",".join(names),
    )
    parser.add_option(
        "--output", OutputFile("an HTML file"), "FILE", "HTML page with charts to write"
    )
    parser.example = "paceline bench collectives --ranks 2,4 --sizes 1KB,25MB --output bench.html"


def run(args: Namespace) -> int:
    """Measure, print the results, and write the page."""
    options = make_options(args)
    results = []
    for world_size in options.ranks:
        print(f"measuring {world_size} ranks …", file=sys.stderr, flush=True)
        results += measure(options, world_size)
    if args.output is not None:
        from paceline.bench.page import render

        write_output(args.output, render(results, fits(results)))
    print(json.dumps(results, indent=2) if args.json else table(results))
    return EXIT_DONE


def make_options(args: Namespace) -> BenchOptions:
    return BenchOptions(tuple(sorted(args.ranks)), tuple(sorted(args.sizes)), args.algorithms)
