"""What gradient compression is supported with, and what follows from its settings. Imports no
torch."""

from paceline.config.schema import Config
from paceline.config.schema.compression import Compression
from paceline.core.errors import ConfigError
from paceline.distributed.mesh import ParallelDims

#: Methods that are supported if a replica is itself sharded: their result for a tensor does not
#: depend on the other tensors of a bucket, so that ranks which hold the same tensor in different
#: buckets get the same sum.
FOR_PARTS = ("bf16", "powersgd")


def check_compression(
    config: Config, name: str, reduces_in_buckets: bool, axes: ParallelDims
) -> None:
    """Raise ConfigError if the strategy ``name`` does not support ``compression`` or
    ``parallel.all_reduce_algorithm``.

    Args:
        reduces_in_buckets: the strategy sums gradients in buckets over the axis data.
    """
    settings = config.compression
    algorithm = config.parallel.all_reduce_algorithm
    if algorithm != "native" and not (reduces_in_buckets and axes.shard == 1) and axes.size > 1:
        raise ConfigError(
            "`parallel.all_reduce_algorithm: {algorithm}` is not supported with `parallel.mode:"
            " {name}` ({axes}): it does not all-reduce gradients of full replicas",
            code="all-reduce-with-mode",
            allowed="`parallel.mode: ddp`; `tensor`, `pipeline` and `hybrid` without"
            " `parallel.shard`",
            fix="set `parallel.mode: ddp`, or `parallel.all_reduce_algorithm: native`",
            algorithm=algorithm,
            name=name,
            axes=axes.text(),
        )
    if not settings.chain:
        return
    setting = f"`compression.method: {settings.text}`"
    if not reduces_in_buckets or axes.shard > 1 or (axes.data == 1 and axes.size > 1):
        raise ConfigError(
            "{setting} is not supported with `parallel.mode: {name}` ({axes}): it does not"
            " all-reduce gradients of full replicas, so there is nothing to compress",
            code="compression-with-mode",
            allowed="`parallel.mode: ddp`; with {for_parts} also `tensor`, `pipeline` and `hybrid`"
            " with `parallel.data` of at least 2 and without `parallel.shard`",
            fix="set `parallel.mode: ddp`, or leave `compression` out",
            setting=setting,
            name=name,
            axes=axes.text(),
            for_parts=", ".join(FOR_PARTS),
        )
    if axes.data == 1:
        raise ConfigError(
            "{setting} is not supported with one rank: nothing is sent",
            code="compression-with-one-rank",
            allowed="two ranks or more",
            fix="set `parallel.num_gpus: 2`, or leave it out",
            setting=setting,
        )
    sharded = axes.tensor > 1 or axes.pipeline > 1
    if sharded and (len(settings.chain) > 1 or settings.chain[0] not in FOR_PARTS):
        raise ConfigError(
            "{setting} is not supported with {axes}: ranks of one replica that hold the same"
            " weight would compress it differently",
            code="compression-with-axes",
            allowed="with mode {name}: {for_parts}; with `parallel.mode: ddp` every method",
            fix="set `compression.method: {method}`, or `parallel.mode: ddp`",
            setting=setting,
            axes=axes.text(),
            name=name,
            for_parts=", ".join(FOR_PARTS),
            method=FOR_PARTS[-1],
        )
    if algorithm != "native":
        raise ConfigError(
            "{setting} is not supported with `parallel.all_reduce_algorithm: {algorithm}`:"
            " compressed gradients are sent by the backend's collectives",
            code="compression-with-all-reduce",
            fix="set `parallel.all_reduce_algorithm: native`, or leave `compression` out",
            setting=setting,
            algorithm=algorithm,
        )
    _check_moments(config, setting)


def _check_moments(config: Config, setting: str) -> None:
    settings, args = config.compression, config.train_args
    if settings.local_moments is True and not uses_local_moments(config):
        raise ConfigError(
            "`compression.local_moments: true` is not supported with {setting} and"
            " `train_args.optim: {optim}`: only sparse methods with Adam keep moments",
            code="local-moments-not-supported",
            allowed="topk or randomk, with adamw or adam",
            fix="set `compression.local_moments: auto`",
            setting=setting,
            optim=args.optim,
        )
    if settings.momentum_correction is True and momentum_correction(config) <= 0:
        raise ConfigError(
            "`compression.momentum_correction: true` is not supported with {setting},"
            " `train_args.optim: {optim}` and `train_args.momentum: {momentum}`: there is no"
            " momentum to correct",
            code="momentum-correction-not-supported",
            allowed="topk or randomk, with sgd and `train_args.momentum` > 0",
            fix="set `compression.momentum_correction: auto`",
            setting=setting,
            optim=args.optim,
            momentum=args.momentum,
        )


def is_sparse(settings: Compression) -> bool:
    """Return whether only some elements are sent (`topk`, `randomk`)."""
    return settings.chain[:1] in (("topk",), ("randomk",))


def uses_local_moments(config: Config) -> bool:
    """Return whether each rank keeps Adam's second moment of its local gradient."""
    settings = config.compression
    adam = config.train_args.optim in ("adam", "adamw")
    return is_sparse(settings) and adam and settings.local_moments is not False


def momentum_correction(config: Config) -> float:
    """Return the momentum that each rank accumulates; 0: none."""
    settings, args = config.compression, config.train_args
    if is_sparse(settings) and args.optim == "sgd" and settings.momentum_correction is not False:
        return args.momentum
    return 0.0
