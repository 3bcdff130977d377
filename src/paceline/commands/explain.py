"""`paceline explain`: run an algorithm on real ranks and show it step by step."""

import json
from argparse import Namespace

from paceline.commands.options import (
    AnyText,
    Choice,
    Integer,
    OptionParser,
    OutputFile,
)
from paceline.commands.reports import write_output
from paceline.core.errors import EXIT_DONE, EXIT_FAILED, ConfigError, unknown_name
from paceline.explain.catalog import MAX_RANKS, TOPICS, ExplainOptions
from paceline.explain.draw import draw_picture
from paceline.explain.page import render_page
from paceline.explain.run import record
from paceline.explain.text import render_text

_MAX_ELEMENTS = 10_000


def add_arguments(parser: OptionParser) -> None:
    parser.add_option(
        "topic",
        Choice(tuple(TOPICS), renamed={"dp": "data-parallel"}),
        "TOPIC",
        "algorithm to explain (default: list the topics)",
        nargs="?",
    )
    parser.add_option(
        "--ranks", Integer(1, MAX_RANKS), "N", "number of ranks (default: depends on the topic)"
    )
    parser.add_option(
        "--elements",
        Integer(1, _MAX_ELEMENTS),
        "N",
        "number of elements of a collective's tensor (default: 2 per rank)",
    )
    parser.add_option(
        "--algorithm",
        AnyText("; ".join(dict.fromkeys(_names(topic) for topic in TOPICS if _names(topic)))),
        "NAME",
        "variant of the algorithm, for topics that have several",
    )
    parser.add_option("--output", OutputFile("an HTML file"), "FILE", "animated HTML page to write")
    parser.add_option("--svg", OutputFile("an SVG file"), "FILE", "static picture to write")
    parser.example = "paceline explain all-reduce --ranks 4 --algorithm tree --output tree.html"


def _names(topic: str) -> str:
    return ", ".join(TOPICS[topic].algorithms)


def run(args: Namespace) -> int:
    """Record, print, and write the page and the picture; without a topic, list the topics. Exit
    code 1: a check failed."""
    if args.topic is None:
        _list_topics(args)
        return EXIT_DONE
    recording = record(make_options(args))
    if args.output is not None:
        write_output(args.output, render_page(recording))
    if args.svg is not None:
        write_output(args.svg, draw_picture(recording))
    print(json.dumps(recording.content()) if args.json else render_text(recording))
    return EXIT_DONE if recording.is_correct else EXIT_FAILED


def _list_topics(args: Namespace) -> None:
    for name in ("ranks", "elements", "algorithm", "output", "svg"):
        if getattr(args, name) is not None:
            raise ConfigError(
                "`--{name}` requires a topic",
                code="missing-topic",
                allowed=", ".join(TOPICS),
                fix="run e.g. `paceline explain all-reduce --{name} …`",
                name=name,
            )
    if args.json:
        topics = [{"name": name, "summary": topic.summary} for name, topic in TOPICS.items()]
        print(json.dumps({"topics": topics}))
        return
    width = max(map(len, TOPICS))
    print("Topics, in reading order. Run `paceline explain TOPIC`.")
    for name, topic in TOPICS.items():
        print(f"  {name:<{width}}  {topic.summary}")


def make_options(args: Namespace) -> ExplainOptions:
    """Check the options against the topic.

    Raises:
        ConfigError: the topic does not support an option or its value.
    """
    name, topic = args.topic, TOPICS[args.topic]
    default_ranks, min_ranks, max_ranks = topic.ranks
    supported = {
        "ranks": min_ranks < max_ranks,
        "algorithm": bool(topic.algorithms),
        "elements": topic.has_elements,
    }
    for option, is_supported in supported.items():
        if getattr(args, option) is not None and not is_supported:
            others = [f"--{each}" for each, has in supported.items() if has]
            raise ConfigError(
                "`paceline explain {name}` has no option `--{option}`",
                code="unknown-topic-option",
                allowed=", ".join([*others, "--output", "--svg", "--json"]),
                fix="omit it",
                name=name,
                option=option,
            )
    if args.ranks is not None and not min_ranks <= args.ranks <= max_ranks:
        raise ConfigError(
            "`--ranks {rank_list}` is out of range for `paceline explain {name}`",
            code="ranks-out-of-range",
            allowed="{min_ranks} to {max_ranks}",
            rank_list=args.ranks,
            name=name,
            min_ranks=min_ranks,
            max_ranks=max_ranks,
        )
    ranks = args.ranks or default_ranks
    if ranks % topic.multiple_of:
        raise ConfigError(
            "`--ranks {rank_list}` does not form a mesh",
            code="ranks-do-not-form-mesh",
            allowed="4, 8, 12 or 16",
            fix="use `--ranks 4`, which is data 2 × tensor 2",
            rank_list=ranks,
        )
    algorithm = args.algorithm or next(iter(topic.algorithms), "")
    if algorithm and algorithm not in topic.algorithms:
        raise unknown_name(f"{name} algorithm", algorithm, topic.algorithms, allowed=_names(name))
    elements = (args.elements or 2 * ranks) if topic.has_elements else 0
    return ExplainOptions(name, ranks, elements, algorithm)
