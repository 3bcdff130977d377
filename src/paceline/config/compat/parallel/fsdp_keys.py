"""The strategy and the settings that the keys of FSDP ask for together."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.config.compat.conversion import UnsupportedValue, as_bool, is_off, words
from paceline.config.compat.merge import Assignment
from paceline.config.compat.parallel.fsdp import FsdpPlan, fsdp_plan, read_fsdp_name
from paceline.config.compat.parallel.keys import BELOW_FILE, StrategyKeys, num_ranks
from paceline.config.compat.precision import BF16, FP16
from paceline.config.entries import ConfigEntry


def use_fsdp(keys: StrategyKeys, names: list[str]) -> None:
    by = keys.by_name[names[0]].entry
    try:
        flags, config = _fsdp_inputs(keys)
        plan = fsdp_plan(flags, config)
    except UnsupportedValue as refused:
        at = keys.by_name.get(
            "_fsdp_config" if refused.why.startswith("`fsdp_config") else names[0],
            keys.by_name[names[0]],
        )
        keys.refuse(at.entry, refused.why, refused.fix)
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


def _fsdp_inputs(keys: StrategyKeys) -> tuple[list[str], dict[str, Any]]:
    """The words of `fsdp`, and the settings of `fsdp_config` and of keys of its own."""
    value = keys.value("_fsdp")
    config: dict[str, Any] = {}
    flags: list[str] = []
    if isinstance(value, str) and value.endswith(".json"):
        inside = _fsdp_file(value, "fsdp")
        flags, value = words_of(inside.get("fsdp")), None
        config |= inside.get("fsdp_config") or {}
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
    return [word.lower() for part in parts for word in words(str(part).replace(" ", ","))]


def _fsdp_file(path: str, key: str) -> dict[str, Any]:
    try:
        found = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnsupportedValue(
            f"{path} cannot be read: {error}",
            f"correct the path, or write the settings into `{key}`",
        ) from None
    if not isinstance(found, dict):
        raise UnsupportedValue(f"{path} is not a JSON object", f"write the settings into `{key}`")
    return found


def _fsdp_settings(keys: StrategyKeys, by: ConfigEntry, plan: FsdpPlan) -> dict[str, Any] | None:
    """The settings of `parallel` for FSDP with the sizes of axes that the config gives; None where
    they do not suffice."""
    settings: dict[str, Any] = {"mode": plan.mode}
    if plan.offload:
        settings["offload"] = "all"
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
