"""The modes of a certificate: their names, and the layout of each name. Imports no torch.

A name is one of

- a mode of ``parallel.mode``, as the config sets it up: ``zero3`` (``fsdp``), ``deepspeed``,
  ``pipeline`` …;
- ``deepspeed-1`` … ``deepspeed-3``, ``pipeline-gpipe`` …: that mode with another stage or schedule;
- ``ddp-balance``, ``zero1-balance``: that mode with unequal shares of the micro-batches, see
  :func:`trial_config`;
- sizes of axes, joined by dashes: ``data2-tensor2``, ``shard2-pipeline2``,
  ``data2-shard2-tensor2``;
- a user's strategy: ``./file.py:SPEC``;
- ``hybrid``: all the products of axes that fit; ``all``: every mode.
"""

import contextlib
import re
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import get_args

from paceline.config.schema import Config
from paceline.config.schema.parallel import Parallel
from paceline.core.errors import ConfigError, did_you_mean
from paceline.parallel.balance import MIN_MICRO_BATCHES
from paceline.parallel.registry import (
    ALIASES,
    OTHER_TRAINING,
    STRATEGIES,
    ParallelLayout,
    layout,
    mode_of,
)
from paceline.strategies.deepspeed.config import stage_of

_AXES = ("data", "shard", "context", "tensor", "pipeline")
_STAGES = (1, 2, 3)
_SCHEDULES: tuple[str, ...] = get_args(Parallel.model_fields["pipeline_schedule"].annotation)
_BALANCED = ("ddp", "zero1")
_AXIS = re.compile(rf"({'|'.join(_AXES)})([1-9][0-9]*)")


@dataclass(frozen=True)
class VerifyMode:
    """A mode's name, its layout, and the section ``parallel`` that selects it."""

    name: str
    layout: ParallelLayout
    parallel: Parallel


def all_modes(config: Config, world_size: int) -> list[str]:
    """Return the names of every mode and hybrid for ``world_size`` ranks, whether or not this
    config supports them. Modes whose losses differ by design are omitted, except the configured
    one."""
    settings = config.parallel
    names = [name for name in STRATEGIES if name not in ("hybrid", "deepspeed", *OTHER_TRAINING)]
    names.insert(names.index("ddp") + 1, "ddp-balance")
    names += [f"pipeline-{name}" for name in _SCHEDULES if name != settings.pipeline_schedule]
    names += hybrids(world_size)
    if mode_of(settings) != "auto":
        with contextlib.suppress(ConfigError):
            named = layout(settings, world_size)
            axes = {axis: size for axis, size in asdict(named.axes).items() if size > 1}
            names.append(_axes_name(axes) if len(axes) > 1 else named.strategy)
    names = [name for name in dict.fromkeys(names) if name != "deepspeed"]
    # DeepSpeed comes last because it leaves global state in the process.
    return [
        *names,
        "deepspeed",
        *(f"deepspeed-{stage}" for stage in _STAGES if stage != stage_of(settings)),
    ]


def _axes_name(sizes: dict[str, int]) -> str:
    return "-".join(f"{axis}{size}" for axis, size in sizes.items())


def hybrids(world_size: int) -> list[str]:
    """Return, for each choice of two or more axes, the most even product that is ``world_size``,
    larger sizes first: 4 → data2-shard2, data2-tensor2, …; 8 → data4-shard2, …,
    data2-shard2-tensor2, …"""
    names = []
    for count in range(2, len(_AXES) + 1):
        sizes = _factors(world_size, count)
        if sizes is None:
            continue
        names += [
            _axes_name(dict(zip(axes, sizes, strict=True))) for axes in combinations(_AXES, count)
        ]
    return names


def _factors(number: int, count: int, max_factor: int | None = None) -> tuple[int, ...] | None:
    """Return ``count`` factors above 1, descending and as even as possible; None if there are
    none."""
    max_factor = number if max_factor is None else max_factor
    if count == 1:
        return (number,) if 1 < number <= max_factor else None
    for first in range(2, max_factor + 1):  # the smallest first factor gives the most even product
        if number % first == 0:
            rest = _factors(number // first, count - 1, first)
            if rest is not None:
                return (first, *rest)
    return None


def split_names(text: str, config: Config, world_size: int) -> list[str]:
    """Return the names in ``--modes a,b``, without duplicates and in their order.

    Raises:
        ConfigError: a name is not known.
    """
    names: list[str] = []
    for name in (part.strip() for part in text.split(",") if part.strip()):
        if name == "all":
            names += all_modes(config, world_size)
        elif name == "hybrid":
            names += hybrids(world_size)
        else:
            names.append(make_mode(name, config, world_size).name)
    if not names:
        raise ConfigError(
            "`--modes` is empty",
            code="modes-empty",
            allowed=_allowed(),
            fix="set e.g. `--modes ddp,zero3,data2-tensor2`",
        )
    return list(dict.fromkeys(names))


def make_mode(name: str, config: Config, world_size: int) -> VerifyMode:
    """Return the mode of a name.

    Raises:
        ConfigError: the name is not known, or its axes do not multiply to ``world_size`` ranks.
    """
    mode, settings = name, dict[str, str | int]()
    base, _, variant = name.partition("-")
    sizes = [match for match in map(_AXIS.fullmatch, name.split("-")) if match is not None]
    if len(sizes) == name.count("-") + 1:
        mode = "hybrid"
        settings = {match[1]: int(match[2]) for match in sizes}
        if len(settings) < len(sizes):
            raise ConfigError(
                "`{name}` names an axis twice",
                code="repeated-axis",
                allowed=_allowed(),
                fix="name each axis once",
                name=name,
            )
    elif base == "deepspeed" and variant in map(str, _STAGES):
        mode, settings = base, {"deepspeed_stage": int(variant)}
    elif base == "pipeline" and variant.replace("-", "_") in _SCHEDULES:
        mode, settings = base, {"pipeline_schedule": variant.replace("-", "_")}
        name = f"{base}-{settings['pipeline_schedule']}"
    elif base in _BALANCED and variant == "balance":
        mode = base
    elif name in (*STRATEGIES, *ALIASES) and name != "hybrid":
        mode = ALIASES.get(name, name)
    elif ":" not in name:
        known = [*all_modes(config, world_size), *ALIASES, "all", "hybrid"]
        fix = did_you_mean(name, known, "set e.g. `--modes ddp,zero3,data2-tensor2`")
        raise ConfigError(
            "`--modes {name}` is not a mode",
            code="unknown-verify-mode",
            allowed=_allowed(),
            fix=fix,
            name=name,
        )
    ranks = 1 if name == "single" else world_size
    update = {
        **dict.fromkeys(_AXES),
        **settings,
        "mode": mode,
        "balance": _weights(config, ranks) if variant == "balance" else "equal",
        "num_gpus": ranks,
    }
    parallel = config.parallel.model_copy(update=update)
    return VerifyMode(ALIASES.get(name, name), layout(parallel, ranks, mode), parallel)


def _weights(config: Config, num_ranks: int) -> list[float]:
    """Return the config's weights if their number matches, else 3 and 1 alternately."""
    balance = config.parallel.balance
    if isinstance(balance, list) and len(balance) == num_ranks:
        return balance
    return [1.0 if rank % 2 else 3.0 for rank in range(num_ranks)]


def trial_config(mode: VerifyMode, config: Config, global_batch_size: int) -> Config:
    """Return the config of a trial. Unequal shares need several micro-batches per rank, so they are
    made smaller if the global batch has too few of them.

    Raises:
        ConfigError: the global batch has too few samples.
    """
    config = config.model_copy(update={"parallel": mode.parallel})
    if mode.parallel.balance == "equal":
        return config
    ranks, args = mode.layout.world_size, config.train_args
    needed = max(MIN_MICRO_BATCHES, 2 * ranks)
    if global_batch_size < needed:
        raise ConfigError(
            "`{mode}` needs at least {needed} micro-batches per step, and the global batch has"
            " {global_batch_size:sample}",
            code="too-few-micro-batches",
            fix="raise `train_args.gradient_accumulation_steps` or `per_device_train_batch_size`",
            mode=mode.name,
            needed=needed,
            global_batch_size=global_batch_size,
        )
    largest = global_batch_size // (ranks * -(-needed // ranks))
    args = args.model_copy(
        update={"per_device_train_batch_size": min(args.per_device_train_batch_size, largest)}
    )
    return config.model_copy(update={"train_args": args})


def _allowed() -> str:
    names = [
        *(name for name in STRATEGIES if name != "hybrid"),
        *ALIASES,
        *(f"{mode}-balance" for mode in _BALANCED),
        *(f"deepspeed-{stage}" for stage in _STAGES),
        *(f"pipeline-{schedule}" for schedule in _SCHEDULES),
        "sizes of axes such as data2-tensor2",
        "hybrid",
        "all",
    ]
    return ", ".join(names) + ", or your strategy as ./file.py:SPEC"
