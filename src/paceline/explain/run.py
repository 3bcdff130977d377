"""Record a topic of `paceline explain` on real ranks."""

from collections.abc import Callable
from importlib import import_module

from paceline.explain.catalog import TOPICS, ExplainOptions
from paceline.explain.record import Recording


def record(options: ExplainOptions) -> Recording:
    """Run the algorithm on real ranks."""
    from paceline.launch.rank_pool import warm_up

    topic = import_module(f"paceline.explain.topics.{TOPICS[options.topic].module}")
    warm_up(topic.PRELOAD)
    record_topic: Callable[[ExplainOptions], Recording] = topic.record
    return record_topic(options)
