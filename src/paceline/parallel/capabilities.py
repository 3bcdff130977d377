"""Declare what a strategy supports, and check configs against it. Imports no torch."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce

from paceline.config.metrics.evaluation import generated_metrics
from paceline.config.schema import Config
from paceline.config.schema.tasks import ROLLOUT_TASKS
from paceline.core.errors import ConfigError
from paceline.distributed.mesh import ParallelDims
from paceline.parallel.balance import check_balance
from paceline.parallel.gradient_compression import check_compression

#: Axes whose ranks hold parts of layers, of rows or of experts.
_DIVIDED = ("tensor", "pipeline", "context", "expert")

#: Returns the setting or mesh that a limit depends on, as text for a message, or None if the limit
#: does not apply.
Subject = Callable[[Config, ParallelDims], str | None]


@dataclass(frozen=True)
class Placement:
    """Where the ranks of a run are, and who starts them.

    Args:
        device_type: type of the devices, such as ``cuda``.
        nnodes: number of hosts, as ``parallel.nnodes`` gives it.
        num_launched: number of ranks that an outer launcher started; None without one.
    """

    device_type: str
    nnodes: int | str = 1
    num_launched: int | None = None

    @property
    def has_several_hosts(self) -> bool:
        return str(self.nnodes) not in ("1", "1:1")


#: Like :data:`Subject`, for limits on hosts, outer launchers and devices.
PlacementSubject = Callable[[Placement], str | None]


@dataclass(frozen=True)
class Limit:
    """Values of a setting that a strategy does not support.

    Args:
        setting: key of the setting in the config, such as ``train_args.optim``.
        reason: reason why the values are not supported, for the message.
        fix: advice on what to change, for the message.
        unsupported: values that are not supported. Set either this or ``supported``.
        supported: the only values that are supported.
        allowed: values that can be set instead, for the message.
        subject: what the setting is not supported with; default: the mode.
        value_of: key of the attribute that is compared, if it is not the setting itself.
        place: what the setting is not supported with, if that depends on the hosts, on an outer
            launcher or on the type of the devices. Such a limit is checked before the ranks start,
            not in plans for other machines.
    """

    setting: str
    reason: str
    fix: str
    unsupported: tuple[object, ...] = ()
    supported: tuple[object, ...] | None = None
    allowed: str | None = None
    subject: Subject | None = None
    value_of: str | None = None
    place: PlacementSubject | None = None

    def applies(self, config: Config) -> bool:
        """Return whether the config has an unsupported value of the setting."""
        value = get_setting(config, self.value_of or self.setting)
        return value in self.unsupported if self.supported is None else value not in self.supported


@dataclass(frozen=True)
class Capabilities:
    """The settings and features that a strategy supports.

    Args:
        limits: settings that it does not support, in the order in which they are checked.
        reduces_in_buckets: whether gradients of replicas are reduced in buckets, so that they can
            be compressed or reduced by one of Paceline's all-reduce algorithms.
        unequal_shares: whether ranks may run different numbers of micro-batches
            (``parallel.balance``).
        equal_shares_reason: reason why they may not, for the message.
        mixed_devices: whether ranks may use devices of different types, over Gloo.
        same_devices_with: optional settings that nevertheless need devices of the same type.
        chosen_by_auto: whether ``parallel.mode: auto`` may choose it.
        generates: whether its ranks can generate the completions that they train on.
    """

    limits: tuple[Limit, ...] = ()
    reduces_in_buckets: bool = False
    unequal_shares: bool = False
    equal_shares_reason: str = "its ranks communicate in every micro-batch"
    mixed_devices: bool = False
    same_devices_with: tuple[str, ...] = ()
    chosen_by_auto: bool = True
    generates: bool = False


def get_setting(config: Config, key: str) -> object:
    """Return the value of a setting by its key."""
    return reduce(getattr, key.split("."), config)


def with_setting(key: str, *values: str) -> Subject:
    """Return a subject for configs in which a setting has one of these values."""

    def subject(config: Config, dims: ParallelDims) -> str | None:
        value = get_setting(config, key)
        return f"`{key}: {value}`" if value in values else None

    return subject


def check_limits(mode: str, capabilities: Capabilities, config: Config, dims: ParallelDims) -> None:
    """Raise ConfigError for the first setting that the strategy does not support."""
    for limit in capabilities.limits:
        if limit.place is not None:
            continue
        subject = limit.subject(config, dims) if limit.subject else f"`parallel.mode: {mode}`"
        if subject is not None and limit.applies(config):
            raise _unsupported(limit, get_setting(config, limit.setting), subject)


def check_placement(mode: str, limits: Iterable[Limit], config: Config, place: Placement) -> None:
    """Raise ConfigError for the first setting that is not supported on these hosts, with this outer
    launcher or on these devices."""
    for limit in limits:
        subject = None if limit.place is None else limit.place(place)
        if subject is not None and limit.applies(config):
            is_mode = limit.setting == "parallel.mode"
            value = mode if is_mode else get_setting(config, limit.setting)
            raise _unsupported(limit, value, subject)


def _unsupported(limit: Limit, value: object, subject: str) -> ConfigError:
    text = str(value).lower() if isinstance(value, bool) else value
    text = f"[{', '.join(value)}]" if isinstance(value, list) else text
    return ConfigError(
        "`{setting}: {text}` is not supported with {subject}: {reason}",
        code="not-supported",
        allowed=limit.allowed,
        fix=limit.fix,
        setting=limit.setting,
        text=text,
        subject=subject,
        reason=limit.reason,
    )


def check_features(
    mode: str, capabilities: Capabilities, config: Config, dims: ParallelDims
) -> None:
    """Raise ConfigError if the strategy does not support the config's compression, all-reduce
    algorithm, unequal shares, metrics of generated text, or a task that generates completions."""
    check_generation(config, dims)
    check_rollouts(mode, capabilities.generates, config, dims)
    check_compression(config, mode, capabilities.reduces_in_buckets, dims)
    check_balance(config, mode, capabilities.unequal_shares, capabilities.equal_shares_reason, dims)


def reason_against_generation(config: Config, dims: ParallelDims) -> str | None:
    """Return why the model cannot generate text during training; None if it can."""
    if dims.pipeline > 1:
        return "each token would have to pass through all stages of the pipeline"
    if dims.expert > 1:
        return "ranks that divide the experts would have to generate equal numbers of tokens"
    return None


def check_generation(config: Config, dims: ParallelDims) -> None:
    """Raise ConfigError if metrics are computed from generated text and the strategy cannot
    generate it."""
    names = generated_metrics(config.evaluation.metrics)
    reason = reason_against_generation(config, dims) if names else None
    if reason is not None:
        raise ConfigError(
            "`evaluation.metrics: [{names}]` is not supported here, because the model cannot"
            " generate answers during training: {reason}",
            code="answers-with-mode",
            allowed="`evaluation.metrics: [token_accuracy, perplexity]`",
            fix="remove these metrics, or set `parallel.mode: zero3` or `ddp`",
            names=", ".join(names),
            reason=reason,
        )


def check_rollouts(mode: str, generates: bool, config: Config, dims: ParallelDims) -> None:
    """Check the mesh of a task that generates completions.

    Args:
        generates: whether the strategy can generate.

    Raises:
        ConfigError: the ranks cannot generate, or would have unequal shares.
    """
    if config.task not in ROLLOUT_TASKS:
        return
    axis = next((name for name in _DIVIDED if getattr(dims, name) > 1), None)
    subject, reason = "", None
    if axis is not None:
        subject = f"`parallel.{axis}: {getattr(dims, axis)}`"
        reason = "each rank generates whole completions, with all layers"
    elif not generates:
        subject = f"`parallel.mode: {mode}`"
        reason = "it is untested with weights that change between updates on other ranks"
    elif config.parallel.balance != "equal" and dims.size > 1:
        subject = "`parallel.balance`"
        reason = "the time of a step is mostly the time to generate completions"
    if reason is not None:
        raise ConfigError(
            "`task: {task}` is not supported with {subject}: {reason}",
            code="rollouts-with-mode",
            allowed="`parallel.mode: single`, `ddp`, `zero1`, `zero2`, `zero3`, or `hybrid` with"
            " `data` and `shard`",
            fix="set `parallel.mode: ddp` or `zero3`",
            task=config.task,
            subject=subject,
            reason=reason,
        )
