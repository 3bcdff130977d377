"""Which strategy a run takes, on which mesh: decided before a rank exists."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.core.words import counted
from paceline.parallel import Layout, layout, mode_of, strategy_class

if TYPE_CHECKING:
    from paceline.world.env import RankEnv

Say = Callable[[str, str], None]


def choose_layout(config: Config, num_devices: int, device_type: str, outer: RankEnv | None, say: Say) -> Layout:
    """The layout for ``num_devices`` devices: as the config says, or, with ``mode: auto``, the fastest that fits in memory.

    Args:
        outer: the rank that an outer launcher gave this process.
        say: gets (level, text) of each thing a person should know.

    Raises:
        ConfigError: the axes do not make that number of ranks; or the strategy cannot run this config, with what would fit.
    """
    name = mode_of(config.parallel)
    if name == "auto":
        from paceline.plan import pick

        chosen, why = pick(config, num_devices, device_type=device_type)
        say("info", f"strategy: {chosen.text()}, chosen by `mode: auto`: {why}")
    else:
        chosen = layout(config.parallel, num_devices, name)
        say("info", f"strategy: {chosen.text()}")
    if chosen.num_processes == 1 and outer is not None and outer.world_size > 1:
        raise ConfigError(
            f"`parallel.mode: {name}` runs in one process, and the outer launcher started {counted(outer.world_size, 'rank')}",
            fix="start it without torchrun (`paceline sft …`), or set `parallel.mode: ddp`",
        )
    strategy_class(chosen.strategy).check(config, chosen.axes)
    return chosen
