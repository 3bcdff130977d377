"""Declare what context parallelism does not support, with any strategy. Imports no torch."""

from paceline.config.schema import Config
from paceline.config.schema.tasks import PREFERENCE_TASKS
from paceline.distributed.mesh import ParallelDims
from paceline.parallel.capabilities import Limit

#: Tasks whose rows are texts for a causal language model.
CONTEXT_TASKS = ("sft", "pretrain", *PREFERENCE_TASKS)


def _context(config: Config, dims: ParallelDims) -> str | None:
    return f"`parallel.context: {dims.context}`" if dims.context > 1 else None


#: For every strategy: what is not supported if ranks divide the tokens of a row.
CONTEXT = (
    Limit(
        "task",
        "its loss needs whole rows of tokens, or its samples have no tokens",
        "leave `parallel.context` out",
        supported=CONTEXT_TASKS,
        allowed=", ".join(CONTEXT_TASKS),
        subject=_context,
    ),
    Limit(
        "train_args.packing",
        "it divides packed rows",
        "set `train_args.packing: auto`",
        unsupported=(False,),
        allowed="auto, true",
        subject=_context,
    ),
    Limit(
        "evaluation.mode",
        "rank 0 has only its part of the tokens",
        "set `evaluation.mode: distributed`, which computes the same metrics on all ranks",
        unsupported=("rank0",),
        subject=_context,
    ),
    Limit(
        "compression.method",
        "the parts of one row would be compressed separately",
        "leave `compression` or `parallel.context` out",
        supported=("none",),
        allowed="none",
        subject=_context,
    ),
    Limit(
        "parallel.all_reduce_algorithm",
        "gradients are summed over replicas and over the parts of their rows",
        "set `parallel.all_reduce_algorithm: native`",
        supported=("native",),
        allowed="native",
        subject=_context,
    ),
    Limit(
        "parallel.balance",
        "the ranks of a row compute the same micro-batches",
        "set `parallel.balance: equal`",
        supported=("equal",),
        allowed="equal",
        subject=_context,
    ),
)
