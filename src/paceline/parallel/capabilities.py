"""What a strategy supports, stated once, and the check of a config against it. Imports no torch."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.distributed.mesh import ParallelDims
from paceline.parallel.balance import check_balance
from paceline.parallel.compression.settings import check_compression

#: The setting or mesh that a limit depends on, as text for a message; None if the limit does not
#: apply.
Subject = Callable[[Config, ParallelDims], str | None]


@dataclass(frozen=True)
class Limit:
    """Values of a setting that a strategy does not support.

    Args:
        setting: its key in the config, such as ``train_args.optim``.
        reason: why they are not supported.
        fix: what to change.
        unsupported: the values that are not supported; or
        supported: the only values that are.
        allowed: what can be set instead, for the message.
        subject: what the setting is not supported with; by default the mode.
        value_of: the attribute that is compared, if it is not the setting itself.
    """

    setting: str
    reason: str
    fix: str
    unsupported: tuple[object, ...] = ()
    supported: tuple[object, ...] | None = None
    allowed: str | None = None
    subject: Subject | None = None
    value_of: str | None = None

    def applies(self, config: Config) -> bool:
        """Return whether the config has a value that is not supported."""
        value = get_setting(config, self.value_of or self.setting)
        return value in self.unsupported if self.supported is None else value not in self.supported


@dataclass(frozen=True)
class Capabilities:
    """What a strategy supports.

    Args:
        limits: settings that it does not support, in the order in which they are checked.
        reduces_in_buckets: gradients of replicas are summed in buckets, so they can be compressed
            or summed by one of Paceline's all-reduce algorithms.
        unequal_shares: ranks may run different numbers of micro-batches (``parallel.balance``).
        equal_shares_reason: why they may not.
        mixed_devices: ranks may be on devices of different types, over Gloo.
        ignores_offload: ``parallel.cpu_offload`` has no effect.
        chosen_by_auto: ``parallel.mode: auto`` may choose it.
    """

    limits: tuple[Limit, ...] = ()
    reduces_in_buckets: bool = False
    unequal_shares: bool = False
    equal_shares_reason: str = "its ranks communicate in every micro-batch"
    mixed_devices: bool = False
    ignores_offload: bool = False
    chosen_by_auto: bool = True


def get_setting(config: Config, key: str) -> object:
    """Return the value of a setting by its key."""
    return reduce(getattr, key.split("."), config)


def check_limits(mode: str, capabilities: Capabilities, config: Config, dims: ParallelDims) -> None:
    """Raise ConfigError for the first setting that the strategy does not support."""
    for limit in capabilities.limits:
        subject = limit.subject(config, dims) if limit.subject else f"`parallel.mode: {mode}`"
        if subject is None or not limit.applies(config):
            continue
        value = get_setting(config, limit.setting)
        text = str(value).lower() if isinstance(value, bool) else value
        raise ConfigError(
            f"`{limit.setting}: {text}` is not supported with {subject}: {limit.reason}",
            allowed=limit.allowed,
            fix=limit.fix,
        )


def check_features(
    mode: str, capabilities: Capabilities, config: Config, dims: ParallelDims
) -> None:
    """Raise ConfigError if the strategy does not support the config's compression, all-reduce
    algorithm or unequal shares."""
    check_compression(config, mode, capabilities.reduces_in_buckets, dims)
    check_balance(config, mode, capabilities.unequal_shares, capabilities.equal_shares_reason, dims)
