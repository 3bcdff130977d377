"""The strategies: how training is spread over ranks. One file each; this is the whole registry."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.errors import ConfigError, nearest

if TYPE_CHECKING:
    from paceline.config.schema import Parallel
    from paceline.parallel.base import Strategy
    from paceline.world.group import World

# name → "module:class". Imported when used: the launcher reads the names alone.
STRATEGIES = {
    "single": "paceline.parallel.replicated:Single",
    "ddp": "paceline.parallel.replicated:DistributedDataParallel",
}


def resolve_mode(mode: str, world_size: int) -> str:
    """The strategy's name for a config's ``parallel.mode``.

    Raises:
        ConfigError: no such mode.
    """
    if mode == "auto":
        return "ddp" if world_size > 1 else "single"
    if mode not in STRATEGIES:
        near = nearest(mode, STRATEGIES)
        raise ConfigError(
            f"`parallel.mode: {mode}` is not a mode",
            allowed=", ".join(["auto", *STRATEGIES]),
            fix=f"set `parallel.mode: {near or 'auto'}`",
        )
    return mode


def make_strategy(name: str, settings: Parallel, world: World) -> Strategy:
    """An instance of the strategy ``name`` (see :data:`STRATEGIES`) for this rank."""
    from importlib import import_module

    module, _, attribute = STRATEGIES[name].partition(":")
    return getattr(import_module(module), attribute)(settings, world)  # type: ignore[no-any-return]
