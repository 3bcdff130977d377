"""How other tools choose a parallelism strategy: the values of their keys, read one by one.

What depends on several keys (`fsdp` with `fsdp_config`, `num_processes` with `num_machines`) is
kept under names with ``_`` in front and put together by
:mod:`paceline.config.compat.parallel.strategy`.
"""

from collections.abc import Mapping
from typing import Any

from paceline.config.compat.conversion import (
    Conversion,
    Convert,
    UnsupportedValue,
    as_bool,
    by_case,
    info,
    is_off,
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


def deepspeed(value: Any) -> Conversion:
    """`deepspeed`: a file, the mapping itself, or ms-swift's name of a stage."""
    value = as_bool(value)
    if is_off(value):
        return Conversion()
    if value is True or isinstance(value, str | Mapping):
        return Conversion({"_deepspeed": value})
    raise UnsupportedValue(
        "expected a DeepSpeed JSON or the name of a stage",
        "write deepspeed: ds_config.json, or deepspeed: zero2",
    )


def deepspeed_config(value: Any) -> Conversion:
    """Accelerate's `deepspeed_config`."""
    if is_off(value):
        return Conversion()
    return (
        Conversion({"_deepspeed_config": value}) if isinstance(value, Mapping) else deepspeed(value)
    )


def zero_stage(value: Any) -> Conversion:
    """`accelerate launch --zero_stage`."""
    return deepspeed(f"zero{value}")


def fsdp(value: Any) -> Conversion:
    """`fsdp` of transformers: words such as ``full_shard auto_wrap offload``, as text or as a
    list."""
    value = as_bool(value)
    return Conversion({"_fsdp": "" if is_off(value) else value})


def fsdp_config(value: Any) -> Conversion:
    if is_off(value):
        return Conversion()
    if isinstance(value, str | Mapping):
        return Conversion({"_fsdp_config": value})
    raise UnsupportedValue(
        "expected a mapping, or the path of a JSON file",
        "write fsdp_config: {reshard_after_forward: true}",
    )


def fsdp_setting(name: str) -> Convert:
    """A setting of FSDP that is written as a key of its own: as if it were in `fsdp_config`."""
    return lambda value: Conversion({"_fsdp_setting": {name: value}})


_NO_STRATEGY = {
    "MEGATRON_LM": (
        "Megatron-LM is not used; tensor and pipeline parallelism are `parallel.tensor` and"
        " `parallel.pipeline`"
    ),
    "XLA": "TPUs are not supported",
    "TPU": "TPUs are not supported",
}


def distributed_type(value: Any) -> Conversion:
    """Accelerate's `distributed_type`."""
    name = (
        str(value).removeprefix("DistributedType.").upper() if not isinstance(value, bool) else "NO"
    )
    if name in _NO_STRATEGY:
        raise UnsupportedValue(_NO_STRATEGY[name], "remove it, and set `parallel.mode`")
    if name in ("DEEPSPEED", "FSDP", "TP", "NO") or name.startswith("MULTI_"):
        sets: dict[str, YamlValue] = {"_distributed_type": name}
        return Conversion({**sets, "parallel.device": "cpu"} if name == "MULTI_CPU" else sets)
    raise UnsupportedValue(
        f"`{value}` is not a distributed type of Accelerate that Paceline knows",
        "use MULTI_GPU, FSDP, DEEPSPEED or NO",
    )


# -- sizes


def size(target: str) -> Convert:
    """The size of an axis. 1 sets nothing, and neither does -1 (what the other axes leave)."""

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
    "cp_size": by_case("context_parallel_size"),
    "sp_size": by_case("context_parallel_size"),
    "ep_size": by_case("expert_parallel_size"),
}
_SIZE_DETAILS = ("cp_", "sp_", "ep_", "tp_", "dp_")


def _sizes(value: Mapping[str, YamlValue]) -> tuple[dict[str, YamlValue], list[str]]:
    """The sizes of axes in a mapping, and the keys that are something else."""
    sets: dict[str, YamlValue] = {}
    rest = []
    for key, one in value.items():
        name = key.removeprefix("parallelism_config_")
        if name not in _SIZES:
            rest.append(key)
        elif one is not None:
            try:
                sets.update(_SIZES[name](one).sets)
            except UnsupportedValue as refused:
                raise UnsupportedValue(f"`{key}: {one}`: {refused.why}", refused.fix) from None
    return sets, rest


def parallelism_config(value: Any) -> Conversion:
    """Accelerate's `parallelism_config`, also as `TrainingArguments` take it."""
    if is_off(value):
        return Conversion()
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


def dist_config(value: Any) -> Conversion:
    """LLaMA-Factory v1's `dist_config`: ``{name: fsdp2 | deepspeed, ...}``."""
    if is_off(value):
        return Conversion()
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
    kept = (
        "reshard_after_forward",
        "offload_params",
        "cpu_offload",
        "mixed_precision",
        "activation_checkpointing",
    )
    config = {key: value[key] for key in kept if key in rest and value[key] is not None}
    return Conversion({**sets, "_fsdp": "full_shard", "_fsdp_config": config})


def tp_config(value: Any) -> Conversion:
    """Accelerate's `tp_config`."""
    if is_off(value):
        return Conversion()
    if not isinstance(value, Mapping):
        raise UnsupportedValue("expected a mapping", "write tp_config: {tp_size: 2}")
    return size("parallel.tensor")(value.get("tp_size", 1))
