"""`paceline explain`: an algorithm on real ranks, recorded step by step; as text, as JSON, and as a
page that plays it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from paceline.core.errors import EXIT_DONE, EXIT_FAILED, EXIT_SIGINT, ConfigError, nearest
from paceline.core.files import write_atomic
from paceline.distributed.collectives.schedules import ALGORITHMS, check_algorithm

#: what can be explained → module of this package, and what it is
TOPICS = {
    "all-reduce": (
        "collective",
        "each step of an all-reduce: which chunk goes where, what each rank holds",
    ),
    "broadcast": ("collective", "each step of a broadcast"),
    "ddp": ("ddp", "gradient buckets that fill during backward, and their all-reduce beside it"),
    "zero": ("zero", "who holds which part of the training state, stage by stage"),
    "dp": ("dp", "one process that drives several devices by threads"),
}
MAX_RANKS = 16
MAX_ELEMENTS = 10_000


@dataclass(frozen=True)
class Request:
    """What was asked for. ``output``: where the page is written, or None."""

    topic: str
    ranks: int
    elements: int
    algorithm: str
    output: Path | None = None


def make_request(topic: str, values: dict[str, Any]) -> Request:
    """Check the words of the command line.

    Raises:
        ConfigError: an unknown topic or algorithm, a number out of range, a page that could not be
            written.
    """
    if topic not in TOPICS:
        raise ConfigError(
            f"there is nothing to explain called `{topic}`",
            allowed=", ".join(TOPICS),
            fix=f"did you mean `paceline explain {nearest(topic, TOPICS) or 'all-reduce'}`?",
        )
    collective = topic in ALGORITHMS
    foreign = [name for name in ("algorithm", "elements") if name in values and not collective]
    if foreign:
        raise ConfigError(
            f"`explain {topic}` has no --{foreign[0]}",
            allowed="--ranks, --output, --json",
            fix=f"leave --{foreign[0]} out",
        )
    fewest = 1 if collective else 2
    ranks = _in_range("ranks", values.get("ranks", 4 if collective else 2), fewest, MAX_RANKS)
    elements = _in_range("elements", values.get("elements", 2 * ranks), 1, MAX_ELEMENTS)
    algorithm = values.get("algorithm", "ring" if collective else "")
    if collective:
        check_algorithm(algorithm, topic)
    output = Path(values["output"]) if "output" in values else None
    if output is not None and (output.is_dir() or not output.absolute().parent.is_dir()):
        raise ConfigError(
            f"`--output {output}` cannot be written",
            allowed="a file in a folder that exists",
            fix="name an HTML file",
        )
    return Request(topic, ranks, elements, algorithm, output)


def _in_range(name: str, value: int, low: int, high: int) -> int:
    if not low <= value <= high:
        raise ConfigError(f"`--{name} {value}` is out of range", allowed=f"{low} to {high:,}")
    return value


def explain(request: Request, as_json: bool) -> int:
    """Run it, print it, write its page. Returns the exit code: 1 where a result was not what it
    must be."""
    from paceline.launch.rank_pool import warm_up

    topic = import_module(f"paceline.explain.topics.{TOPICS[request.topic][0]}")
    try:
        warm_up(topic.PRELOAD)
        story = topic.tell(request)
    except KeyboardInterrupt:
        print("\nstopped; the ranks are ended", file=sys.stderr)
        return EXIT_SIGINT
    if request.output is not None:
        write_atomic(request.output, _page(topic, story))
        print(f"written: {request.output}", file=sys.stderr)
    print(
        json.dumps(topic.surface(story) if request.topic in ALGORITHMS else story)
        if as_json
        else topic.text(story)
    )
    return EXIT_DONE if story["result_ok"] else EXIT_FAILED


def _page(topic: Any, story: dict[str, Any]) -> str:
    from paceline.explain.page import render

    text: Callable[[dict[str, Any]], str] = topic.text
    return render(
        topic.title(story), topic.about(story), topic.facts(story), topic.player(story), text(story)
    )
