"""`paceline explain`: record an algorithm on real ranks step by step, as text, JSON, and an
animated page."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

#: Module in :mod:`paceline.explain.topics` and description of each topic.
TOPICS = {
    "all-reduce": (
        "collective",
        "the steps of an all-reduce: which chunk is sent where, and what each rank has",
    ),
    "broadcast": ("collective", "the steps of a broadcast"),
    "ddp": ("ddp", "gradient buckets during backward, and their overlapping all-reduce"),
    "zero": ("zero", "which rank stores which shard of the training state, for each ZeRO stage"),
    "dp": ("dp", "one process that controls several devices with threads"),
}


@dataclass(frozen=True)
class ExplainOptions:
    """What to record. Only collectives use ``elements`` and ``algorithm``."""

    topic: str
    ranks: int
    elements: int = 0
    algorithm: str = ""


@dataclass(frozen=True)
class Recording:
    """The recording of an algorithm.

    Args:
        about: description of the algorithm in a few sentences.
        is_correct: the algorithm gave the correct result.
        facts: labels and values for the top of the page.
        lines: the recording for a terminal.
        captions: one for each frame of the animation.
        player: input of page.js: ``kind`` (chunks, timeline or memory), and the data of that kind.
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
        """Return one HTML file that shows the recording as an animation and works offline."""
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
