"""Check the size of expert parallelism against the mesh, and declare what it does not support.
Imports no torch."""

from dataclasses import replace
from typing import get_args

from paceline.config.schema import Config
from paceline.config.schema.train_args_sections import OptimizerName
from paceline.core.errors import ConfigError
from paceline.distributed.mesh import ParallelDims
from paceline.parallel.capabilities import Limit

#: Optimizers that compute the update of a matrix from the whole matrix.
_OF_MATRICES = ("muon", "adafactor")


def _experts(config: Config, dims: ParallelDims) -> str | None:
    return f"`parallel.expert: {dims.expert}`" if dims.expert > 1 else None


#: What is not supported if ranks divide the experts of a layer.
EXPERTS = (
    Limit(
        "train_args.torch_compile",
        "ranks exchange tokens inside the blocks, and graphs cannot contain that",
        "leave `train_args.torch_compile` out, or set `parallel.mode: zero3`",
        unsupported=(True,),
        subject=_experts,
    ),
    Limit(
        "evaluation.mode",
        "no rank has the full model",
        "set `evaluation.mode: distributed`, which computes the same metrics on all ranks",
        unsupported=("rank0",),
        subject=_experts,
    ),
    Limit(
        "train_args.optim",
        "it computes the update of a matrix from whole matrices, and ranks divide the experts",
        "set `train_args.optim: adamw`, or leave `parallel.expert` out",
        unsupported=_OF_MATRICES,
        allowed=", ".join(name for name in get_args(OptimizerName) if name not in _OF_MATRICES),
        subject=_experts,
    ),
    Limit(
        "compression.method",
        "the gradients of experts are summed over other ranks than the rest",
        "leave `compression` or `parallel.expert` out",
        supported=("none",),
        allowed="none",
        subject=_experts,
    ),
    Limit(
        "parallel.all_reduce_algorithm",
        "the gradients of experts are summed over other ranks than the rest",
        "set `parallel.all_reduce_algorithm: native`",
        supported=("native",),
        allowed="native",
        subject=_experts,
    ),
)


def with_experts(dims: ParallelDims, size: int, mode: str) -> ParallelDims:
    """Return a mesh whose ranks divide the experts of each layer.

    Args:
        size: ``parallel.expert``.
        mode: the strategy of the run.

    Raises:
        ConfigError: the strategy has no expert parallelism, or the size does not fit the mesh.
    """
    if mode != "hybrid":
        raise ConfigError(
            "`parallel.expert: {size}` is not supported with `parallel.mode: {mode}`: only `hybrid`"
            " sums the gradients of experts over other ranks than the rest",
            code="expert-with-mode",
            allowed="`parallel.mode: hybrid`, or no mode",
            fix="leave `parallel.mode` out, and set `parallel.shard` to shard the rest",
            size=size,
            mode=mode,
        )
    for axis, reason in (
        ("tensor", "tensor parallelism divides each expert over the same ranks"),
        ("pipeline", "ranks of different stages would have to exchange tokens"),
    ):
        if getattr(dims, axis) > 1:
            raise ConfigError(
                "`parallel.expert: {size}` is not supported with `parallel.{axis}: {other}`:"
                " {reason}",
                code="expert-with-axis",
                allowed="the axes data, shard and context",
                fix="leave `parallel.{axis}` out, or leave `parallel.expert` out",
                size=size,
                axis=axis,
                other=getattr(dims, axis),
                reason=reason,
            )
    num_ranks = dims.replicas * dims.context
    if num_ranks % size:
        divisors = [str(each) for each in range(1, num_ranks + 1) if num_ranks % each == 0]
        raise ConfigError(
            "`parallel.expert: {size}` does not divide the {num_ranks:rank} of the run",
            code="expert-does-not-divide-ranks",
            allowed="divisors of {num_ranks}: {divisors}",
            fix="set `parallel.expert: {fitting}`",
            size=size,
            num_ranks=num_ranks,
            divisors=", ".join(divisors),
            fitting=max(each for each in range(1, num_ranks + 1)
                        if num_ranks % each == 0 and each <= size),
        )  # fmt: skip
    return replace(dims, expert=size)
