"""`paceline explain`: run an algorithm on real ranks and show it step by step."""

import json
from argparse import Namespace

from paceline.commands.options import (
    Choice,
    Integer,
    OptionParser,
    OutputFile,
    Text,
    write_output,
)
from paceline.core.errors import EXIT_DONE, EXIT_FAILED, ConfigError
from paceline.distributed.collectives.schedules import ALGORITHMS, check_algorithm
from paceline.explain.run import TOPICS, ExplainOptions, record

_MAX_RANKS = 16
_MAX_ELEMENTS = 10_000


def add_arguments(parser: OptionParser) -> None:
    parser.add_argument(
        "topic", type=Choice(tuple(TOPICS)), metavar="TOPIC", help="algorithm to explain"
    )
    parser.add_argument(
        "--ranks",
        type=Integer(1, _MAX_RANKS),
        metavar="N",
        help="number of ranks (default: 4 for a collective, else 2)",
    )
    parser.add_argument(
        "--elements",
        type=Integer(1, _MAX_ELEMENTS),
        metavar="N",
        help="number of elements of a collective's tensor (default: 2 per rank)",
    )
    parser.add_argument(
        "--algorithm",
        type=Text(", ".join(ALGORITHMS["all-reduce"])),
        metavar="NAME",
        help="algorithm of a collective (default: ring)",
    )
    parser.add_argument(
        "--output",
        type=OutputFile("an HTML file"),
        metavar="FILE",
        help="animated HTML page to write",
    )
    parser.example = "paceline explain all-reduce --ranks 4 --algorithm tree --output tree.html"


def run(args: Namespace) -> int:
    """Record, print, and write the page. Exit code 1: the algorithm gave a wrong result."""
    recording = record(make_options(args))
    if args.output is not None:
        write_output(args.output, recording.page())
    print(json.dumps(recording.content) if args.json else recording.text())
    return EXIT_DONE if recording.is_correct else EXIT_FAILED


def make_options(args: Namespace) -> ExplainOptions:
    """Check the options against the topic.

    Raises:
        ConfigError: the topic does not support an option, or the number of ranks is too small.
    """
    topic = args.topic
    if topic in ALGORITHMS:
        algorithm = "ring" if args.algorithm is None else args.algorithm
        check_algorithm(algorithm, topic)
        ranks = args.ranks or 4
        return ExplainOptions(topic, ranks, args.elements or 2 * ranks, algorithm)
    for name in ("algorithm", "elements"):
        if getattr(args, name) is not None:
            raise ConfigError(
                f"`paceline explain {topic}` has no option `--{name}`",
                allowed="--ranks, --output, --json",
                fix="omit it",
            )
    if args.ranks == 1:
        raise ConfigError("`--ranks 1` is out of range", allowed=f"2 to {_MAX_RANKS}")
    return ExplainOptions(topic, args.ranks or 2)
