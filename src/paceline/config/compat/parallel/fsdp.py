"""Convert settings of torch's FSDP, as in transformers, Accelerate and axolotl, to a strategy of
Paceline."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.config.compat.conversion import UnsupportedValue, as_names, is_off, read_json_object
from paceline.config.compat.parallel.keys import StrategyKeys, nested_entry, num_ranks
from paceline.config.compat.precision import BF16, FP16
from paceline.config.entries import ConfigEntry, as_bool
from paceline.config.settings import Assignment
from paceline.config.yaml_read import YamlValue
from paceline.core.errors import did_you_mean

_STRATEGIES = {
    "full_shard": "zero3",
    "shard_grad_op": "zero2",
    "no_shard": "ddp",
    "hybrid_shard": "zero3",
    "hybrid_shard_zero2": "zero2",
    "_hybrid_shard_zero2": "zero2",
}
#: FSDP's strategies by number, counted from 1.
_BY_NUMBER = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
_OTHER_FLAGS = ("auto_wrap", "offload")
#: Settings that change neither the results nor the memory of a rank, or that Paceline's own FSDP
#: always has.
_WITHOUT_EFFECT = (
    "auto_wrap_policy", "backward_prefetch", "backward_prefetch_policy", "cpu_offload_pin_memory",
    "cpu_ram_efficient_loading", "final_state_dict_type", "forward_prefetch", "ignored_modules",
    "limit_all_gathers", "min_num_params", "save_policy", "state_dict_config", "state_dict_type",
    "sync_module_states", "transformer_cls_names_to_wrap", "transformer_layer_cls_to_wrap",
    "use_orig_params", "version", "xla_fsdp_grad_ckpt", "xla_fsdp_settings", "xla_fsdp_v2",
)  # fmt: skip
_READ = (
    "sharding_strategy", "reshard_after_forward", "offload_params", "cpu_offload", "offload",
    "activation_checkpointing", "activation_cpu_offload", "mixed_precision",
    "mixed_precision_policy", "xla",
)  # fmt: skip
_NAME = re.compile(r"^fsdp2?(?:_(zero[23]))?(_offload)?$")


@dataclass
class FsdpPlan:
    """The result of reading settings of FSDP.

    Args:
        mode: `zero3`, `zero2` (weights stay gathered after forward) or `ddp` (nothing is sharded).
        hybrid: shards within a host, replicas across hosts.
        precision: `bf16` or `fp16`, if the settings name one.
    """

    mode: str = "zero3"
    hybrid: bool = False
    offload: bool = False
    checkpointing: bool = False
    offloads_activations: bool = False
    precision: str | None = None
    notes: list[str] = field(default_factory=list)

    def set_strategy(self, name: str) -> None:
        self.mode, self.hybrid = _STRATEGIES[name], "hybrid" in name


def fsdp_plan(flags: list[str], config: Mapping[str, YamlValue]) -> FsdpPlan:
    """Read the flags of `fsdp` and the settings of `fsdp_config` (with or without the prefix
    ``fsdp_``).

    Raises:
        UnsupportedValue: a flag or a setting is unknown or not supported.
    """
    plan = FsdpPlan()
    for flag in flags:
        if flag in _STRATEGIES:
            plan.set_strategy(flag)
        elif flag not in _OTHER_FLAGS:
            raise UnsupportedValue(
                f"unknown FSDP flag `{flag}`",
                did_you_mean(flag, [*_STRATEGIES, *_OTHER_FLAGS], f"use {', '.join(_BY_NUMBER)}"),
            )
    settings = {
        key.lower().removeprefix("fsdp_"): value
        for key, value in config.items()
        if not key.startswith("_")
    }
    _check_names(settings)
    _sharding(plan, settings)
    plan.offload = "offload" in flags or any(
        _is_on(settings.get(key)) for key in ("offload_params", "cpu_offload", "offload")
    )
    plan.checkpointing = _is_on(settings.get("activation_checkpointing"))
    plan.offloads_activations = _is_on(settings.get("activation_cpu_offload"))
    plan.precision = _precision(settings)
    inert = [
        key
        for key in settings
        if key in _WITHOUT_EFFECT and settings[key] is not None and key != "version"
    ]
    if inert:
        plan.notes.append(
            f"no effect: {', '.join(inert)} (Paceline shards block by block and saves checkpoints"
            " itself)"
        )
    if plan.mode == "ddp" and plan.offload:
        plan.offload = False
        plan.notes.append("nothing is offloaded because nothing is sharded")
    return plan


def read_fsdp_name(value: str) -> list[str] | None:
    """Return the flags for one of ms-swift's names of FSDP configs (`fsdp2`,
    `fsdp_zero2_offload`), or None for other text."""
    match = _NAME.match(value.strip().lower())
    if match is None:
        return None
    flags = ["shard_grad_op" if match[1] == "zero2" else "full_shard"]
    return [*flags, "offload"] if match[2] else flags


def _is_on(value: Any) -> bool:
    if isinstance(value, Mapping):  # `cpu_offload: {offload_params: true}`
        return any(_is_on(item) for item in value.values())
    return as_bool(value) is True


def _check_names(settings: Mapping[str, YamlValue]) -> None:
    for key, value in settings.items():
        if key not in _WITHOUT_EFFECT and key not in _READ:
            raise UnsupportedValue(
                f"`fsdp_config`: unknown setting `{key}`",
                did_you_mean(key, [*_READ, *_WITHOUT_EFFECT], "remove it"),
                "fsdp_config",
            )
        if key in ("xla", "xla_fsdp_v2") and _is_on(value):
            raise UnsupportedValue(
                f"`fsdp_config`: `{key}` is not supported, as TPUs are not",
                "remove it",
                "fsdp_config",
            )


def _sharding(plan: FsdpPlan, settings: Mapping[str, YamlValue]) -> None:
    """Read `sharding_strategy` of FSDP1, by name or number, and `reshard_after_forward` of
    FSDP2."""
    for key in ("sharding_strategy", "reshard_after_forward"):
        value = as_bool(settings.get(key))
        if value is None:
            continue
        if isinstance(value, bool) and key == "reshard_after_forward":
            name = "full_shard" if value else "shard_grad_op"
            if plan.hybrid:
                name = "hybrid_shard" if value else "hybrid_shard_zero2"
        elif isinstance(value, int) and key == "reshard_after_forward":
            name = "full_shard"
            plan.notes.append(
                f"reshard_after_forward: {value} (a number of ranks): the weights are sharded over"
                " all ranks"
            )
        elif str(value).isdigit() and 1 <= int(value) <= len(_BY_NUMBER):
            name = _BY_NUMBER[int(value) - 1]
        else:
            name = str(value).split(".")[-1].lower()
        if name not in _STRATEGIES:
            raise UnsupportedValue(
                f"`fsdp_config`: unsupported setting `{key}: {value}`",
                f"use {', '.join(known.upper() for known in _BY_NUMBER)}",
                "fsdp_config",
            )
        plan.set_strategy(name)


def _precision(settings: Mapping[str, YamlValue]) -> str | None:
    value = settings.get("mixed_precision_policy", settings.get("mixed_precision"))
    if isinstance(value, Mapping):
        value = value.get("param_dtype")
    name = str(value).lower().removeprefix("torch.")
    return {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16"}.get(name)


def use_fsdp(keys: StrategyKeys, names: list[str]) -> None:
    """Apply the keys that choose FSDP; the first of ``names`` decides."""
    first = keys.by_name[names[0]]
    by = first.entry
    try:
        plan = fsdp_plan(*_fsdp_inputs(keys))
    except UnsupportedValue as error:
        if error.key is not None:
            first = keys.by_name.get(f"_{error.key}", first)
        keys.merge.refuse(first.entry, error.why, error.fix, "parallel.mode")
        return
    settings = _fsdp_settings(keys, by, plan)
    if settings is None:
        return
    entries = [keys.by_name[name].entry for name in names]
    entries += [assigned.entry for assigned in keys.settings]
    for entry in dict.fromkeys(entries):
        keys.set_strategy(entry, settings if entry is by else {"mode": settings["mode"]})
    for text in plan.notes:
        keys.add_notice(by, text)
    if plan.checkpointing:
        for assigned in keys.merge.assigned:
            is_same_layer = assigned.entry.layer == by.layer
            if assigned.target == "train_args.gradient_checkpointing" and is_same_layer:
                # With FSDP, activation_checkpointing takes the place of gradient_checkpointing.
                assigned.weak |= assigned.value in (False, "none")
        keys.assign(by, "train_args.gradient_checkpointing", "full")
    if plan.offloads_activations:
        offload = Assignment("_activation_offload", True, by)
        keys.by_name.setdefault("_activation_offload", offload)
    if plan.precision is not None:
        entry = nested_entry(by, "mixed_precision", plan.precision, by.key)
        target = BF16 if plan.precision == "bf16" else FP16
        keys.merge.assigned.append(Assignment(target, True, entry))


def _fsdp_inputs(keys: StrategyKeys) -> tuple[list[str], dict[str, YamlValue]]:
    """Return the flags of `fsdp`, and the settings of `fsdp_config` and of separate keys."""
    value = keys.value("_fsdp")
    config: dict[str, YamlValue] = {}
    if isinstance(value, str) and value.endswith(".json"):
        content = _fsdp_file(value, "fsdp")
        nested = content.get("fsdp_config")
        config |= nested if isinstance(nested, dict) else {}
        flags = split_flags(content.get("fsdp"))
    else:
        named = read_fsdp_name(value) if isinstance(value, str) else None
        flags = split_flags(value) if named is None else named
    fsdp_config = keys.value("_fsdp_config")
    if isinstance(fsdp_config, str):
        fsdp_config = _fsdp_file(fsdp_config, "fsdp_config")
    config |= fsdp_config or {}
    for assigned in keys.settings:
        config |= assigned.value
    return flags, config


def split_flags(value: Any) -> list[str]:
    """Split `full_shard auto_wrap`, or a list of such text, into flags; true means `full_shard`."""
    if is_off(value):
        return []
    if as_bool(value) is True:
        return ["full_shard"]
    parts = value if isinstance(value, list) else [value]
    return [flag.lower() for part in parts for flag in as_names(str(part).replace(" ", ","))]


def _fsdp_file(path: str, key: str) -> dict[str, YamlValue]:
    return read_json_object(
        Path(path).expanduser(), f"correct the path, or write the settings into `{key}`"
    )


def _fsdp_settings(
    keys: StrategyKeys, by: ConfigEntry, plan: FsdpPlan
) -> dict[str, YamlValue] | None:
    """Return the settings of `parallel` for FSDP with the axis sizes of the config, or None if
    these are not sufficient."""
    settings: dict[str, YamlValue] = {"mode": plan.mode}
    if plan.offload:
        settings["cpu_offload"] = "all"
    hosts, ranks = keys.number("parallel.nnodes"), num_ranks(keys)
    if plan.hybrid and not keys.has_axis_sizes():
        settings["data"] = hosts
        if hosts == 1:
            keys.add_notice(by, "on a single host all ranks form one shard group")
        if ranks is not None and ranks % hosts == 0:
            settings["shard"] = ranks // hosts
    axes = ("data", "context", "tensor", "pipeline")
    sizes = {axis: keys.number(f"parallel.{axis}") for axis in axes}
    if sizes["tensor"] * sizes["pipeline"] == 1 or plan.mode == "ddp":
        return settings
    settings["mode"] = "hybrid"
    if keys.native("parallel.shard") is None and "shard" not in settings:
        others = math.prod(sizes.values())
        if ranks is None or ranks % others:
            larger = " and ".join(
                f"`parallel.{axis}: {size}`" for axis, size in sizes.items() if size > 1
            )
            why = f"FSDP with {larger} requires the number of shards"
            fix = (
                "set `parallel.shard` (dp_shard_size): the number of ranks divided by the other"
                " sizes"
            )
            keys.merge.refuse(by, why, fix, "parallel.shard")
            return None
        settings["shard"] = ranks // others
    if plan.mode == "zero2":
        keys.add_notice(
            by, "with hybrid parallelism the weights are also resharded after forward (FULL_SHARD)"
        )
    return settings


def use_hsdp(keys: StrategyKeys) -> None:
    """Apply `parallel.mode: hsdp`: shards within a host, replicas across hosts."""
    key = keys.by_name.get("_hsdp")
    if key is None or keys.has_axis_sizes():
        return
    hosts = keys.number("parallel.nnodes")
    keys.assign(key.entry, "parallel.data", hosts)
    if hosts == 1:
        keys.add_notice(
            key.entry,
            "on a single host all ranks form one shard group; for replicas set `parallel.data`",
        )
