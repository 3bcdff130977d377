"""Specs of `local_sgd` and `diloco`. Imports no torch."""

from paceline.config.schema import Config
from paceline.config.schema.parallel import LocalSgd
from paceline.distributed.mesh import ParallelDims
from paceline.parallel.capabilities import Capabilities, Limit, with_setting
from paceline.parallel.limits.offload import ON_DEVICE, no_state_offload
from paceline.parallel.limits.shared import (
    NO_QUANTIZATION,
    QUANTIZED_OPTIMIZERS,
    needs_float32_weights,
    no_compile,
    no_float8,
    no_rollback,
)
from paceline.parallel.limits.training import NO_AVERAGE
from paceline.parallel.spec import StrategySpec


def _overlap(config: Config, dims: ParallelDims) -> str | None:
    steps = config.local_sgd.fragment_sync_delay
    return f"`local_sgd.fragment_sync_delay: {steps}`" if steps else None


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


_NO_SCHEDULE_FREE = Limit(
    "train_args.optim",
    "it trains with weights between an average and the last iterate, and averaging the workers'"
    " weights would leave out both of these",
    "set `train_args.optim: adamw`, or `parallel.mode: ddp`",
    unsupported=("schedule_free_adamw",),
)

_WORKERS = (
    NO_AVERAGE,
    no_compile("compiled blocks are untested with workers whose weights differ"),
    no_float8("float8 layers are untested with workers whose weights differ"),
    NO_QUANTIZATION,
    needs_float32_weights("averages over the workers would be rounded to bfloat16"),
    no_state_offload(
        "optimizer",
        "all",
        reason=ON_DEVICE,
        fix="leave `parallel.cpu_offload` out; with several ranks per worker (`local_sgd.workers`)"
        " the outer state of `diloco` is divided among them",
    ),
    no_rollback(),
)
LOCAL_SGD_LIMITS = (
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
        subject=with_setting("train_args.optim", *QUANTIZED_OPTIMIZERS, "muon"),
    ),
    _NO_SCHEDULE_FREE,
)
DILOCO_LIMITS = (
    *_WORKERS,
    _NO_SCHEDULE_FREE,
    *_local_only("diloco", "average_optimizer_state"),
)
_WORKERS_COUNT_EQUALLY = (
    "every worker counts equally in the average, so unequal shares would change the training"
)

LOCAL_SGD = StrategySpec(
    name="local_sgd",
    implementation="paceline.strategies.local_sgd.algorithms:LocalSGDStrategy",
    cost_model="paceline.strategies.local_sgd.cost:estimate_local_sgd",
    capabilities=Capabilities(
        LOCAL_SGD_LIMITS,
        equal_shares_reason=_WORKERS_COUNT_EQUALLY,
        mixed_devices=True,
        same_devices_with=("local_sgd.workers",),
        chosen_by_auto=False,
    ),
    check_sizes="paceline.strategies.local_sgd.schedule:check_sizes",
    check_steps="paceline.strategies.local_sgd.schedule:check_steps",
)
DILOCO = StrategySpec(
    name="diloco",
    implementation="paceline.strategies.local_sgd.algorithms:DiLoCoStrategy",
    cost_model="paceline.strategies.local_sgd.cost:estimate_diloco",
    capabilities=Capabilities(
        DILOCO_LIMITS,
        equal_shares_reason=_WORKERS_COUNT_EQUALLY,
        chosen_by_auto=False,
    ),
    check_sizes="paceline.strategies.local_sgd.schedule:check_sizes",
    check_steps="paceline.strategies.local_sgd.schedule:check_steps",
)
