"""The settings that each strategy does not support. Imports no torch."""

from paceline.config.schema import Config
from paceline.config.schema.parallel import LocalSgd
from paceline.distributed.mesh import ParallelDims
from paceline.parallel.capabilities import Limit, Subject
from paceline.parallel.deepspeed.config import stage_of


def with_dims(*names: str, every: bool = False) -> Subject:
    """The sizes of a mesh, where one of these dimensions (or ``every`` one) is larger than 1."""

    def subject(config: Config, dims: ParallelDims) -> str | None:
        larger = [getattr(dims, name) > 1 for name in names]
        if not (all(larger) if every else any(larger)):
            return None
        shown = ("shard", "tensor", "pipeline")
        return " × ".join(
            f"{name} {getattr(dims, name)}" for name in shown if getattr(dims, name) > 1
        )

    return subject


def _deepspeed_stage(*stages: int) -> Subject:
    def subject(config: Config, dims: ParallelDims) -> str | None:
        stage = stage_of(config.parallel)
        return f"`parallel.deepspeed_stage: {stage}`" if stage in stages else None

    return subject


def _overlap(config: Config, dims: ParallelDims) -> str | None:
    steps = config.local_sgd.fragment_sync_delay
    return f"`local_sgd.fragment_sync_delay: {steps}`" if steps else None


def _adafactor(config: Config, dims: ParallelDims) -> str | None:
    return "`train_args.optim: adafactor`" if config.train_args.optim == "adafactor" else None


def _server_mode(config: Config, dims: ParallelDims) -> str | None:
    mode = config.parameter_server.consistency
    return None if mode == "sync" else f"`parameter_server.consistency: {mode}`"


def _continues_without_worker(config: Config, dims: ParallelDims) -> str | None:
    continues = config.parameter_server.on_worker_failure == "continue"
    return "`parameter_server.on_worker_failure: continue`" if continues else None


def _no_tensor_dim(config: Config, dims: ParallelDims) -> str | None:
    return "`parallel.tensor: 1`" if dims.tensor == 1 else None


_SHARDED_MATRICES = Limit(
    "train_args.optim",
    "its state has sums over the rows and columns of whole matrices, and ranks hold parts of them",
    "set `train_args.optim: adamw`, or `parallel.mode: ddp`",
    unsupported=("adafactor",),
    allowed="adamw, adam, sgd, rmsprop, adagrad",
)
_STATE_ON_DEVICE = Limit(
    "parallel.cpu_offload",
    "its state stays on the device",
    "set `parallel.mode: zero3` and `parallel.cpu_offload: all` on accelerators, or use"
    " `deepspeed`",
    unsupported=("optimizer", "all"),
    allowed="`parallel.cpu_offload: none`",
)


def _no_rollback(subject: Subject | None = None) -> Limit:
    return Limit(
        "recovery.rollback_on_loss_spike",
        "it needs the loss of all ranks at each step, and here they do not wait for each other",
        "leave `recovery.rollback_on_loss_spike` out: an update without a finite gradient is"
        " skipped all"
        " the same",
        unsupported=(True,),
        allowed="strategies that meet at each step, such as `parallel.mode: ddp` or zero3",
        subject=subject,
    )


ZERO1 = (_SHARDED_MATRICES, _STATE_ON_DEVICE)
FSDP = (
    _SHARDED_MATRICES,
    Limit(
        "evaluation.mode",
        "rank 0 holds a part of the model",
        "set `evaluation.mode: distributed`, or `parallel.mode: zero1`",
        unsupported=("rank0",),
        allowed="`evaluation.mode: distributed`",
    ),
    Limit(
        "parallel.cpu_offload",
        "optimizer state lies where the shards of the weights lie",
        "set `parallel.cpu_offload: all`, or `parallel.mode: deepspeed`, which moves the"
        " optimizer's"
        " state alone",
        unsupported=("optimizer",),
        allowed="none, all",
    ),
)
DEEPSPEED = (
    Limit(
        "train_args.optim",
        "DeepSpeed hands the optimizer flat parts of several parameters, and it does not train the"
        " same on these",
        "set `train_args.optim: adamw`, or `parallel.mode: ddp`",
        unsupported=("adagrad", "adafactor"),
        allowed="adamw, adam, sgd, rmsprop",
    ),
    Limit(
        "evaluation.mode",
        "no rank holds the whole model",
        "leave `evaluation.mode` out",
        unsupported=("rank0",),
        allowed="`evaluation.mode: distributed`",
        subject=_deepspeed_stage(3),
    ),
    Limit(
        "parallel.cpu_offload",
        "parameters leave the device at stage 3 alone",
        "set `parallel.deepspeed_stage: 3`",
        unsupported=("all",),
        allowed="`parallel.cpu_offload: optimizer`, or stage 3",
        subject=_deepspeed_stage(1, 2),
    ),
)
HYBRID = (
    Limit(
        "parallel.sequence_parallel",
        "it splits what lies between tensor-parallel layers, and there are none",
        "set `parallel.tensor: 2`, or leave `parallel.sequence_parallel` out",
        unsupported=(True,),
        subject=_no_tensor_dim,
    ),
    Limit(
        "evaluation.mode",
        "no rank holds the whole model",
        "set `evaluation.mode: distributed`: the same figures, computed by all ranks",
        unsupported=("rank0",),
        subject=with_dims("shard", "tensor", "pipeline"),
    ),
    Limit(
        "parallel.cpu_offload",
        "its state stays on the device",
        "set `parallel.cpu_offload: none`, or `parallel.mode: zero3`",
        unsupported=("optimizer", "all"),
        allowed="`parallel.mode: zero2`, `zero3` or `deepspeed` on accelerators",
        subject=with_dims("shard", "tensor", "pipeline"),
    ),
    Limit(
        "train_args.optim",
        "its factored state needs whole matrices",
        "set `train_args.optim: adamw`, or `parallel.mode: ddp`",
        unsupported=("adafactor",),
        allowed="adamw, adam, sgd, rmsprop, adagrad",
        subject=with_dims("shard", "tensor"),
    ),
    Limit(
        "parallel.pipeline_schedule",
        "its split backward does not run FSDP's hooks",
        "set `parallel.pipeline_schedule: 1f1b`, or `parallel.shard: 1`",
        unsupported=("zero_bubble",),
        subject=with_dims("pipeline", "shard", every=True),
    ),
    Limit(
        "parallel.sequence_parallel",
        "stages hand over whole rows",
        "set `parallel.sequence_parallel: false`, or `parallel.pipeline: 1`",
        unsupported=(True,),
        subject=with_dims("pipeline"),
    ),
)


def _local_only(mode: str, *keys: str) -> tuple[Limit, ...]:
    other = "diloco" if mode == "local_sgd" else "local_sgd"
    return tuple(
        Limit(
            f"local_sgd.{key}",
            f"`parallel.mode: {other}` alone has it",
            f"leave it out, or set `parallel.mode: {other}`",
            supported=(LocalSgd.model_fields[key].default,),
        )
        for key in keys
    )


_WORKERS = (
    Limit(
        "parallel.cpu_offload",
        "its state stays on the device",
        "leave it out; `local_sgd.workers` with several ranks each cuts the outer state of"
        " `diloco` into shares",
        unsupported=("optimizer", "all"),
    ),
    _no_rollback(),
)
LOCAL_SGD = (
    *_WORKERS,
    *_local_only(
        "local_sgd", "outer_learning_rate", "outer_momentum", "outer_dtype", "fragment_update_alpha"
    ),
    Limit(
        "local_sgd.average_optimizer_state",
        "corrected late, a second moment could become negative",
        "turn one of them off",
        unsupported=(True,),
        subject=_overlap,
    ),
    Limit(
        "local_sgd.average_optimizer_state",
        "its moments are factored, and the mean of factors is not the factors of a mean",
        "leave `local_sgd.average_optimizer_state` out, or set `optim: adamw`",
        unsupported=(True,),
        subject=_adafactor,
    ),
)
DILOCO = (*_WORKERS, *_local_only("diloco", "average_optimizer_state"))
PARAMETER_SERVER = (
    Limit(
        "train_args.weight_decay",
        "rows that no batch has are not touched",
        "take it out",
        supported=(0,),
    ),
    Limit(
        "train_args.gradient_checkpointing",
        "rows would be pulled twice",
        "take it out",
        unsupported=(True,),
    ),
    Limit(
        "train_args.precision",
        "there is no loss scale on the servers",
        "set `train_args.precision: 32`",
        unsupported=("float16",),
        value_of="train_args.mixed_dtype",
    ),
    Limit(
        "parameter_server.dense_placement",
        "in an all-reduce each worker waits for the slowest, at every step",
        "leave `parameter_server.dense_placement` out",
        unsupported=("ddp",),
        allowed="`dense: server`, or `mode: sync`",
        subject=_server_mode,
    ),
    Limit(
        "parameter_server.dense_placement",
        "the workers' process group, by which they all-reduce, breaks with the first of them that"
        " dies",
        "leave `parameter_server.dense_placement` out: the servers then have these parameters too",
        unsupported=("ddp",),
        allowed="`dense_placement: server`, or `on_worker_failure: restart`",
        subject=_continues_without_worker,
    ),
    _no_rollback(_server_mode),
    Limit(
        "task",
        "a parameter server keeps embedding tables on servers, and this task has none",
        "set `parallel.mode: ddp`, or zero3 where memory is short",
        unsupported=("sft", "pretrain", "classify"),
        allowed=(
            "`task: recommend`, or a task of your own whose model has"
            " paceline.models.recommend.Table"
        ),
    ),
)
