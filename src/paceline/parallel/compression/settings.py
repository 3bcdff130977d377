"""What gradient compression is supported with, and what its settings come to. Imports no torch."""

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.distributed.mesh import ParallelDims

#: What a replica that is itself cut can be served: methods whose result for a tensor does not
#: depend on what lies beside it, so that ranks which hold the same tensor in different company get
#: the same sum.
FOR_PARTS = ("bf16", "powersgd")


def check_compression(
    config: Config, name: str, reduces_in_buckets: bool, axes: ParallelDims
) -> None:
    """Raise ConfigError where the strategy ``name`` cannot do what ``compression`` and
    ``parallel.all_reduce`` ask for.

    Args:
        reduces_in_buckets: the strategy sums gradients in buckets over the axis data.
    """
    settings, own = config.compression, config.parallel.all_reduce
    whole = reduces_in_buckets and axes.shard == axes.tensor == axes.pipeline == 1
    if own != "native" and not (reduces_in_buckets and axes.shard == 1) and axes.size > 1:
        raise ConfigError(
            f"`parallel.all_reduce: {own}` is not supported with `parallel.mode: {name}`"
            f" ({axes.text()}): it sums no gradients of whole replicas",
            allowed=(
                "`parallel.mode: ddp`; `tensor`, `pipeline` and `hybrid` without `parallel.shard`"
            ),
            fix="set `parallel.mode: ddp`, or `parallel.all_reduce: native`",
        )
    if not settings.chain:
        return
    what = f"`compression.method: {settings.text}`"
    if not reduces_in_buckets or axes.shard > 1 or (axes.data == 1 and axes.size > 1):
        raise ConfigError(
            f"{what} is not supported with `parallel.mode: {name}` ({axes.text()}): it sums no"
            " gradients of whole replicas, so there is nothing to compress",
            allowed=(
                f"`parallel.mode: ddp`; with {', '.join(FOR_PARTS)} also `tensor`, `pipeline` and"
                " `hybrid` with `parallel.data` of at least 2 and without `parallel.shard`"
            ),
            fix="set `parallel.mode: ddp`, or leave `compression` out",
        )
    if axes.data == 1:
        raise ConfigError(
            f"{what} is not supported with one rank: nothing is sent",
            allowed="two ranks or more",
            fix="set `parallel.num_gpus: 2`, or leave it out",
        )
    if not whole and (len(settings.chain) > 1 or settings.chain[0] not in FOR_PARTS):
        raise ConfigError(
            f"{what} is not supported with {axes.text()}: parts of one replica that hold the same"
            " weight would choose differently for it",
            allowed=(
                f"with mode {name}: {', '.join(FOR_PARTS)}; with `parallel.mode: ddp` every method"
            ),
            fix=f"set `compression.method: {FOR_PARTS[-1]}`, or `parallel.mode: ddp`",
        )
    if own != "native":
        raise ConfigError(
            f"{what} is not supported with `parallel.all_reduce: {own}`: compressed gradients"
            " travel by the backend's collectives",
            fix="set `parallel.all_reduce: native`, or leave `compression` out",
        )
    _check_training(config, what)


def _check_training(config: Config, what: str) -> None:
    args, settings = config.train_args, config.compression
    sparse = settings.chain[0] in ("topk", "randomk")
    adam = args.optim in ("adam", "adamw")
    if settings.local_moments is True and not (sparse and adam):
        raise ConfigError(
            f"`compression.local_moments: true` is not supported with {what} and"
            f" `train_args.optim: {args.optim}`: only sparse methods keep moments",
            allowed="topk or randomk, with adamw or adam",
            fix="set `compression.local_moments: auto`",
        )
    if settings.momentum_correction is True and not (
        sparse and args.optim == "sgd" and args.momentum > 0
    ):
        raise ConfigError(
            f"`compression.momentum_correction: true` is not supported with {what},"
            f" `train_args.optim: {args.optim}` and momentum {args.momentum}: there is no momentum"
            " that waits with what is not sent",
            allowed="topk or randomk, with sgd and `train_args.momentum` > 0",
            fix="set `compression.momentum_correction: auto`",
        )


def uses_local_moments(config: Config) -> bool:
    """Adam's moments are each rank's own."""
    settings = config.compression
    sparse = settings.chain[:1] in (("topk",), ("randomk",))
    return (
        sparse
        and config.train_args.optim in ("adam", "adamw")
        and settings.local_moments is not False
    )


def momentum_correction(config: Config) -> float:
    """The momentum that each rank gathers; 0: none."""
    settings, args = config.compression, config.train_args
    sparse = settings.chain[:1] in (("topk",), ("randomk",))
    return (
        args.momentum
        if sparse and args.optim == "sgd" and settings.momentum_correction is not False
        else 0.0
    )
