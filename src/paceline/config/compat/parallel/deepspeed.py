"""The strategy and the settings that DeepSpeed's keys ask for, of other tools and Paceline's
own."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.config.compat.binding import KeyBinding
from paceline.config.compat.conversion import UnsupportedValue
from paceline.config.compat.merge import RESET, Assignment, Merge, SourceLine
from paceline.config.compat.parallel.deepspeed_json import (
    DeepSpeedJson,
    Setting,
    interpret,
    read_json,
)
from paceline.config.compat.parallel.keys import BELOW_FILE, StrategyKeys
from paceline.config.compat.precision import BF16, DTYPE, FP16, MIXED
from paceline.config.compat.precision import TARGET as PRECISION
from paceline.config.entries import FILE, ConfigEntry, Problem, short
from paceline.config.modes import read_mode, stage_settings
from paceline.config.yaml_read import YamlValue
from paceline.core.errors import ConfigError

_PRECISION = {"train_args.bf16": BF16, "train_args.fp16": FP16}


_PRECISION_TARGETS = (BF16, FP16, DTYPE, MIXED, PRECISION)


_ACCELERATE_DEEPSPEED = (
    "deepspeed_hostfile", "deepspeed_exclusion_filter", "deepspeed_inclusion_filter",
    "deepspeed_multinode_launcher", "deepspeed_moe_layer_cls_names", "offload_optimizer_nvme_path",
    "offload_param_nvme_path", "zero3_init_flag", "zero3_save_16bit_model", "enable_msamp",
    "msamp_opt_level",
)  # fmt: skip


def use_deepspeed(keys: StrategyKeys, names: list[str]) -> None:
    by = keys.by_name[names[0]].entry
    value = True if names[0] == "_distributed_type" else keys.value(names[0])
    settings: Mapping[str, YamlValue] = {"mode": "deepspeed"}
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
    except UnsupportedValue as error:
        keys.refuse(by, error.why, error.fix)
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
    keys: StrategyKeys, by: ConfigEntry, value: Any
) -> tuple[Mapping[str, YamlValue], DeepSpeedJson]:
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


def _find(keys: StrategyKeys, by: ConfigEntry, path: str) -> str:
    """The path itself, or that of a file of the name beside the config."""
    beside = None if keys.base is None else keys.base / path
    if not Path(path).expanduser().exists() and beside is not None and beside.is_file():
        keys.say(by, f"found beside the config: {beside}")
        return str(beside)
    return path


def _accelerate_deepspeed(
    keys: StrategyKeys, by: ConfigEntry, value: Mapping[str, YamlValue]
) -> tuple[Mapping[str, YamlValue], DeepSpeedJson]:
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
        found: dict[str, YamlValue] = {
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


def _apply_json(
    keys: StrategyKeys, by: ConfigEntry, parsed: DeepSpeedJson, name: str, mode: str
) -> None:
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


def _precision(keys: StrategyKeys, by: ConfigEntry, setting: Setting, name: str) -> None:
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


def read_native_json(keys: StrategyKeys) -> None:
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


def json_notices(merge: Merge) -> list[tuple[str, str]]:
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
            f"`{one.entry.key}: {short(one.entry.value)}` ({one.entry.source}) is overridden by"
            f" {winner.entry.shown()}"
        )
        out.append(("warning", text))
    return out
