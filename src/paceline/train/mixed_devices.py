"""Checks for runs whose hosts have devices of different types, such as a CPU host and a GPU host.

In such a run all ranks use Gloo (see :func:`paceline.distributed.communicator.init_communicator`),
and every replica computes its own update from the same gradient. Devices of different types round
differently, so the replicas cannot be compared bit for bit. Instead, rank 0's weights and optimizer
state are broadcast as often as they would be compared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.errors import ConfigError
from paceline.core.texts import UserText
from paceline.parallel.capabilities import get_setting
from paceline.parallel.registry import get_spec

if TYPE_CHECKING:
    from paceline.config.schema import Config
    from paceline.distributed.communicator import Communicator

#: Devices whose tensors Gloo can send.
_SUPPORTED_TYPES = frozenset({"cpu", "cuda"})


def check_mixed_devices(world: Communicator, config: Config, strategy: str) -> None:
    """Raise ConfigError on every rank if the ranks have devices of different types and the config
    does not support that."""
    if not world.mixes_devices:
        return
    types = ", ".join(sorted(world.device_types))
    hosts = f"hosts with devices of different types ({types})"
    same_type = "or set `parallel.device: cpu` on all hosts"
    unsupported = sorted(world.device_types - _SUPPORTED_TYPES)
    if unsupported:
        raise ConfigError(
            "{hosts} are not supported: Gloo cannot send tensors of {unsupported}",
            code="mixed-devices-gloo",
            allowed="cpu and cuda together",
            fix="use hosts with the same device type, {same_type}",
            hosts=hosts,
            unsupported=", ".join(unsupported),
            same_type=same_type,
        )
    capabilities = get_spec(strategy).capabilities
    if not capabilities.mixed_devices:
        raise ConfigError(
            "{hosts} are not supported with `parallel.mode: {strategy}`",
            code="mixed-devices-mode",
            allowed="`parallel.mode: ddp` and `local_sgd`",
            fix="set `parallel.mode: ddp`, {same_type}",
            hosts=hosts,
            strategy=strategy,
            same_type=same_type,
        )
    optional = {key: get_setting(config, key) for key in capabilities.same_devices_with}
    for setting, is_set in (
        (f"compression.method: {config.compression.text}", bool(config.compression.chain)),
        (
            f"parallel.all_reduce_algorithm: {config.parallel.all_reduce_algorithm}",
            config.parallel.all_reduce_algorithm != "native",
        ),
        *((f"{key}: {value}", value is not None) for key, value in optional.items()),
    ):
        if is_set:
            raise ConfigError(
                "{hosts} are not supported with `{setting}`",
                code="mixed-devices-setting",
                allowed="plain `ddp`, and `local_sgd` with its default workers",
                fix="leave `{key}` out, {same_type}",
                hosts=hosts,
                setting=setting,
                key=setting.partition(":")[0],
                same_type=same_type,
            )


def mixed_devices_notices(world: Communicator) -> list[tuple[str, str]]:
    """Return notices as (level, text) if the ranks have devices of different types, else none."""
    if not world.mixes_devices:
        return []
    types = " and ".join(sorted(world.device_types))
    text = UserText(
        "devices: {types} ranks in one run, over Gloo; with `ddp`, rank 0's weights and"
        " optimizer state are broadcast instead of compared (`recovery.replica_check_steps`),"
        " because devices of different types round differently",
        code="mixed-devices",
        types=types,
    )
    return [("info", text)]
