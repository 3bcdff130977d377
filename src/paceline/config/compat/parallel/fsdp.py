"""Settings of torch's FSDP as transformers, Accelerate and axolotl write them, read as a strategy
of Paceline."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.config.compat.conversion import (
    UnsupportedValue,
    as_bool,
    as_names,
    is_off,
    read_json_object,
)
from paceline.config.compat.merge import Assignment
from paceline.config.compat.parallel.keys import BELOW_FILE, StrategyKeys, num_ranks
from paceline.config.compat.precision import BF16, FP16
from paceline.config.entries import ConfigEntry
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
# from 1 on
_BY_NUMBER = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
_OTHER_WORDS = ("auto_wrap", "offload")
#: Settings that change neither the results nor what a rank holds, or that Paceline's own FSDP
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
    "activation_checkpointing", "mixed_precision", "mixed_precision_policy", "xla",
)  # fmt: skip
_NAME = re.compile(r"^fsdp2?(?:_(zero[23]))?(_offload)?$")


@dataclass
class FsdpPlan:
    """What settings of FSDP come to.

    Args:
        mode: `zero3`, `zero2` (weights stay whole after forward) or `ddp` (nothing is sharded).
        hybrid: shards within a host, replicas across hosts.
        precision: `bf16` or `fp16`, if the settings name one.
    """

    mode: str = "zero3"
    hybrid: bool = False
    offload: bool = False
    checkpointing: bool = False
    precision: str | None = None
    notes: list[str] = field(default_factory=list)


def fsdp_plan(flags: list[str], config: Mapping[str, YamlValue]) -> FsdpPlan:
    """Read the words of `fsdp` and the settings of `fsdp_config` (with or without ``fsdp_`` in
    front).

    Raises:
        Refused: a word or a setting that Paceline does not know, or cannot honor.
    """
    plan = FsdpPlan()
    for word in flags:
        if word in _STRATEGIES:
            _set_strategy(plan, word)
        elif word not in _OTHER_WORDS:
            raise UnsupportedValue(
                f"`{word}` is not a setting of FSDP",
                did_you_mean(word, [*_STRATEGIES, *_OTHER_WORDS], f"use {', '.join(_BY_NUMBER)}"),
            )
    plan.offload = "offload" in flags
    settings = {
        key.lower().removeprefix("fsdp_"): value
        for key, value in config.items()
        if not key.startswith("_")
    }
    _check_names(settings)
    _sharding(plan, settings)
    plan.offload |= any(
        _on(settings.get(key)) for key in ("offload_params", "cpu_offload", "offload")
    )
    plan.checkpointing = _on(settings.get("activation_checkpointing"))
    plan.precision = _precision(settings)
    inert = [
        key
        for key in settings
        if key in _WITHOUT_EFFECT and settings[key] is not None and key != "version"
    ]
    if inert:
        plan.notes.append(
            f"without effect in it: {', '.join(inert)} (Paceline shards block by block and saves by"
            " itself)"
        )
    if plan.mode == "ddp" and plan.offload:
        plan.offload = False
        plan.notes.append("nothing is sharded, so nothing is offloaded")
    return plan


def read_fsdp_name(value: str) -> list[str] | None:
    """The words for one of ms-swift's names of FSDP configs (`fsdp2`, `fsdp_zero2_offload`); None
    if it is not one."""
    match = _NAME.match(value.strip().lower())
    if match is None:
        return None
    return [
        "shard_grad_op" if match[1] == "zero2" else "full_shard",
        *(["offload"] if match[2] else []),
    ]


def _on(value: Any) -> bool:
    if isinstance(value, Mapping):  # `cpu_offload: {offload_params: true}`
        return any(_on(one) for one in value.values())
    return as_bool(value) is True


def _set_strategy(plan: FsdpPlan, word: str) -> None:
    plan.mode, plan.hybrid = _STRATEGIES[word], "hybrid" in word


def _check_names(settings: Mapping[str, YamlValue]) -> None:
    for key, value in settings.items():
        if key not in _WITHOUT_EFFECT and key not in _READ:
            raise UnsupportedValue(
                f"`fsdp_config` has no setting `{key}`",
                did_you_mean(key, [*_READ, *_WITHOUT_EFFECT], "remove it"),
            )
        if key in ("xla", "xla_fsdp_v2") and _on(value):
            raise UnsupportedValue(
                f"`fsdp_config` asks for `{key}`, and TPUs are not supported", "remove it"
            )


def _sharding(plan: FsdpPlan, settings: Mapping[str, YamlValue]) -> None:
    """`sharding_strategy` of FSDP1, by name or number, and `reshard_after_forward` of FSDP2."""
    for key in ("sharding_strategy", "reshard_after_forward"):
        value = settings.get(key)
        if value is None:
            continue
        value = as_bool(value)
        if isinstance(value, bool) and key == "reshard_after_forward":
            word = "full_shard" if value else "shard_grad_op"
            if plan.hybrid:
                word = "hybrid_shard" if value else "hybrid_shard_zero2"
        elif isinstance(value, int) and key == "reshard_after_forward":
            word = "full_shard"
            plan.notes.append(
                f"reshard_after_forward: {value} (a number of ranks): the weights are sharded over"
                " all ranks"
            )
        elif str(value).isdigit() and 1 <= int(value) <= len(_BY_NUMBER):
            word = _BY_NUMBER[int(value) - 1]
        else:
            word = str(value).split(".")[-1].lower()
        if word not in _STRATEGIES:
            raise UnsupportedValue(
                f"`fsdp_config` has `{key}: {value}`",
                f"use {', '.join(name.upper() for name in _BY_NUMBER)}",
            )
        _set_strategy(plan, word)


def _precision(settings: Mapping[str, YamlValue]) -> str | None:
    value = settings.get("mixed_precision_policy", settings.get("mixed_precision"))
    if isinstance(value, Mapping):
        value = value.get("param_dtype")
    if is_off(value):
        return None
    name = str(value).lower().removeprefix("torch.")
    return {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16"}.get(name)


def use_fsdp(keys: StrategyKeys, names: list[str]) -> None:
    by = keys.by_name[names[0]].entry
    try:
        flags, config = _fsdp_inputs(keys)
        plan = fsdp_plan(flags, config)
    except UnsupportedValue as error:
        at = keys.by_name.get(
            "_fsdp_config" if error.why.startswith("`fsdp_config") else names[0],
            keys.by_name[names[0]],
        )
        keys.refuse(at.entry, error.why, error.fix)
        return
    settings = _fsdp_settings(keys, by, plan)
    entries = list(dict.fromkeys(keys.by_name[name].entry for name in names))
    entries += [one.entry for one in keys.settings if one.entry not in entries]
    if settings is None:
        return
    for entry in entries:
        keys.set_strategy(entry, settings if entry is by else {"mode": settings["mode"]})
    for text in plan.notes:
        keys.say(by, text)
    if plan.checkpointing:
        for one in keys.merge.assigned:
            if (
                one.target == "train_args.gradient_checkpointing"
                and one.value is False
                and one.entry.layer == by.layer
            ):
                one.weak = True  # "use activation_checkpointing instead of gradient_checkpointing"
        keys.assign(by, "train_args.gradient_checkpointing", True)
    if plan.precision is not None:
        source = replace(
            by,
            path=("mixed_precision",),
            value=plan.precision,
            layer=BELOW_FILE,
            source=by.key,
            token="",
        )
        keys.merge.assigned.append(
            Assignment(BF16 if plan.precision == "bf16" else FP16, True, source)
        )


def _fsdp_inputs(keys: StrategyKeys) -> tuple[list[str], dict[str, YamlValue]]:
    """The words of `fsdp`, and the settings of `fsdp_config` and of keys of its own."""
    value = keys.value("_fsdp")
    config: dict[str, YamlValue] = {}
    flags: list[str] = []
    if isinstance(value, str) and value.endswith(".json"):
        inside = _fsdp_file(value, "fsdp")
        flags, value = words_of(inside.get("fsdp")), None
        nested = inside.get("fsdp_config")
        config |= nested if isinstance(nested, dict) else {}
    elif isinstance(value, str) and (named := read_fsdp_name(value)) is not None:
        flags, value = named, None
    flags += words_of(value)
    given = keys.value("_fsdp_config")
    config |= _fsdp_file(given, "fsdp_config") if isinstance(given, str) else dict(given or {})
    for one in keys.settings:
        config |= one.value
    return flags, config


def words_of(value: Any) -> list[str]:
    """`full_shard auto_wrap`, or the list of these; true is `full_shard`."""
    if is_off(value):
        return []
    if as_bool(value) is True:
        return ["full_shard"]
    parts = value if isinstance(value, list) else [value]
    return [word.lower() for part in parts for word in as_names(str(part).replace(" ", ","))]


def _fsdp_file(path: str, key: str) -> dict[str, YamlValue]:
    fix = f"correct the path, or write the settings into `{key}`"
    return read_json_object(Path(path).expanduser(), fix)


def _fsdp_settings(
    keys: StrategyKeys, by: ConfigEntry, plan: FsdpPlan
) -> dict[str, YamlValue] | None:
    """The settings of `parallel` for FSDP with the sizes of axes that the config gives; None where
    they do not suffice."""
    settings: dict[str, YamlValue] = {"mode": plan.mode}
    if plan.offload:
        settings["cpu_offload"] = "all"
    hosts, ranks = keys.number("parallel.nnodes"), num_ranks(keys)
    if (
        plan.hybrid
        and keys.native("parallel.data") is None
        and keys.native("parallel.shard") is None
    ):
        settings["data"] = hosts
        if hosts == 1:
            keys.say(by, "on one host all its ranks form one group of shards")
        if ranks is not None and ranks % hosts == 0:
            settings["shard"] = ranks // hosts
    sizes = {axis: keys.number(f"parallel.{axis}") for axis in ("data", "tensor", "pipeline")}
    if sizes["tensor"] * sizes["pipeline"] == 1 or plan.mode == "ddp":
        return settings
    settings["mode"] = "hybrid"
    if keys.native("parallel.shard") is None and "shard" not in settings:
        others = sizes["data"] * sizes["tensor"] * sizes["pipeline"]
        if ranks is None or ranks % others:
            cut = " and ".join(
                f"`parallel.{axis}: {size}`" for axis, size in sizes.items() if size > 1
            )
            keys.refuse(
                by,
                f"FSDP with {cut} needs the number of shards",
                "set `parallel.shard` (dp_shard_size): the number of ranks divided by the other"
                " sizes",
                target="parallel.shard",
            )
            return None
        settings["shard"] = ranks // others
    if plan.mode == "zero2":
        keys.say(by, "in a hybrid the weights are sharded after forward too (FULL_SHARD)")
    return settings


def use_hsdp(keys: StrategyKeys) -> None:
    """`parallel.mode: hsdp`: shards within a host, replicas across hosts."""
    given = keys.by_name.get("_hsdp")
    if given is None:
        return
    hosts = keys.number("parallel.nnodes")
    if keys.native("parallel.data") is None and keys.native("parallel.shard") is None:
        keys.assign(given.entry, "parallel.data", hosts)
        if hosts == 1:
            keys.say(
                given.entry,
                "on one host all its ranks form one group of shards; for replicas set"
                " `parallel.data`",
            )
