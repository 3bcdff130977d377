"""The topics of `paceline explain`, and what they accept. Imports no torch."""

from dataclasses import dataclass

from paceline.strategies.reducers.all_reduce.schedules import ALGORITHMS

MAX_RANKS = 16


@dataclass(frozen=True)
class Topic:
    """A topic.

    Args:
        module: module in :mod:`paceline.explain.topics`.
        ranks: default, minimum and maximum number of ranks (or devices).
        algorithms: names that `--algorithm` accepts; the first is the default.
        has_elements: whether `--elements` sets the size of a tensor.
    """

    module: str
    summary: str
    ranks: tuple[int, int, int] = (2, 2, MAX_RANKS)
    algorithms: tuple[str, ...] = ()
    has_elements: bool = False


#: All topics in reading order.
TOPICS = {
    "data-parallel": Topic(
        "data_parallel",
        "one process that runs copies of the model on several devices with threads",
    ),
    "sampler": Topic(
        "sampler",
        "which samples each rank gets: shuffling, set_epoch, repeated and dropped samples",
        (3, 2, MAX_RANKS),
    ),
    "broadcast": Topic(
        "collective",
        "how the values of rank 0 reach all ranks",
        (4, 1, MAX_RANKS),
        ALGORITHMS["broadcast"],
        has_elements=True,
    ),
    "all-reduce": Topic(
        "collective",
        "which chunk is sent where in each step of an all-reduce",
        (4, 1, MAX_RANKS),
        ALGORITHMS["all-reduce"],
        has_elements=True,
    ),
    "map-reduce": Topic(
        "map_reduce",
        "a word count over ranks: the pairs and groups of each phase",
        (3, 2, MAX_RANKS),
    ),
    "ddp": Topic("ddp", "gradient buckets during backward, and their overlapping all-reduce"),
    "accumulation": Topic(
        "accumulation",
        "why the loss is divided by the global number of tokens, with unequal micro-batches",
    ),
    "precision": Topic(
        "precision", "rounding in bfloat16 and float16, loss scaling, and an overflow on one rank"
    ),
    "memory": Topic(
        "memory",
        "parameters, gradients, optimizer state and activations through a step",
        (1, 1, 1),
    ),
    "zero": Topic(
        "zero", "which rank stores which shard of the training state, for each ZeRO stage"
    ),
    "tensor": Topic("tensor", "column- and row-parallel layers, and their all-reduces"),
    "pipeline": Topic(
        "pipeline",
        "schedules of a pipeline, with measured times and the bubble",
        (2, 2, 4),
        ("1f1b", "gpipe", "interleaved_1f1b", "zero_bubble"),
    ),
    "hybrid": Topic(
        "hybrid",
        "the device mesh, and the process groups along its axes",
        (4, 4, MAX_RANKS),
    ),
    "parameter-server": Topic(
        "parameter_server",
        "workers that pull rows and push gradients: synchronous, asynchronous, bounded staleness",
        (3, 2, MAX_RANKS),
        ("sync", "async", "bounded"),
    ),
    "compression": Topic(
        "compression",
        "sparse gradients, and the residual that keeps what was not sent",
        algorithms=("topk", "randomk"),
    ),
    "local-sgd": Topic(
        "local_sgd",
        "workers that train independently and are synchronized every few steps",
        algorithms=("local_sgd", "diloco"),
    ),
    "recovery": Topic(
        "recovery", "a rank that dies, the rollback to a checkpoint, and the same digest", (2, 2, 4)
    ),
}


@dataclass(frozen=True)
class ExplainOptions:
    """What to record. ``elements`` and ``algorithm`` are 0 and empty if the topic does not use
    them."""

    topic: str
    ranks: int
    elements: int = 0
    algorithm: str = ""
