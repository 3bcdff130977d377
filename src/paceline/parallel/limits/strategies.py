"""Declare the settings that each strategy does not support. Imports no torch."""

from dataclasses import replace

from paceline.config.schema import Config
from paceline.config.schema.parallel import LocalSgd
from paceline.config.schema.tasks import CAUSAL_TASKS, PREFERENCE_TASKS
from paceline.distributed.mesh import ParallelDims
from paceline.parallel.capabilities import Limit, Subject, with_setting
from paceline.parallel.deepspeed.config import stage_of
from paceline.parallel.limits.precision import FLOAT8_KEY
from paceline.parallel.limits.training import (
    NO_AVERAGE,
    SERVED_PARAMETERS,
    STAGE_WITHOUT_PARAMETERS,
)
from paceline.parallel.offload import (
    ON_DEVICE,
    OPTIMIZER_ON_HOST,
    USE_ZERO3,
    no_activation_offload,
    no_state_offload,
)


def with_dims(*names: str, every: bool = False) -> Subject:
    """Return a subject for meshes in which one of these dimensions (or ``every`` one) is larger
    than 1."""

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


def _no_tensor_dim(config: Config, dims: ParallelDims) -> str | None:
    return "`parallel.tensor: 1`" if dims.tensor == 1 else None


_ASYNC = with_setting("parameter_server.consistency", "async", "bounded")
_SHARDED_MATRICES = Limit(
    "train_args.optim",
    "its state has sums over rows and columns of matrices, which are sharded over the ranks",
    "set `train_args.optim: adamw`, or `parallel.mode: ddp`",
    unsupported=("adafactor",),
    allowed="adamw, adam, sgd, rmsprop, adagrad",
)
_SPLIT_MATRICES = Limit(
    "train_args.optim",
    "it computes the update of a matrix from the whole matrix, which is divided over the ranks",
    "set `parallel.mode: ddp`, or `train_args.optim: adamw`",
    unsupported=("muon",),
    allowed="`muon` with `single`, `dp`, `ddp`, `local_sgd`, `diloco`, and `pipeline`",
)
_QUANTIZED = ("adamw_8bit", "paged_adamw_8bit", "adamw_torchao_8bit")
_NO_SCHEDULE_FREE = Limit(
    "train_args.optim",
    "it trains with weights between an average and the last iterate, and averaging the workers'"
    " weights would leave out both of these",
    "set `train_args.optim: adamw`, or `parallel.mode: ddp`",
    unsupported=("schedule_free_adamw",),
)


def _no_float8(reason: str, subject: Subject | None = None) -> Limit:
    return Limit(
        FLOAT8_KEY,
        reason,
        f"leave `{FLOAT8_KEY}` out, or set `parallel.mode: ddp` or `zero3`",
        supported=("none",),
        allowed="`parallel.mode: single`, `ddp`, `zero1`, `zero2`, `zero3`",
        subject=subject,
    )


def _float32_weights(reason: str) -> Limit:
    return Limit(
        "train_args.precision",
        reason,
        "set `train_args.precision: bf16-mixed`",
        unsupported=("bf16-true",),
        allowed="auto, bf16-mixed, fp16-mixed, 32",
    )


def _no_rollback(subject: Subject | None = None) -> Limit:
    return Limit(
        "recovery.rollback_on_loss_spike",
        "it needs the loss of all ranks at each step, and the ranks do not wait for each other",
        "leave `recovery.rollback_on_loss_spike` out; updates with non-finite gradients are skipped"
        " in any case",
        unsupported=(True,),
        allowed="strategies that synchronize at each step, such as `parallel.mode: ddp` or `zero3`",
        subject=subject,
    )


NO_DIVIDED_PREFERENCES = Limit(
    "task",
    "the log-probabilities of both answers are computed from logits that are divided over ranks",
    "set `parallel.mode: ddp`, `zero2` or `zero3`",
    unsupported=PREFERENCE_TASKS,
    allowed="`parallel.mode: single`, `dp`, `ddp`, `zero1`, `zero2`, `zero3`, `local_sgd`,"
    " `diloco`, `deepspeed`",
    subject=with_dims("tensor", "pipeline"),
)
NO_DIVIDED_REWARDS = Limit(
    "task",
    "only the layers of causal language models are divided over ranks",
    "set `parallel.mode: ddp`, `zero2` or `zero3`",
    unsupported=("reward",),
    allowed="`parallel.mode: single`, `dp`, `ddp`, `zero1`, `zero2`, `zero3`",
    subject=with_dims("tensor", "pipeline"),
)
NO_QUANTIZATION = Limit(
    "lora.quantize",
    "it splits, averages or copies weights as 16- or 32-bit numbers",
    "set `parallel.mode: ddp`, or `zero3`, which shards 4-bit weights",
    supported=("none",),
    allowed="`parallel.mode: single`, `ddp`, `zero1`, `zero2` or `zero3`",
)


def _not_split(key: str, value: object, reason: str, *dims: str) -> Limit:
    """Return the limit of a variant of LoRA whose layers cannot be divided."""
    return Limit(
        key,
        reason,
        "set `parallel.mode: zero3`, or use plain LoRA",
        unsupported=(value,),
        subject=with_dims(*dims),
    )


def _no_compile(reason: str, subject: Subject | None = None) -> Limit:
    return Limit(
        "train_args.torch_compile",
        reason,
        "leave `train_args.torch_compile` out, or set `parallel.mode: ddp` or `zero3`",
        unsupported=(True,),
        allowed="`parallel.mode: single`, `ddp`, `zero1`, `zero2`, `zero3`",
        subject=subject,
    )


THREADED_DP = (
    NO_QUANTIZATION,
    _no_compile("the copies of a model share its compiled blocks"),
    _no_float8("float8 layers are untested in the copies of a model"),
    no_state_offload("optimizer", "all", reason=ON_DEVICE, fix=USE_ZERO3),
    no_activation_offload("the threads of its devices would share the offloaded tensors"),
)
DDP = OPTIMIZER_ON_HOST
ZERO1 = (_SHARDED_MATRICES, _SPLIT_MATRICES, *OPTIMIZER_ON_HOST)
FSDP = (
    Limit(
        "lora.quantize",
        "the scales of int8 weights are not sharded, and their layers do not gather them",
        "set `lora.quantize: nf4`, or `parallel.mode: ddp`",
        unsupported=("int8",),
        allowed="none, nf4, fp4",
    ),
    Limit(
        "lora.quantize",
        "the scales would stay on the device while the weights are in host memory",
        "set `parallel.cpu_offload: none`",
        supported=("none",),
        subject=with_setting("parallel.state_offload", "all"),
    ),
    _SHARDED_MATRICES,
    _SPLIT_MATRICES,
    Limit(
        "evaluation.mode",
        "rank 0 has only its shard of the model",
        "set `evaluation.mode: distributed`, or `parallel.mode: zero1`",
        unsupported=("rank0",),
        allowed="`evaluation.mode: distributed`",
    ),
    no_state_offload(
        "optimizer",
        reason="the optimizer state is on the same device as the shards of the weights",
        fix="set `parallel.cpu_offload: all`, or `parallel.mode: zero1` or `deepspeed`, which can"
        " offload only the optimizer state",
        allowed="none, all, activations",
    ),
)
DEEPSPEED = (
    NO_AVERAGE,
    _no_compile("compiled blocks are untested with DeepSpeed's hooks"),
    _no_float8("float8 layers are untested with DeepSpeed's hooks"),
    NO_QUANTIZATION,
    _float32_weights("DeepSpeed itself converts the weights, without stochastic rounding"),
    Limit(
        "train_args.optim",
        "DeepSpeed passes flat parts of several parameters to the optimizer, and with these it"
        " computes different updates",
        "set `train_args.optim: adamw`, or `parallel.mode: ddp`",
        unsupported=("adagrad", "adafactor", "muon"),
        allowed="adamw, adam, sgd, rmsprop",
    ),
    Limit(
        "train_args.optim",
        "DeepSpeed's partitions have no form of its state that a checkpoint can contain",
        "set `train_args.optim: adamw`, or `parallel.mode: zero2`, which shards the same",
        unsupported=(*_QUANTIZED, "lion", "schedule_free_adamw"),
        allowed="adamw, adam, sgd, rmsprop",
    ),
    Limit(
        "evaluation.mode",
        "no rank has the full model",
        "leave `evaluation.mode` out",
        unsupported=("rank0",),
        allowed="`evaluation.mode: distributed`",
        subject=_deepspeed_stage(3),
    ),
    no_state_offload(
        "all",
        reason="only stage 3 can offload parameters",
        fix="set `parallel.deepspeed_stage: 3`",
        allowed="`parallel.cpu_offload: optimizer`, or stage 3",
        subject=_deepspeed_stage(1, 2),
    ),
    no_activation_offload("it is untested with DeepSpeed's hooks"),
)
HYBRID = (
    *STAGE_WITHOUT_PARAMETERS,
    _no_compile(
        "collectives run inside the blocks, and graphs cannot contain them", with_dims("tensor")
    ),
    _no_compile("compiled blocks are untested in pipeline stages", with_dims("pipeline")),
    _no_float8("parts of a layer may have sizes that are no multiples of 16", with_dims("tensor")),
    _no_float8("float8 layers are untested in pipeline stages", with_dims("pipeline")),
    NO_QUANTIZATION,
    _not_split(
        "lora.use_dora", True, "the parts of a layer need the norm of the whole matrix", "tensor"
    ),
    _not_split("lora.method", "vera", "all layers share its random matrices", "tensor", "pipeline"),
    Limit(
        "parallel.sequence_parallel",
        "it shards activations between tensor-parallel layers, and there are none",
        "set `parallel.tensor: 2`, or leave `parallel.sequence_parallel` out",
        unsupported=(True,),
        subject=_no_tensor_dim,
    ),
    Limit(
        "evaluation.mode",
        "no rank has the full model",
        "set `evaluation.mode: distributed`, which computes the same metrics on all ranks",
        unsupported=("rank0",),
        subject=with_dims("shard", "tensor", "pipeline"),
    ),
    no_state_offload(
        "optimizer",
        "all",
        reason=ON_DEVICE,
        fix=USE_ZERO3,
        allowed="`parallel.mode: zero2`, `zero3` or `deepspeed` on accelerators",
    ),
    no_activation_offload(
        "a stage runs forward of other micro-batches before backward of the first",
        with_dims("pipeline"),
    ),
    Limit(
        "train_args.optim",
        "its factored state needs whole matrices",
        "set `train_args.optim: adamw`, or `parallel.mode: ddp`",
        unsupported=("adafactor",),
        allowed="adamw, adam, sgd, rmsprop, adagrad",
        subject=with_dims("shard", "tensor"),
    ),
    replace(_SPLIT_MATRICES, subject=with_dims("shard", "tensor")),
    Limit(
        "parallel.pipeline_schedule",
        "its split backward does not run FSDP's hooks",
        "set `parallel.pipeline_schedule: 1f1b`, or `parallel.shard: 1`",
        unsupported=("zero_bubble",),
        subject=with_dims("pipeline", "shard", every=True),
    ),
    Limit(
        "parallel.sequence_parallel",
        "pipeline stages exchange full sequences",
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
            f"it is a setting of `parallel.mode: {other}`",
            f"leave `local_sgd.{key}` out, or set `parallel.mode: {other}`",
            supported=(LocalSgd.model_fields[key].default,),
        )
        for key in keys
    )


_WORKERS = (
    NO_AVERAGE,
    _no_compile("compiled blocks are untested with workers whose weights differ"),
    _no_float8("float8 layers are untested with workers whose weights differ"),
    NO_QUANTIZATION,
    _float32_weights("averages over the workers would be rounded to bfloat16"),
    no_state_offload(
        "optimizer",
        "all",
        reason=ON_DEVICE,
        fix="leave `parallel.cpu_offload` out; with several ranks per worker (`local_sgd.workers`)"
        " the outer state of `diloco` is divided among them",
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
        "a delayed correction could make a second moment negative",
        "set one of the two to its default",
        unsupported=(True,),
        subject=_overlap,
    ),
    Limit(
        "local_sgd.average_optimizer_state",
        "its moments are factored, and averaging the factors does not average the moments",
        "leave `local_sgd.average_optimizer_state` out, or set `train_args.optim: adamw`",
        unsupported=(True,),
        subject=with_setting("train_args.optim", "adafactor"),
    ),
    Limit(
        "local_sgd.average_optimizer_state",
        "its moments are quantized, or not the same for all parameters",
        "leave `local_sgd.average_optimizer_state` out, or set `train_args.optim: adamw`",
        unsupported=(True,),
        subject=with_setting("train_args.optim", *_QUANTIZED, "muon"),
    ),
    _NO_SCHEDULE_FREE,
)
DILOCO = (
    *_WORKERS,
    _NO_SCHEDULE_FREE,
    *_local_only("diloco", "average_optimizer_state"),
)
PARAMETER_SERVER = (
    *SERVED_PARAMETERS,
    _no_compile("compiled blocks are untested with tables on servers"),
    no_state_offload("optimizer", "all", reason=ON_DEVICE, fix=USE_ZERO3),
    no_activation_offload("its models have no blocks whose activations take much memory"),
    _float32_weights("its servers update single rows in float32"),
    Limit(
        "train_args.optim",
        "the servers do not support its state",
        "set `train_args.optim: adamw`",
        unsupported=(*_QUANTIZED, "lion", "muon", "schedule_free_adamw"),
        allowed="adamw, adam, sgd, rmsprop, adagrad, adafactor",
    ),
    Limit(
        "train_args.weight_decay",
        "only the rows of a batch are updated",
        "leave `train_args.weight_decay` out",
        supported=(0,),
    ),
    Limit(
        "train_args.gradient_checkpointing",
        "rows would be pulled twice",
        "leave `train_args.gradient_checkpointing` out",
        supported=("none",),
        value_of="train_args.recomputation",
    ),
    Limit(
        "train_args.precision",
        "the servers do not support loss scaling",
        "set `train_args.precision: 32`",
        unsupported=("float16",),
        value_of="train_args.mixed_dtype",
    ),
    Limit(
        "parameter_server.dense_placement",
        "in the all-reduce of every step each worker waits for the slowest",
        "leave `parameter_server.dense_placement` out",
        unsupported=("ddp",),
        allowed="`dense_placement: server`, or `consistency: sync`",
        subject=_ASYNC,
    ),
    Limit(
        "parameter_server.dense_placement",
        "the workers' process group, which the all-reduce uses, breaks when a worker exits",
        "leave `parameter_server.dense_placement` out; then the servers also have these parameters",
        unsupported=("ddp",),
        allowed="`dense_placement: server`, or `on_worker_failure: restart`",
        subject=with_setting("parameter_server.on_worker_failure", "continue"),
    ),
    _no_rollback(_ASYNC),
    Limit(
        "task",
        "a parameter server keeps embedding tables on servers, and this task has none",
        "set `parallel.mode: ddp`, or `zero3` if memory is short",
        unsupported=(*CAUSAL_TASKS, "reward", "classify"),
        allowed=(
            "`task: recommend`, or a custom task whose model has paceline.models.recommend.Table"
        ),
    ),
)
