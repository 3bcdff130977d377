"""`paceline explain`: an algorithm on real ranks, recorded step by step; as text, as JSON, and as a
page that plays it."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from paceline.distributed.collectives.schedules import ALGORITHMS

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
    """An algorithm that has run. ``content``: what was recorded, as the topic's module
    describes."""

    topic: str
    content: dict[str, Any]

    @property
    def is_correct(self) -> bool:
        """Whether the result was what it must be."""
        return bool(self.content["result_ok"])

    def as_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        if self.topic in ALGORITHMS:
            printed: dict[str, Any] = _module(self.topic).surface(self.content)
            return printed
        return self.content

    def text(self) -> str:
        """The recording for a terminal."""
        render: Callable[[dict[str, Any]], str] = _module(self.topic).text
        return render(self.content)

    def page(self) -> str:
        """The recording as an HTML page that plays it."""
        from paceline.explain.page import render

        topic = _module(self.topic)
        return render(
            topic.title(self.content),
            topic.about(self.content),
            topic.facts(self.content),
            topic.player(self.content),
            self.text(),
        )


def record(options: ExplainOptions) -> Recording:
    """Run the algorithm on real ranks."""
    from paceline.launch.rank_pool import warm_up

    topic = _module(options.topic)
    warm_up(topic.PRELOAD)
    return Recording(options.topic, topic.tell(options))


def _module(topic: str) -> Any:
    return import_module(f"paceline.explain.topics.{TOPICS[topic][0]}")
