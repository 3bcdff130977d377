"""Spec of `parameter_server`. Imports no torch."""

from paceline.config.schema.tasks import CAUSAL_TASKS
from paceline.parallel.capabilities import Capabilities, Limit, Placement, with_setting
from paceline.parallel.limits.offload import (
    ON_DEVICE,
    USE_ZERO3,
    no_activation_offload,
    no_state_offload,
)
from paceline.parallel.limits.shared import (
    QUANTIZED_OPTIMIZERS,
    needs_float32_weights,
    no_compile,
    no_rollback,
    outer_launcher,
    several_hosts,
)
from paceline.parallel.limits.training import SERVED_PARAMETERS
from paceline.parallel.spec import StrategySpec
from paceline.strategies.parameter_server import roles

_ASYNC = with_setting("parameter_server.consistency", "async", "bounded")


def _devices_without_gloo(place: Placement) -> str | None:
    return None if place.device_type in ("cpu", "cuda") else f"{place.device_type} devices"


def _launched_devices(place: Placement) -> str | None:
    is_launched = place.num_launched is not None or place.has_several_hosts
    if not is_launched or place.device_type == "cpu":
        return None
    return f"{place.device_type} devices of an outer launcher or of several hosts"


_MODE = "parallel.mode"
LIMITS = (
    Limit(
        _MODE,
        "Gloo, which connects workers and servers, cannot send their tensors",
        "set `parallel.device: cpu`, or `parallel.mode: ddp`",
        supported=(),
        allowed="`parallel.device: cpu` or `cuda`",
        place=_devices_without_gloo,
    ),
    Limit(
        _MODE,
        "each of their ranks has a device, and the servers have none",
        "start it on one host without torchrun (`paceline sft …`), or set `parallel.device: cpu`",
        supported=(),
        place=_launched_devices,
    ),
    Limit(
        "parameter_server.on_worker_failure",
        "it ends all ranks when one ends",
        "start it without torchrun (`paceline sft …`), or set `on_worker_failure: restart`",
        unsupported=("continue",),
        place=outer_launcher,
    ),
    Limit(
        "parameter_server.on_worker_failure",
        "all ranks must be on one host",
        "set `on_worker_failure: restart`: all ranks restart from the latest checkpoint",
        unsupported=("continue",),
        place=several_hosts,
    ),
    *SERVED_PARAMETERS,
    no_compile("compiled blocks are untested with tables on servers"),
    no_state_offload("optimizer", "all", reason=ON_DEVICE, fix=USE_ZERO3),
    no_activation_offload("its models have no blocks whose activations take much memory"),
    needs_float32_weights("its servers update single rows in float32"),
    Limit(
        "train_args.optim",
        "the servers do not support its state",
        "set `train_args.optim: adamw`",
        unsupported=(*QUANTIZED_OPTIMIZERS, "lion", "muon", "schedule_free_adamw"),
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
    no_rollback(_ASYNC),
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

PARAMETER_SERVER = StrategySpec(
    name="parameter_server",
    implementation="paceline.strategies.parameter_server.strategy:ParameterServerStrategy",
    cost_model="paceline.strategies.parameter_server.cost:estimate",
    capabilities=Capabilities(LIMITS, chosen_by_auto=False),
    check_stored="paceline.strategies.parameter_server.check:check_stored",
    count_distinct="paceline.strategies.parameter_server.cost:count_distinct",
    select=roles.implementation,
    extra_ranks=roles.extra_ranks,
    rank_role=roles.rank_role,
    expendable_ranks=roles.expendable_ranks,
)
