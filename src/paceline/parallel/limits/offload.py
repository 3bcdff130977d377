"""Declare what `parallel.cpu_offload` is not supported with. Imports no torch."""

from paceline.config.schema import Config
from paceline.distributed.mesh import ParallelDims
from paceline.parallel.capabilities import Limit, Subject
from paceline.parallel.gradient_compression import momentum_correction, uses_local_moments

#: Optimizers that update each parameter from its own gradient and state only.
_BY_PARAMETER = ("adamw", "adam", "sgd", "rmsprop", "adagrad", "adafactor", "lion", "muon")
ON_DEVICE = "its state stays on the device"
USE_ZERO3 = "set `parallel.mode: zero3`, or leave `parallel.cpu_offload` out"


def no_state_offload(
    *values: str, reason: str, fix: str, allowed: str | None = None, subject: Subject | None = None
) -> Limit:
    """Return the limit of a strategy that does not keep its state in host memory."""
    return Limit(
        "parallel.cpu_offload",
        reason,
        fix,
        unsupported=values,
        allowed=allowed,
        subject=subject,
        value_of="parallel.state_offload",
    )


_FULL_WEIGHTS = no_state_offload(
    "all",
    reason="each rank computes with the full weights, which must be on its device",
    fix="set `parallel.cpu_offload: optimizer`, or `parallel.mode: zero3`",
    allowed="none, optimizer, activations",
)


def _offloaded_optimizer(config: Config, dims: ParallelDims) -> str | None:
    offload = config.parallel.state_offload
    return "`parallel.cpu_offload: optimizer`" if offload == "optimizer" else None


def _local_moments(config: Config, dims: ParallelDims) -> str | None:
    has_moments = uses_local_moments(config) or momentum_correction(config) > 0
    return f"`compression.method: {config.compression.method}`" if has_moments else None


#: Of strategies that keep the optimizer's state in host memory themselves.
OPTIMIZER_ON_HOST = (
    _FULL_WEIGHTS,
    Limit(
        "train_args.optim",
        "a step needs the state of all parameters on the device, or the state is in 8 bits already",
        "set `train_args.optim: adamw`, or leave `parallel.cpu_offload` out",
        supported=_BY_PARAMETER,
        allowed=", ".join(_BY_PARAMETER),
        subject=_offloaded_optimizer,
    ),
    no_state_offload(
        "optimizer",
        reason="its moments of local gradients stay on the device",
        fix="leave `compression` or `parallel.cpu_offload` out",
        subject=_local_moments,
    ),
)


def no_activation_offload(reason: str, subject: Subject | None = None) -> Limit:
    """Return the limit of a strategy that does not offload activations."""
    return Limit(
        "parallel.cpu_offload",
        reason,
        "leave `activations` out, or set `parallel.mode: ddp` or `zero3`;"
        " `train_args.gradient_checkpointing: full` saves memory as well",
        unsupported=(True,),
        allowed="`activations` with `single`, `ddp`, `zero1`, `zero2`, `zero3`, `tensor`,"
        " `local_sgd` and `diloco`",
        subject=subject,
        value_of="parallel.offloads_activations",
    )


def _offloaded_activations(config: Config, dims: ParallelDims) -> str | None:
    return "`parallel.cpu_offload: activations`" if config.parallel.offloads_activations else None


#: For every strategy: what offloading activations does not support.
ACTIVATION_OFFLOAD = (
    Limit(
        "train_args.torch_compile",
        "a compiled block decides itself which of its results it saves or computes again",
        "leave one of the two out",
        unsupported=(True,),
        subject=_offloaded_activations,
    ),
    Limit(
        "train_args.gradient_checkpointing",
        "the results that it stores are not saved by autograd, so they would stay on the device",
        "set `train_args.gradient_checkpointing: full` or `none`",
        unsupported=("selective",),
        allowed="none, full, or a number N",
        subject=_offloaded_activations,
    ),
)
