"""Record a topic of `paceline explain` on real ranks."""

from typing import TYPE_CHECKING

from paceline.explain.catalog import TOPICS, ExplainOptions
from paceline.explain.record import Recording
from paceline.parallel.registry import load_object

if TYPE_CHECKING:
    from paceline.distributed.communicator import Communicator


def record(options: ExplainOptions) -> Recording:
    """Run the algorithm on real ranks.

    Raises:
        RunError: a rank failed.
    """
    from paceline.launch.rank_pool import run_on_ranks, warm_up

    topic = TOPICS[options.topic]
    path = f"paceline.explain.topics.{topic.implementation}"
    processes = options.ranks if topic.processes is None else topic.processes
    if processes == 0:
        recording: Recording = load_object(path)(options)
        return recording
    warm_up([path.partition(":")[0]])
    recording, *_ = run_on_ranks(_record_rank, processes, path, options)
    return recording


def _record_rank(world: "Communicator", path: str, options: ExplainOptions) -> Recording | None:
    """Record a topic on this rank. Rank 0 returns the recording of all ranks."""
    recording: Recording = load_object(path)(world, options).record()
    return recording if world.is_rank_zero else None
