"""Check the size of expert parallelism against the mesh. Imports no torch."""

from dataclasses import replace

from paceline.core.errors import ConfigError
from paceline.distributed.mesh import ParallelDims


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
            "`parallel.expert: {size}` does not divide the {num_ranks:rank} of {axes}",
            code="expert-does-not-divide-ranks",
            allowed="divisors of {num_ranks}: {divisors}",
            fix="set `parallel.expert: {fitting}`",
            size=size,
            num_ranks=num_ranks,
            axes=dims.text(),
            divisors=", ".join(divisors),
            fitting=max(each for each in range(1, num_ranks + 1)
                        if num_ranks % each == 0 and each <= size),
        )  # fmt: skip
    return replace(dims, expert=size)
