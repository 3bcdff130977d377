"""`paceline explain`: an algorithm on real ranks, recorded step by step; as text, as JSON, and as a
page that plays it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

#: Each topic: its module in :mod:`paceline.explain.topics`, and what it shows.
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


@dataclass(frozen=True)
class ExplainOptions:
    """What is recorded. ``elements`` and ``algorithm`` are used by the collectives alone."""

    topic: str
    ranks: int
    elements: int = 0
    algorithm: str = ""


@dataclass(frozen=True)
class Recording:
    """An algorithm that has run.

    Args:
        about: what the algorithm does, in a few sentences.
        is_correct: the result was what it must be.
        facts: labels and values for the head of the page.
        lines: the recording for a terminal.
        captions: one for each frame that the page plays.
        player: what page.js draws: ``kind`` (chunks, timeline or memory), and the data of that
            kind.
        content: what `--json` prints.
    """

    title: str
    about: str
    is_correct: bool
    facts: list[tuple[str, str]]
    lines: list[str]
    captions: list[str]
    player: Mapping[str, object]
    content: object

    def text(self) -> str:
        """Return the recording for a terminal."""
        return "\n".join(self.lines)

    def page(self) -> str:
        """Return one HTML file that opens offline and plays the recording."""
        from paceline.observe.report.html import template

        page = template("page.html.jinja", Path(__file__).parent)
        return str(page.render(recording=self, data={"captions": self.captions, **self.player}))


def record(options: ExplainOptions) -> Recording:
    """Run the algorithm on real ranks."""
    from paceline.launch.rank_pool import warm_up

    topic = import_module(f"paceline.explain.topics.{TOPICS[options.topic][0]}")
    warm_up(topic.PRELOAD)
    record_topic: Callable[[ExplainOptions], Recording] = topic.record
    return record_topic(options)
