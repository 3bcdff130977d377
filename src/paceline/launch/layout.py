"""Which strategy a run takes, on which mesh: decided before a rank exists."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.core.formatting import counted
from paceline.core.log import CONSOLE_ONLY
from paceline.parallel.registry import (
    ParallelLayout,
    check_strategy,
    get_spec,
    layout,
    mode_of,
)

if TYPE_CHECKING:
    from paceline.distributed.environment import RankEnv

logger = logging.getLogger(__name__)


def choose_layout(
    config: Config, num_devices: int, device_type: str, outer: RankEnv | None
) -> ParallelLayout:
    """The layout for ``num_devices`` devices: as the config says, or, with ``mode: auto``, the
    fastest that fits in memory.

    Args:
        outer: the rank that an outer launcher gave this process.

    Raises:
        ConfigError: the axes do not make that number of ranks; or the strategy cannot run this
            config, with what would fit.
    """
    name = mode_of(config.parallel)
    if name == "auto":
        from paceline.planner.choose import pick

        chosen, why = pick(config, num_devices, device_type=device_type)
        text = f"strategy: {chosen.text()}, chosen by `mode: auto`: {why}"
    else:
        if outer is not None:  # it has started the serving ranks too
            num_devices -= get_spec(name).extra_ranks(config)
        if num_devices < 1:
            raise ConfigError(
                f"`parallel.mode: {name}` has no worker: all ranks that were started are servers",
                fix="start more ranks, or lower `parameter_server.servers`",
            )
        chosen = layout(config.parallel, num_devices, name)
        text = f"strategy: {chosen.text()}"
    # The `run_start` event holds it.
    logger.info(text, extra=CONSOLE_ONLY)
    if chosen.num_processes == 1 and outer is not None and outer.world_size > 1:
        raise ConfigError(
            f"`parallel.mode: {name}` runs in one process, and the outer launcher started"
            f" {counted(outer.world_size, 'rank')}",
            fix="start it without torchrun (`paceline sft …`), or set `parallel.mode: ddp`",
        )
    if chosen.num_processes == 1 and outer is None and config.parallel.hosts != (1, 1):
        raise ConfigError(
            f"`parallel.mode: {name}` runs in one process, and `parallel.nnodes` is"
            f" {config.parallel.nnodes}",
            fix="set `parallel.mode: ddp`, or `parallel.nnodes: 1`",
        )
    check_strategy(chosen.strategy, config, chosen.axes)
    serving = get_spec(chosen.strategy).extra_ranks(config)
    if serving and device_type != "cpu":
        raise ConfigError(
            f"`parallel.mode: {chosen.strategy}` runs on CPU ranks alone so far, and these are"
            f" {device_type} devices",
            fix="set `parallel.device: cpu`, or `parallel.mode: ddp`",
        )
    if outer is not None and get_spec(chosen.strategy).expendable_ranks(config, chosen.axes):
        raise ConfigError(
            "`parameter_server.on_worker_loss: go_on` needs Paceline's own launcher: an outer one"
            " ends all ranks when one ends",
            fix="start it without torchrun (`paceline sft …`), or set `on_worker_loss: stop`",
        )
    if config.parallel.hosts != (1, 1) and get_spec(chosen.strategy).expendable_ranks(
        config, chosen.axes
    ):
        raise ConfigError(
            "`parameter_server.on_worker_loss: go_on` works on one host, and `parallel.nnodes` is"
            f" {config.parallel.nnodes}",
            fix="set `on_worker_loss: stop`: all ranks then go back to the newest checkpoint",
        )
    return replace(chosen, num_processes=chosen.num_processes + serving)


def check_row_state(config: Config, stored: Config, path: Path) -> None:
    """What servers keep beside the rows must be what the optimizer wants that gets them."""
    there, here = stored.parameter_server.optimizer, config.train_args.optim
    served = stored.parallel.mode == "parameter_server" != config.parallel.mode
    if served and there != here:
        raise ConfigError(
            f"{path} was written by servers with `parameter_server.optimizer: {there}`, and"
            f" `parallel.mode: {config.parallel.mode}` would go on with `optim: {here}` from its"
            " state",
            fix="set `parallel.mode: parameter_server`, or another `output_dir` for a new run",
        )
