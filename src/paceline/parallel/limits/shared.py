"""Limits that several strategies declare, and limits of all strategies. Imports no torch."""

from paceline.config.schema import Config
from paceline.config.schema.tasks import PREFERENCE_TASKS
from paceline.distributed.mesh import ParallelDims
from paceline.parallel.capabilities import Limit, Placement, Subject
from paceline.parallel.limits import precision, training
from paceline.parallel.limits.context import CONTEXT
from paceline.parallel.limits.offload import ACTIVATION_OFFLOAD
from paceline.parallel.limits.precision import FLOAT8_KEY


def with_dims(*names: str, every: bool = False) -> Subject:
    """Return a subject for meshes in which one of these dimensions (or ``every`` one) is larger
    than 1."""

    def subject(config: Config, dims: ParallelDims) -> str | None:
        larger = [getattr(dims, name) > 1 for name in names]
        if not (all(larger) if every else any(larger)):
            return None
        shown = ("shard", "context", "tensor", "pipeline")
        return " × ".join(
            f"{name} {getattr(dims, name)}" for name in shown if getattr(dims, name) > 1
        )

    return subject


SHARDED_MATRICES = Limit(
    "train_args.optim",
    "its state has sums over rows and columns of matrices, which are sharded over the ranks",
    "set `train_args.optim: adamw`, or `parallel.mode: ddp`",
    unsupported=("adafactor",),
    allowed="adamw, adam, sgd, rmsprop, adagrad",
)
SPLIT_MATRICES = Limit(
    "train_args.optim",
    "it computes the update of a matrix from the whole matrix, which is divided over the ranks",
    "set `parallel.mode: ddp`, or `train_args.optim: adamw`",
    unsupported=("muon",),
    allowed="`muon` with `single`, `dp`, `ddp`, `local_sgd`, `diloco`, and `pipeline`",
)
QUANTIZED_OPTIMIZERS = ("adamw_8bit", "paged_adamw_8bit", "adamw_torchao_8bit")


def no_float8(reason: str, subject: Subject | None = None) -> Limit:
    """Return the limit of a strategy that does not train with float8."""
    return Limit(
        FLOAT8_KEY,
        reason,
        f"leave `{FLOAT8_KEY}` out, or set `parallel.mode: ddp` or `zero3`",
        supported=("none",),
        allowed="`parallel.mode: single`, `ddp`, `zero1`, `zero2`, `zero3`",
        subject=subject,
    )


def needs_float32_weights(reason: str) -> Limit:
    """Return the limit of a strategy that does not train with bfloat16 weights."""
    return Limit(
        "train_args.precision",
        reason,
        "set `train_args.precision: bf16-mixed`",
        unsupported=("bf16-true",),
        allowed="auto, bf16-mixed, fp16-mixed, 32",
    )


def no_rollback(subject: Subject | None = None) -> Limit:
    """Return the limit of a strategy whose ranks do not wait for each other."""
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


def no_compile(reason: str, subject: Subject | None = None) -> Limit:
    """Return the limit of a strategy that does not train with compiled blocks."""
    return Limit(
        "train_args.torch_compile",
        reason,
        "leave `train_args.torch_compile` out, or set `parallel.mode: ddp` or `zero3`",
        unsupported=(True,),
        allowed="`parallel.mode: single`, `ddp`, `zero1`, `zero2`, `zero3`",
        subject=subject,
    )


def _several_launched_ranks(place: Placement) -> str | None:
    """Subject: an outer launcher has started several ranks."""
    if place.num_launched is None or place.num_launched == 1:
        return None
    return f"{place.num_launched} ranks of an outer launcher"


def several_hosts(place: Placement) -> str | None:
    """Subject: the run starts ranks on several hosts."""
    is_alone = place.num_launched is not None or not place.has_several_hosts
    return None if is_alone else f"`parallel.nnodes: {place.nnodes}`"


def outer_launcher(place: Placement) -> str | None:
    """Subject: an outer launcher has started the ranks."""
    return None if place.num_launched is None else "an outer launcher"


#: Of strategies that drive all devices from one process.
ONE_PROCESS = (
    Limit(
        "parallel.mode",
        "it runs in one process",
        "start it without torchrun (`paceline sft …`), or set `parallel.mode: ddp`",
        place=_several_launched_ranks,
        supported=(),
    ),
    Limit(
        "parallel.mode",
        "it runs in one process",
        "set `parallel.mode: ddp`, or `parallel.nnodes: 1`",
        place=several_hosts,
        supported=(),
    ),
)
#: What no strategy supports.
FOR_ALL = (
    *precision.PURE_BFLOAT16,
    *precision.FLOAT8,
    *ACTIVATION_OFFLOAD,
    *training.AVERAGE,
    NO_DIVIDED_PREFERENCES,
    NO_DIVIDED_REWARDS,
    *CONTEXT,
)
