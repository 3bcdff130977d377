"""The modes that a certificate is made of: their names, and the layout that each name stands for.
No torch here.

A name is one of

- a mode of ``parallel.mode``, as the config sets it up: ``zero3`` (``fsdp``), ``deepspeed``,
  ``pipeline`` …;
- ``deepspeed-1`` … ``deepspeed-3``, ``pipeline-gpipe`` and its like: that mode with another stage
  or schedule;
- ``ddp-balance``, ``zero1-balance``: that mode with unequal shares of the micro-batches, see
  :func:`trial_config`;
- sizes of axes, joined by dashes: ``data2-tensor2``, ``shard2-pipeline2``,
  ``data2-shard2-tensor2``;
- a strategy of your own: ``./file.py:SPEC``;
- ``hybrid``: all the products of axes that fit; ``all``: every mode.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod
from typing import Any, get_args

from paceline.config.schema import Config
from paceline.config.schema.parallel import Parallel
from paceline.core.errors import ConfigError, did_you_mean
from paceline.core.formatting import counted
from paceline.parallel.balance import MIN_MICRO_BATCHES
from paceline.parallel.deepspeed.config import stage_of
from paceline.parallel.registry import (
    ALIASES,
    OTHER_TRAINING,
    STRATEGIES,
    ParallelLayout,
    layout,
    mode_of,
)

_AXES = ("data", "shard", "tensor", "pipeline")
_STAGES = (1, 2, 3)
_SCHEDULES: tuple[str, ...] = get_args(Parallel.model_fields["pipeline_schedule"].annotation)
_BALANCED = ("ddp", "zero1")
_AXIS = re.compile(rf"({'|'.join(_AXES)})([1-9][0-9]*)")


@dataclass(frozen=True)
class Mode:
    """A name, the layout it stands for, and the section ``parallel`` that asks for it."""

    name: str
    layout: ParallelLayout
    parallel: Parallel


def all_modes(config: Config, world_size: int) -> list[str]:
    """The names of every mode and hybrid for that many ranks; whether this config can run under
    each is not looked at. Modes that are another training are left out, but for the config's own.
    """
    settings = config.parallel
    names = [name for name in STRATEGIES if name not in ("hybrid", "deepspeed", *OTHER_TRAINING)]
    names.insert(names.index("ddp") + 1, "ddp-balance")
    names += [f"pipeline-{one}" for one in _SCHEDULES if one != settings.pipeline_schedule]
    names += hybrids(world_size)
    own = configured(config, world_size)
    names += [own] if own is not None and own not in (*names, "deepspeed") else []
    # Last: DeepSpeed keeps a state of its own in the process.
    return [
        *names,
        "deepspeed",
        *(f"deepspeed-{one}" for one in _STAGES if one != stage_of(settings)),
    ]


def configured(config: Config, world_size: int) -> str | None:
    """The name of the mode that the config itself asks for; None for ``auto`` and for sizes that do
    not make the world."""
    settings = config.parallel
    mode = mode_of(settings)
    sizes = [
        (axis, getattr(settings, axis)) for axis in _AXES if (getattr(settings, axis) or 1) > 1
    ]
    if mode == "auto":
        return None
    if mode == "hybrid" or len(sizes) > 1:
        return (
            "-".join(f"{axis}{size}" for axis, size in sizes)
            if prod(size for _, size in sizes) == world_size
            else None
        )
    return mode


def hybrids(world_size: int) -> list[str]:
    """For each choice of two axes or more the most even product that makes the world, larger sizes
    first: 4 → data2-shard2, data2-tensor2, …; 8 → data4-shard2, …, data2-shard2-tensor2, …"""
    found = []
    for count in range(2, len(_AXES) + 1):
        sizes = _factors(world_size, count)
        if sizes is None:
            continue
        found += [
            "-".join(f"{axis}{size}" for axis, size in zip(axes, sizes, strict=True))
            for axes in combinations(_AXES, count)
        ]
    return found


def _factors(number: int, count: int, most: int | None = None) -> tuple[int, ...] | None:
    """``count`` factors above 1, falling, as even as they come; None where there are none."""
    most = number if most is None else most
    if count == 1:
        return (number,) if 1 < number <= most else None
    for first in range(2, most + 1):  # the smallest largest factor is the most even
        if number % first == 0:
            rest = _factors(number // first, count - 1, first)
            if rest is not None:
                return (first, *rest)
    return None


def split_names(text: str, config: Config, world_size: int) -> list[str]:
    """The names in ``--modes a,b``, each once, in their order.

    Raises:
        ConfigError: a name that stands for nothing.
    """
    names: list[str] = []
    for given in (one.strip() for one in text.split(",")):
        if not given:
            continue
        if given == "all":
            names += all_modes(config, world_size)
        elif given == "hybrid":
            names += hybrids(world_size)
        else:
            names.append(make_mode(given, config, world_size).name)
    if not names:
        raise ConfigError(
            "`--modes` names no mode",
            allowed=_allowed(),
            fix="give e.g. `--modes ddp,zero3,data2-tensor2`",
        )
    return list(dict.fromkeys(names))


def make_mode(name: str, config: Config, world_size: int) -> Mode:
    """What a name stands for.

    Raises:
        ConfigError: nothing, or axes that do not make ``world_size`` ranks.
    """
    settings: dict[str, Any] = dict.fromkeys(_AXES)
    base, _, variant = name.partition("-")
    sizes = [_AXIS.fullmatch(one) for one in name.split("-")]
    if all(sizes):
        settings |= {one[1]: int(one[2]) for one in sizes if one} | {"mode": "hybrid"}
        if len({one[1] for one in sizes if one}) < len(sizes):
            raise ConfigError(
                f"`{name}` gives an axis twice", allowed=_allowed(), fix="name each axis once"
            )
    elif base == "deepspeed" and variant in map(str, _STAGES):
        settings |= {"mode": base, "deepspeed_stage": int(variant)}
    elif base == "pipeline" and variant.replace("-", "_") in _SCHEDULES:
        settings |= {"mode": base, "pipeline_schedule": variant.replace("-", "_")}
        name = f"{base}-{settings['pipeline_schedule']}"
    elif base in _BALANCED and variant == "balance":
        settings |= {"mode": base}
    elif name in (*STRATEGIES, *ALIASES) and name != "hybrid":
        settings |= {"mode": ALIASES.get(name, name)}
    elif ":" in name:
        settings |= {"mode": name}
    else:
        known = [*all_modes(config, world_size), *ALIASES, "all", "hybrid"]
        fix = did_you_mean(name, known, "give e.g. `--modes ddp,zero3,data2-tensor2`")
        raise ConfigError(f"`--modes {name}` is not a mode", allowed=_allowed(), fix=fix)
    ranks = 1 if name == "single" else world_size
    settings["balance"] = _weights(config, ranks) if variant == "balance" else "equal"
    parallel = config.parallel.model_copy(update={**settings, "num_gpus": ranks})
    return Mode(ALIASES.get(name, name), layout(parallel, ranks, settings["mode"]), parallel)


def _weights(config: Config, num_ranks: int) -> list[float]:
    """The config's own weights if they fit, else 3 and 1 in turn."""
    balance = config.parallel.balance
    if isinstance(balance, list) and len(balance) == num_ranks:
        return balance
    return [1.0 if rank % 2 else 3.0 for rank in range(num_ranks)]


def trial_config(mode: Mode, config: Config, global_batch_size: int) -> Config:
    """Return the config of a trial. Unequal shares need several micro-batches per rank: smaller
    ones if the global batch has too few of the config's size.

    Raises:
        ConfigError: the global batch has too few samples for that.
    """
    config = config.model_copy(update={"parallel": mode.parallel})
    if mode.parallel.balance == "equal":
        return config
    ranks, args = mode.layout.world_size, config.train_args
    needed = max(MIN_MICRO_BATCHES, 2 * ranks)
    if global_batch_size < needed:
        raise ConfigError(
            f"`{mode.name}` needs at least {needed} micro-batches per step, and the global batch"
            f" has {counted(global_batch_size, 'sample')}",
            fix="raise `train_args.gradient_accumulation_steps` or `per_device_train_batch_size`",
        )
    largest = global_batch_size // (ranks * -(-needed // ranks))
    args = args.model_copy(
        update={"per_device_train_batch_size": min(args.per_device_train_batch_size, largest)}
    )
    return config.model_copy(update={"train_args": args})


def _allowed() -> str:
    variants = [
        *(f"{one}-balance" for one in _BALANCED),
        *(f"deepspeed-{one}" for one in _STAGES),
        *(f"pipeline-{one}" for one in _SCHEDULES),
    ]
    names: Sequence[str] = [*(one for one in STRATEGIES if one != "hybrid"), *ALIASES, *variants]
    return (
        ", ".join(names)
        + ", sizes of axes such as data2-tensor2, hybrid, all, or a strategy of your own as"
        " ./file.py:SPEC"
    )
