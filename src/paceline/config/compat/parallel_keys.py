"""Parallelism strategies of other tools, put together from all their keys before the precedence of
keys is settled.

`deepspeed`, `fsdp`, `fsdp_config`, `distributed_type` and their like only mean something together,
so :mod:`paceline.config.compat.parallel_values` keeps them under names with ``_`` in front.
:func:`expand` replaces these by what they set: `parallel.mode`, its stage, its file, the offload,
the sizes of axes, and values that a DeepSpeed JSON has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.config.compat.conversion import UnsupportedValue, as_bool, is_off, words
from paceline.config.compat.deepspeed_json import DeepSpeedJson, Setting, interpret, read_json
from paceline.config.compat.fsdp import FsdpPlan, fsdp_plan, read_fsdp_name
from paceline.config.compat.merge import RESET, Assignment, Merge, SourceLine
from paceline.config.compat.precision import BF16, DTYPE, FP16, MIXED
from paceline.config.compat.precision import TARGET as PRECISION
from paceline.config.entries import FILE, ConfigEntry, KeyBinding, Problem, short
from paceline.config.modes import read_mode, stage_settings
from paceline.core.errors import ConfigError

#: A DeepSpeed JSON gives way to the config: defaults < JSON < config file < overrides.
BELOW_FILE = FILE - 1
_NAMES = (
    "_deepspeed", "_deepspeed_config", "_fsdp", "_fsdp_config", "_fsdp_version", "_fsdp_setting", "_distributed_type",
    "_num_processes", "_hsdp",
)  # fmt: skip
_PRECISION = {"train_args.bf16": BF16, "train_args.fp16": FP16}
_PRECISION_TARGETS = (BF16, FP16, DTYPE, MIXED, PRECISION)
_ACCELERATE_DEEPSPEED = (
    "deepspeed_hostfile", "deepspeed_exclusion_filter", "deepspeed_inclusion_filter", "deepspeed_multinode_launcher",
    "deepspeed_moe_layer_cls_names", "offload_optimizer_nvme_path", "offload_param_nvme_path", "zero3_init_flag",
    "zero3_save_16bit_model", "enable_msamp", "msamp_opt_level",
)  # fmt: skip


@dataclass
class _Keys:
    """The winning value of each ``_`` name, and the lines of the keys they come from."""

    merge: Merge
    base: Path | None
    by_name: dict[str, Assignment] = field(default_factory=dict)
    # of `_fsdp_setting`, all of the winning layer
    settings: list[Assignment] = field(default_factory=list)

    def value(self, name: str) -> Any:
        assigned = self.by_name.get(name)
        return None if assigned is None else assigned.value

    def line(self, entry: ConfigEntry) -> SourceLine | None:
        return next((line for line in self.merge.lines if line.meaning.entry is entry), None)

    def assign(
        self,
        by: ConfigEntry,
        target: str,
        value: Any,
        weak: bool = False,
        entry: ConfigEntry | None = None,
    ) -> None:
        """Let the key ``by`` set ``target``. ``entry``: where the value lies, if not in the key
        itself."""
        assigned = Assignment(target, value, entry or by, weak)
        self.merge.assigned.append(assigned)
        line = self.line(by)
        if line is not None:
            line.assigned.append(assigned)

    def say(self, by: ConfigEntry, text: str, level: str = "info") -> None:
        line = self.line(by)
        if line is not None and text:
            line.says = (*line.says, (level, text))

    def refuse(
        self,
        by: ConfigEntry,
        why: str,
        fix: str | None = None,
        target: str | None = "parallel.mode",
    ) -> None:
        self.merge.problems.append(Problem(f"{by.shown()}: {why}", by, fix=fix, target=target))

    def native(self, target: str) -> Assignment | None:
        """What sets a key of Paceline so far: an override before the file."""
        found = [one for one in self.merge.assigned if one.target == target]
        strong = [one for one in found if not one.weak] or found
        return max(strong, key=lambda one: one.entry.layer, default=None)

    def number(self, target: str, default: int = 1) -> int:
        assigned = self.native(target)
        value = None if assigned is None else assigned.value
        return (
            value
            if isinstance(value, int) and not isinstance(value, bool) and value > 0
            else default
        )

    def overridden(self, by: ConfigEntry, mode: str) -> bool:
        """Whether an override of `parallel.mode` takes the strategy from the key ``by``."""
        native = self.native("parallel.mode")
        return (
            native is not None
            and native.entry.layer > by.layer
            and not native.weak
            and native.value != mode
        )

    def set_strategy(self, by: ConfigEntry, settings: Mapping[str, Any]) -> None:
        """Let ``by`` set `parallel.mode` and what belongs to it, or the mode alone where an
        override takes its place."""
        for key, value in settings.items():
            if key == "mode" or not self.overridden(by, str(settings["mode"])):
                self.assign(by, f"parallel.{key}", value)
        native = self.native("parallel.mode")
        if self.overridden(by, str(settings["mode"])) and native is not None:
            self.say(by, f"its strategy gives way to {native.entry.shown()}")


def expand(merge: Merge, base: Path | None) -> None:
    """Replace the ``_`` names of parallelism in ``merge.assigned`` by what they set.

    Args:
        base: the config file's folder, where a DeepSpeed JSON is looked for too.
    """
    keys = _take(merge, base)
    for act in (_num_processes, _strategy, _hsdp, _native_deepspeed):
        act(keys)


def _take(merge: Merge, base: Path | None) -> _Keys:
    """Take the ``_`` names out of the merge."""
    keys = _Keys(merge, base)
    for name in _NAMES:
        found = [one for one in merge.assigned if one.target == name]
        if not found:
            continue
        layer = max(one.entry.layer for one in found)
        top = [one for one in found if one.entry.layer == layer]
        keys.by_name[name] = top[0]
        if name == "_fsdp_setting":
            keys.settings = top
        elif any(one.value != top[0].value for one in top):
            a, b = top[0].entry, next(one for one in top if one.value != top[0].value).entry
            what = f"{a.shown()} ({a.place()}) and {b.shown()} ({b.place()}) disagree"
            merge.problems.append(Problem(what, b, fix="keep one of the two"))
        for line in merge.lines:
            taken = [one for one in line.assigned if one in found]
            if taken:
                line.assigned = [one for one in line.assigned if one not in found]
                if taken[0] not in top:
                    line.says = (*line.says, ("info", f"gives way to {top[0].entry.shown()}"))
        merge.assigned = [one for one in merge.assigned if one not in found]
    return keys


# -- how many ranks
# -----------------------------------------------------------------------------------------------------------


def _num_processes(keys: _Keys) -> None:
    """Accelerate counts the processes of all hosts, `parallel.num_gpus` those of one."""
    given = keys.by_name.get("_num_processes")
    if given is None:
        return
    hosts, count = keys.number("parallel.nnodes"), given.value
    if hosts == 1 or not isinstance(count, int) or isinstance(count, bool):
        keys.assign(given.entry, "parallel.num_gpus", count)
    elif count % hosts:
        keys.refuse(
            given.entry,
            f"{count} processes do not divide into {hosts} hosts",
            "correct it",
            target="parallel.num_gpus",
        )
    else:
        keys.assign(given.entry, "parallel.num_gpus", count // hosts)
        keys.say(given.entry, f"{count} processes on {hosts} hosts")


def _num_ranks(keys: _Keys) -> int | None:
    """The number of ranks on all hosts, if the config gives it."""
    per_host = keys.number("parallel.num_gpus", 0)
    return per_host * keys.number("parallel.nnodes") if per_host else None


# -- which strategy
# -----------------------------------------------------------------------------------------------------------


def _drop_lower(keys: _Keys) -> None:
    """Drop the file's DeepSpeed or FSDP where an override asks for the other."""
    chosen = [
        keys.by_name[name] for name in ("_deepspeed", "_fsdp") if not is_off(keys.value(name))
    ]
    if len({one.entry.layer for one in chosen}) != 2:
        return
    low, high = sorted(chosen, key=lambda one: one.entry.layer)
    family = "_fsdp" if low.target.startswith("_fsdp") else "_deepspeed"
    for name in [name for name in keys.by_name if name.startswith(family)]:
        if keys.by_name[name].entry.layer == low.entry.layer:
            keys.say(keys.by_name.pop(name).entry, f"gives way to {high.entry.shown()}")


def _strategy(keys: _Keys) -> None:
    _drop_lower(keys)
    kind = keys.value("_distributed_type")
    wants_fsdp = "_fsdp" in keys.by_name and not is_off(keys.value("_fsdp"))
    fsdp_off = "_fsdp" in keys.by_name and not wants_fsdp
    others = [
        name for name in ("_fsdp_config", "_fsdp_version", "_fsdp_setting") if name in keys.by_name
    ]
    deepspeed = [name for name in ("_deepspeed", "_deepspeed_config") if name in keys.by_name]
    if kind not in (None, "DEEPSPEED") and "_deepspeed" not in deepspeed:
        _inert(
            keys, deepspeed, f"it belongs to `distributed_type: DEEPSPEED`, and the type is {kind}"
        )
        deepspeed = []
    if (
        fsdp_off
        or (kind not in (None, "FSDP") and not wants_fsdp)
        or (deepspeed and not wants_fsdp)
    ):
        why = (
            "`fsdp` is off"
            if fsdp_off
            else f"the type is {kind}"
            if kind not in (None, "FSDP")
            else "DeepSpeed is used"
        )
        _inert(keys, others, f"it belongs to FSDP, and {why}")
        others = []
    if (deepspeed or kind == "DEEPSPEED") and (wants_fsdp or kind == "FSDP"):
        first = keys.by_name[deepspeed[0] if deepspeed else "_distributed_type"].entry
        second = keys.by_name["_fsdp" if wants_fsdp else "_distributed_type"].entry
        keys.refuse(
            first,
            f"{second.shown()} ({second.place()}) asks for another strategy",
            "keep one of the two",
        )
    elif deepspeed or kind == "DEEPSPEED":
        _deepspeed(keys, [*deepspeed, *(["_distributed_type"] if kind == "DEEPSPEED" else [])])
    elif wants_fsdp or others or kind == "FSDP":
        _fsdp(
            keys,
            [
                *(["_fsdp"] if wants_fsdp else []),
                *others,
                *(["_distributed_type"] if kind == "FSDP" else []),
            ],
        )
    elif kind is not None:
        _plain(keys, kind)
    if kind is not None and kind not in ("DEEPSPEED", "FSDP") and (deepspeed or wants_fsdp):
        keys.say(keys.by_name["_distributed_type"].entry, "the strategy is chosen by another key")


def _inert(keys: _Keys, names: Sequence[str], why: str) -> None:
    for name in names:
        keys.say(keys.by_name[name].entry, why)


def _plain(keys: _Keys, kind: str) -> None:
    """`distributed_type` alone."""
    by = keys.by_name["_distributed_type"].entry
    sizes = [
        target
        for target in ("shard", "tensor", "pipeline")
        if keys.number(f"parallel.{target}") > 1
    ]
    if sizes:
        keys.say(by, f"the sizes of the axes ({', '.join(sizes)}) choose the strategy")
        return
    modes = {"NO": "single", "TP": "tensor"}
    native = keys.native("parallel.mode")
    if native is None or native.weak or native.entry.layer != by.layer:
        keys.set_strategy(by, {"mode": modes.get(kind, "ddp")})
    else:
        keys.say(by, f"gives way to {native.entry.shown()}")


# -- DeepSpeed
# ----------------------------------------------------------------------------------------------------------------


def _deepspeed(keys: _Keys, names: list[str]) -> None:
    by = keys.by_name[names[0]].entry
    value = True if names[0] == "_distributed_type" else keys.value(names[0])
    settings: dict[str, Any] = {"mode": "deepspeed"}
    parsed = DeepSpeedJson()
    try:
        if (
            names[0] == "_deepspeed_config"
            and isinstance(value, Mapping)
            and "zero_optimization" not in value
        ):
            settings, parsed = _accelerate_deepspeed(keys, by, value)
        elif value is not True:
            settings, parsed = _deepspeed_value(keys, by, value)
    except UnsupportedValue as refused:
        keys.refuse(by, refused.why, refused.fix)
        return
    except ConfigError as error:
        keys.merge.problems.append(Problem(error.what, by, fix=error.fix, target="parallel.mode"))
        return
    for name in names:
        entry = keys.by_name[name].entry
        if name == names[0]:
            keys.set_strategy(entry, settings)
        else:
            keys.set_strategy(entry, {"mode": settings["mode"]})
    if settings["mode"] == "ddp":
        keys.say(by, "ZeRO stage 0 shards nothing, as `ddp`")
    _apply_json(
        keys,
        by,
        parsed,
        "" if isinstance(value, Mapping) else Path(str(value)).name,
        str(settings["mode"]),
    )


def _deepspeed_value(
    keys: _Keys, by: ConfigEntry, value: Any
) -> tuple[dict[str, Any], DeepSpeedJson]:
    """The settings of `parallel` and the JSON of a value of `deepspeed`: the name of a stage, a
    file, or a mapping."""
    if (
        isinstance(value, str)
        and not value.lstrip().startswith("{")
        and "." not in value
        and not Path(value).is_file()
    ):
        named = read_mode(f"deepspeed_{value.removeprefix('default-')}")
        if "deepspeed_stage" in named or named["mode"] == "ddp":
            return named, DeepSpeedJson()
        if "/" not in value:
            raise UnsupportedValue(
                f"`{value}` is neither a file nor the name of a ZeRO stage",
                "write zero1, zero2, zero3, zero2_offload or zero3_offload, or the path of a"
                " DeepSpeed JSON",
            )
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = read_json(value, by.key)
    elif isinstance(value, str):
        value = _find(keys, by, value)
    parsed = interpret(read_json(value, by.key))
    stage = parsed.stage or 0
    settings = stage_settings(stage, deepspeed=True)
    return (settings | {"deepspeed_config": value} if stage else settings), parsed


def _find(keys: _Keys, by: ConfigEntry, path: str) -> str:
    """The path itself, or that of a file of the name beside the config."""
    beside = None if keys.base is None else keys.base / path
    if not Path(path).expanduser().exists() and beside is not None and beside.is_file():
        keys.say(by, f"found beside the config: {beside}")
        return str(beside)
    return path


def _accelerate_deepspeed(
    keys: _Keys, by: ConfigEntry, value: Mapping[str, Any]
) -> tuple[dict[str, Any], DeepSpeedJson]:
    """Accelerate's own settings of DeepSpeed, or the file that it names."""
    rest = dict(value)
    file = rest.pop("deepspeed_config_file", None)
    ignored = [
        key for key in list(rest) if key in _ACCELERATE_DEEPSPEED and rest.pop(key) is not None
    ]
    if file is not None:
        settings, parsed = _deepspeed_value(keys, by, file)
    else:
        zero = {"stage": rest.pop("zero_stage", 2)}
        for key in ("offload_optimizer", "offload_param"):
            zero[key] = {"device": rest.pop(f"{key}_device", None) or "none"}
        found: dict[str, Any] = {
            key: rest.pop(key)
            for key in ("gradient_accumulation_steps", "gradient_clipping")
            if key in rest
        }
        parsed = interpret({"zero_optimization": zero, **found})
        settings = stage_settings(parsed.stage or 0, deepspeed=True)
    if rest:
        raise UnsupportedValue(f"there is no key `{next(iter(rest))}` in it", "remove it")
    if ignored:
        keys.say(
            by,
            f"without effect in it: {', '.join(f'`{key}`' for key in ignored)} (Paceline starts the"
            " ranks itself)",
        )
    return settings, parsed


def _apply_json(keys: _Keys, by: ConfigEntry, parsed: DeepSpeedJson, name: str, mode: str) -> None:
    """Let the values of a JSON set what the config leaves out, and report what is ignored and what
    cannot be honored."""
    overridden = keys.overridden(by, mode)
    if parsed.problems and not overridden:
        text = "settings that cannot be honored:\n  " + "\n  ".join(parsed.problems)
        keys.refuse(by, text, "remove these settings, or set them as the lines above say")
    for setting in parsed.settings:
        if setting.target.startswith("parallel.") and (overridden or mode != "deepspeed"):
            continue
        if setting.target in _PRECISION:
            _precision(keys, by, setting, name or by.key)
            continue
        source = replace(
            by,
            path=(setting.name,),
            value=setting.value,
            layer=BELOW_FILE,
            source=name or by.key,
            token="",
        )
        keys.assign(by, setting.target, setting.sets, entry=source)
        keys.merge.below_file.append(Assignment(setting.target, setting.sets, source))
    if not overridden:
        keys.say(by, parsed.ignored_text())


def _precision(keys: _Keys, by: ConfigEntry, setting: Setting, name: str) -> None:
    """`bf16.enabled` and `fp16.enabled`, which decide unless the config names a precision."""
    in_file = [
        one
        for one in keys.merge.assigned
        if one.target in _PRECISION_TARGETS and one.entry.layer == FILE
    ]
    is_open = [
        one.value == "auto" or (one.target in (DTYPE, MIXED) and one.value == "32")
        for one in in_file
    ]
    target, value, layer = _PRECISION[setting.target], setting.sets, BELOW_FILE
    if setting.sets is True:
        keys.say(
            by, f"`{setting.name}: true` in it sets `train_args.precision` unless the config does"
        )
        if in_file and all(is_open):
            for one in in_file:
                one.weak = True
            target, value, layer = (
                PRECISION,
                f"{setting.target.removeprefix('train_args.')}-mixed",
                FILE,
            )
    source = replace(
        by, path=(setting.name,), value=setting.value, layer=layer, source=name, token=""
    )
    keys.merge.assigned.append(Assignment(target, value, source))
    if setting.sets is True:
        keys.merge.below_file.append(
            Assignment(PRECISION, f"{setting.target.removeprefix('train_args.')}-mixed", source)
        )


def _native_deepspeed(keys: _Keys) -> None:
    """A DeepSpeed JSON that is given as Paceline's own `parallel.deepspeed_config`."""
    given = keys.native("parallel.deepspeed_config")
    if (
        given is None
        or given.value is None
        or given.entry.path[-1] != "deepspeed_config"
        or not given.entry.section
    ):
        return
    if not isinstance(given.value, str | Mapping):
        return  # the schema refuses it
    by, native = given.entry, keys.native("parallel.mode")
    if keys.line(by) is None:
        keys.merge.lines.append(
            SourceLine(KeyBinding(by, target="parallel.deepspeed_config"), [], ())
        )
    mode = "deepspeed" if native is None or native.weak else native.value
    if mode != "deepspeed":
        keys.say(by, f"it belongs to `parallel.mode: deepspeed`, and the mode is {mode}", "warning")
        return
    try:
        if isinstance(given.value, str) and not given.value.lstrip().startswith("{"):
            given.value = _find(keys, by, given.value)
        parsed = interpret(read_json(given.value, by.key))
    except ConfigError as error:
        keys.merge.problems.append(
            Problem(error.what, by, fix=error.fix, target="parallel.deepspeed_config")
        )
        return
    if native is None or native.weak:
        keys.assign(by, "parallel.mode", "ddp" if parsed.stage == 0 else "deepspeed")
    elif parsed.stage == 0:
        native.value = "ddp"
    if parsed.stage == 0:
        given.value = None
        keys.say(by, "ZeRO stage 0 shards nothing: `parallel.mode: ddp`")
    elif parsed.stage:
        source = replace(
            by,
            path=("stage",),
            value=parsed.stage,
            layer=BELOW_FILE,
            source=_name(given.value),
            token="",
        )
        keys.assign(by, "parallel.deepspeed_stage", parsed.stage, entry=source)
        keys.merge.below_file.append(Assignment("parallel.deepspeed_stage", parsed.stage, source))
    _apply_json(keys, by, parsed, _name(given.value), "ddp" if parsed.stage == 0 else "deepspeed")


def _name(given: Any) -> str:
    return Path(given).name if isinstance(given, str) else "parallel.deepspeed_config"


# -- FSDP
# ---------------------------------------------------------------------------------------------------------------------


def _fsdp(keys: _Keys, names: list[str]) -> None:
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


def _fsdp_inputs(keys: _Keys) -> tuple[list[str], dict[str, Any]]:
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


def _fsdp_settings(keys: _Keys, by: ConfigEntry, plan: FsdpPlan) -> dict[str, Any] | None:
    """The settings of `parallel` for FSDP with the sizes of axes that the config gives; None where
    they do not suffice."""
    settings: dict[str, Any] = {"mode": plan.mode}
    if plan.offload:
        settings["offload"] = "all"
    hosts, ranks = keys.number("parallel.nnodes"), _num_ranks(keys)
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


def _hsdp(keys: _Keys) -> None:
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


def notices(merge: Merge) -> list[tuple[str, str]]:
    """Values of a DeepSpeed JSON that the config's own take the place of."""
    out = []
    for one in merge.below_file:
        winner = merge.winners.get(one.target)
        if (
            winner is None
            or winner.value is RESET
            or winner.entry.layer == BELOW_FILE
            or winner.value == one.value
        ):
            continue
        text = (
            f"`{one.entry.key}: {short(one.entry.value)}` ({one.entry.source}) gives way to"
            f" {winner.entry.shown()}"
        )
        out.append(("warning", text))
    return out
