"""Convert the values of keys by which other tools choose a parallelism strategy, one by one.

Keys that depend on others (`fsdp` with `fsdp_config`, `num_processes` with `num_machines`) are kept
under names with ``_`` in front and combined by :mod:`paceline.config.compat.parallel.strategy`.
"""

from collections.abc import Mapping
from typing import Any

from paceline.config.compat.conversion import (
    Conversion,
    Convert,
    UnsupportedValue,
    by_case,
    info,
    skips_off,
)
from paceline.config.modes import is_hsdp, read_mode
from paceline.config.yaml_read import YamlValue


def mode(value: Any) -> Conversion:
    """Paceline's own `parallel.mode`, in any usual spelling."""
    if not isinstance(value, str):
        return Conversion({"parallel.mode": value})
    settings = read_mode(value)
    if settings == {"mode": "auto"}:
        return Conversion(weak={"parallel.mode": "auto"})
    sets: dict[str, YamlValue] = {f"parallel.{key}": item for key, item in settings.items()}
    return Conversion({**sets, "_hsdp": True} if is_hsdp(value) else sets)


def zero_stage(value: Any) -> Conversion:
    """`accelerate launch --zero_stage`."""
    return by_case("deepspeed")(f"zero{value}")


def fsdp_setting(name: str) -> Convert:
    """Return a converter for a setting of FSDP that is a separate key, as if in `fsdp_config`."""
    return lambda value: Conversion({"_fsdp_setting": {name: value}})


# -- sizes


def size(target: str) -> Convert:
    """Return a converter for the size of an axis. 1 and -1 (inferred from the others) set
    nothing."""

    def convert(value: Any) -> Conversion:
        if isinstance(value, bool) or value not in (1, -1, "auto"):
            return Conversion({target: value})
        return info("1 is the default" if value == 1 else "it follows from the number of ranks")

    return convert


_SIZES: dict[str, Convert] = {
    "tp_size": size("parallel.tensor"),
    "pp_size": size("parallel.pipeline"),
    "dp_shard_size": size("parallel.shard"),
    "dp_replicate_size": size("parallel.data"),
    "mp_shard_size": size("parallel.shard"),
    "mp_replicate_size": size("parallel.data"),
    "cp_size": size("parallel.context"),
    "sp_size": size("parallel.context"),
    "ep_size": size("parallel.expert"),
}
_SIZE_DETAILS = ("cp_", "sp_", "ep_", "tp_", "dp_")


def _sizes(value: Mapping[str, YamlValue]) -> tuple[dict[str, YamlValue], list[str]]:
    """Return the sizes of axes in a mapping, and its other keys."""
    sets: dict[str, YamlValue] = {}
    by_target: dict[str, str] = {}
    rest = []
    for key, size_value in value.items():
        name = key.removeprefix("parallelism_config_")
        if name not in _SIZES:
            rest.append(key)
        elif size_value is not None:
            try:
                new = _SIZES[name](size_value).sets
            except UnsupportedValue as error:
                raise UnsupportedValue(f"`{key}: {size_value}`: {error.why}", error.fix) from None
            for target in new:
                if target in by_target:
                    raise UnsupportedValue(
                        f"`{by_target[target]}` and `{key}` in it both set `{target}`",
                        "keep one of the two",
                    )
                by_target[target] = key
            sets.update(new)
    return sets, rest


@skips_off
def parallelism_config(value: Any) -> Conversion:
    """Accelerate's `parallelism_config`, also as `TrainingArguments` take it."""
    if not isinstance(value, Mapping):
        raise UnsupportedValue(
            "expected a mapping", "write parallelism_config: {tp_size: 2}, or parallel.tensor: 2"
        )
    sets, rest = _sizes(value)
    unknown = [
        key for key in rest if not key.removeprefix("parallelism_config_").startswith(_SIZE_DETAILS)
    ]
    if unknown:
        raise UnsupportedValue(
            f"there is no key `{unknown[0]}` in it", f"use {', '.join(list(_SIZES)[:4])}"
        )
    if sets:
        return Conversion(sets)
    return info("all sizes in it are 1")


@skips_off
def dist_config(value: Any) -> Conversion:
    """LLaMA-Factory v1's `dist_config`: ``{name: fsdp2 | deepspeed, ...}``."""
    if not isinstance(value, Mapping) or "name" not in value:
        raise UnsupportedValue("expected a mapping with `name`", "write dist_config: {name: fsdp2}")
    name = str(value["name"]).lower()
    sets, rest = _sizes(value)
    if name == "deepspeed":
        return Conversion({**sets, "_deepspeed": value.get("config_file") or True})
    if name == "ddp":
        return Conversion({**sets, "parallel.mode": "ddp"})
    if not name.startswith("fsdp"):
        raise UnsupportedValue(
            f"`{value['name']}` is not a strategy that Paceline knows",
            "use fsdp2, deepspeed or ddp",
        )
    supported = (
        "reshard_after_forward",
        "offload_params",
        "cpu_offload",
        "mixed_precision",
        "activation_checkpointing",
    )
    config = {key: value[key] for key in supported if key in rest and value[key] is not None}
    return Conversion({**sets, "_fsdp": "full_shard", "_fsdp_config": config})


@skips_off
def tp_config(value: Any) -> Conversion:
    """Accelerate's `tp_config`."""
    if not isinstance(value, Mapping):
        raise UnsupportedValue("expected a mapping", "write tp_config: {tp_size: 2}")
    return size("parallel.tensor")(value.get("tp_size", 1))
