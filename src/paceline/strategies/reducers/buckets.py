"""Buckets of gradients, and the reducer that the config asks for."""

from collections.abc import Mapping

from torch import nn

from paceline.distributed.communicator import Communicator
from paceline.parallel.buckets.gradients import GradientBuckets
from paceline.parallel.buckets.reducer import GradientReducer
from paceline.parallel.strategy import Strategy
from paceline.strategies.reducers.all_reduce.reducer import AllReduceReducer
from paceline.strategies.reducers.compression.reducer import CompressedReducer


def make_buckets(
    strategy: Strategy, trained: Mapping[str, nn.Parameter], group: Communicator
) -> tuple[GradientBuckets, GradientReducer | None]:
    """Put gradients of ``trained`` into buckets, which are summed over ``group``. A collective.

    Returns:
        (the buckets, what sums them as the config requires); None: the backend's all-reduce.
    """
    config, world = strategy.config, strategy.world
    reducer: GradientReducer | None = None
    if world.axes.data > 1 and config.compression.chain:
        reducer = CompressedReducer(config, world)
    elif world.axes.data > 1 and config.parallel.all_reduce_algorithm != "native":
        reducer = AllReduceReducer(config, world)
    cap_bytes = int(config.parallel.bucket_cap_mb * 2**20)
    buckets = GradientBuckets(trained.values(), cap_bytes, group, reducer)
    if reducer is not None:
        reducer.bind(buckets, trained)
        strategy.notices += reducer.notices
    return buckets, reducer
