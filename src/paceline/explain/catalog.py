"""The topics of `paceline explain`, and what they accept. Imports no torch."""

from dataclasses import dataclass

from paceline.strategies.reducers.all_reduce.schedules import ALGORITHMS

MAX_RANKS = 16


@dataclass(frozen=True)
class Topic:
    """A topic.

    Args:
        implementation: object of :mod:`paceline.explain.topics` that records it, as
            ``module:NAME``.
        ranks: default, minimum and maximum number of ranks (or devices).
        algorithms: names that `--algorithm` accepts; the first is the default.
        has_elements: whether `--elements` sets the size of a tensor.
        multiple_of: number that the number of ranks must be a multiple of, to form a mesh.
        processes: number of processes that are started to record it, if it is not the number of
            ranks.
    """

    implementation: str
    summary: str
    ranks: tuple[int, int, int] = (2, 2, MAX_RANKS)
    algorithms: tuple[str, ...] = ()
    has_elements: bool = False
    multiple_of: int = 1
    processes: int | None = None


#: All topics in reading order.
TOPICS = {
    "data-parallel": Topic(
        "data_parallel:ThreadsTopic",
        "one process that runs copies of the model on several devices with threads",
        processes=1,
    ),
    "sampler": Topic(
        "sampler:SamplerTopic",
        "which samples each rank gets: shuffling, set_epoch, repeated and dropped samples",
        (3, 2, MAX_RANKS),
    ),
    "broadcast": Topic(
        "collective:CollectiveTopic",
        "how the values of rank 0 reach all ranks",
        (4, 1, MAX_RANKS),
        ALGORITHMS["broadcast"],
        has_elements=True,
    ),
    "all-reduce": Topic(
        "collective:CollectiveTopic",
        "which chunk is sent where in each step of an all-reduce",
        (4, 1, MAX_RANKS),
        ALGORITHMS["all-reduce"],
        has_elements=True,
    ),
    "map-reduce": Topic(
        "map_reduce:WordCountTopic",
        "a word count over ranks: the pairs and groups of each phase",
        (3, 2, MAX_RANKS),
    ),
    "ddp": Topic(
        "ddp:DDPTopic", "gradient buckets during backward, and their overlapping all-reduce"
    ),
    "accumulation": Topic(
        "accumulation:AccumulationTopic",
        "why the loss is divided by the global number of tokens, with unequal micro-batches",
    ),
    "precision": Topic(
        "precision:PrecisionTopic",
        "rounding in bfloat16 and float16, loss scaling, and an overflow on one rank",
    ),
    "memory": Topic(
        "memory:MemoryTopic",
        "parameters, gradients, optimizer state and activations through a step",
        (1, 1, 1),
    ),
    "zero": Topic(
        "zero:ZeROTopic",
        "which rank stores which shard of the training state, for each ZeRO stage",
        (4, 2, MAX_RANKS),
    ),
    "tensor": Topic("tensor:TensorTopic", "column- and row-parallel layers, and their all-reduces"),
    "context": Topic(
        "context:ContextTopic",
        "attention over a row whose tokens are divided among ranks",
        (4, 2, 8),
        ("ring", "ulysses"),
    ),
    "pipeline": Topic(
        "pipeline:PipelineTopic",
        "schedules of a pipeline, with measured times and the bubble",
        (2, 2, 4),
        ("1f1b", "gpipe", "interleaved_1f1b", "zero_bubble"),
    ),
    "hybrid": Topic(
        "hybrid:MeshTopic",
        "the device mesh, and the process groups along its axes",
        (4, 4, MAX_RANKS),
        multiple_of=4,
    ),
    "parameter-server": Topic(
        "parameter_server:ServerTopic",
        "workers that pull rows and push gradients: synchronous, asynchronous, bounded staleness",
        (3, 2, MAX_RANKS),
        ("sync", "async", "bounded"),
    ),
    "compression": Topic(
        "compression:CompressionTopic",
        "sparse gradients, and the residual that keeps what was not sent",
        algorithms=("topk", "randomk"),
    ),
    "local-sgd": Topic(
        "local_sgd:LocalSGDTopic",
        "workers that train independently and are synchronized every few steps",
        algorithms=("local_sgd", "diloco"),
    ),
    "grpo": Topic(
        "grpo:GroupPolicyTopic",
        "how rewards of a group of completions become advantages and the clipped loss",
    ),
    "recovery": Topic(
        "recovery:record",
        "a rank that dies, the rollback to a checkpoint, and the same digest",
        (2, 2, 4),
        processes=0,
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
