"""Who this process is among the ranks, as its launcher says."""

from __future__ import annotations

import os
from dataclasses import dataclass

from paceline.core.errors import ConfigError

_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class RankEnv:
    """Rank, world size, and their like within this host."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def outer_launcher() -> RankEnv | None:
    """The rank an outer ``torchrun`` gave this process, or None where there is none.

    Raises:
        ConfigError: a part of the variables is set and a part is missing.
    """
    if not any(name in os.environ for name in ("RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID")):
        return None
    missing = [name for name in _NEEDED if name not in os.environ]
    if missing:
        raise ConfigError(
            f"some variables of an outer launcher are set, but not {', '.join(missing)}",
            allowed="all of " + ", ".join(_NEEDED) + " (as torchrun sets them), or none",
            fix="start with `torchrun --nproc-per-node N -m paceline …`, or unset RANK and LOCAL_RANK",
        )
    return from_environment()


def from_environment() -> RankEnv:
    """As torchrun and torch.distributed.elastic set it.

    Raises:
        ConfigError: a variable that is no number.
    """
    world = _number("WORLD_SIZE", 1)
    return RankEnv(
        rank=_number("RANK", 0),
        world_size=world,
        local_rank=_number("LOCAL_RANK", 0),
        local_world_size=_number("LOCAL_WORLD_SIZE", world),
    )


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(
            f"the environment variable {name}={text!r} is no number",
            fix=f"start with `torchrun --nproc-per-node N -m paceline …`, or unset {name}",
        ) from error
