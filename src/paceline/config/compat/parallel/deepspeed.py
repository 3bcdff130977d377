"""Apply the keys about DeepSpeed, other tools' and Paceline's own: the strategy and the
settings."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.config.compat.binding import KeyBinding
from paceline.config.compat.conversion import UnsupportedValue
from paceline.config.compat.merge import Merge
from paceline.config.compat.parallel.deepspeed_json import (
    SCHEDULE_LENGTH,
    DeepSpeedJson,
    Setting,
    interpret,
    read_json,
)
from paceline.config.compat.parallel.keys import BELOW_FILE, StrategyKeys, nested_entry
from paceline.config.compat.precision import BF16, FP16, TARGETS, is_firm
from paceline.config.compat.precision import TARGET as PRECISION
from paceline.config.entries import FILE, ConfigEntry, Problem, quoted_names
from paceline.config.modes import read_mode, stage_settings
from paceline.config.settings import RESET, Assignment, overridden_text
from paceline.config.yaml_read import YamlValue
from paceline.core.errors import ConfigError

_SCHEDULE = "train_args.lr_scheduler_type"
_PRECISION = {"train_args.bf16": BF16, "train_args.fp16": FP16}
#: Accelerate's keys that have no effect here.
_ACCELERATE_DEEPSPEED = (
    "deepspeed_hostfile", "deepspeed_exclusion_filter", "deepspeed_inclusion_filter",
    "deepspeed_multinode_launcher", "deepspeed_moe_layer_cls_names", "offload_optimizer_nvme_path",
    "offload_param_nvme_path", "zero3_init_flag", "zero3_save_16bit_model", "enable_msamp",
    "msamp_opt_level",
)  # fmt: skip


def use_deepspeed(keys: StrategyKeys, names: list[str]) -> None:
    """Apply the keys that choose DeepSpeed; the first of ``names`` decides."""
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
        keys.merge.refuse(by, error.why, error.fix, "parallel.mode")
        return
    except ConfigError as error:
        keys.merge.problems.append(Problem(error.text(), by, fix=error.fix, target="parallel.mode"))
        return
    keys.set_strategy(by, settings)
    for name in names[1:]:
        keys.set_strategy(keys.by_name[name].entry, {"mode": settings["mode"]})
    if settings["mode"] == "ddp":
        keys.add_notice(by, "ZeRO stage 0 shards nothing, like `ddp`")
    file_name = "" if isinstance(value, Mapping) else Path(str(value)).name
    _apply_json(keys, by, parsed, file_name or by.key, str(settings["mode"]))


def _deepspeed_value(
    keys: StrategyKeys, by: ConfigEntry, value: Any
) -> tuple[Mapping[str, YamlValue], DeepSpeedJson]:
    """Return the settings of `parallel` and the JSON for a value of `deepspeed`: the name of a
    stage, a file, or a mapping."""
    is_json = isinstance(value, str) and value.lstrip().startswith("{")
    is_name = isinstance(value, str) and not is_json
    if is_name and "." not in value and not Path(value).is_file():
        named = read_mode(f"deepspeed_{value.removeprefix('default-')}")
        if "deepspeed_stage" in named or named["mode"] == "ddp":
            return named, DeepSpeedJson()
        if "/" not in value:
            raise UnsupportedValue(
                f"`{value}` is neither a file nor the name of a ZeRO stage",
                "write zero1, zero2, zero3, zero2_offload or zero3_offload, or the path of a"
                " DeepSpeed JSON",
            )
    if is_json:
        value = read_json(value, by.key)
    elif is_name:
        value = _find(keys, by, value)
    parsed = interpret(read_json(value, by.key))
    stage = parsed.stage or 0
    settings = stage_settings(stage, deepspeed=True)
    return (settings | {"deepspeed_config": value} if stage else settings), parsed


def _find(keys: StrategyKeys, by: ConfigEntry, path: str) -> str:
    """Return the path, or the path of a file with this name in the config's folder."""
    if keys.base is None or Path(path).expanduser().exists() or not (keys.base / path).is_file():
        return path
    keys.add_notice(by, f"found in the folder of the config: {keys.base / path}")
    return str(keys.base / path)


def _accelerate_deepspeed(
    keys: StrategyKeys, by: ConfigEntry, value: Mapping[str, YamlValue]
) -> tuple[Mapping[str, YamlValue], DeepSpeedJson]:
    """Convert Accelerate's own settings of DeepSpeed, or the file that it names."""
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
        steps_and_clipping: dict[str, YamlValue] = {
            key: rest.pop(key)
            for key in ("gradient_accumulation_steps", "gradient_clipping")
            if key in rest
        }
        parsed = interpret({"zero_optimization": zero, **steps_and_clipping})
        settings = stage_settings(parsed.stage or 0, deepspeed=True)
    if rest:
        raise UnsupportedValue(f"unknown key `{next(iter(rest))}` in it", "remove it")
    if ignored:
        keys.add_notice(
            by, f"no effect: {quoted_names(ignored)} (Paceline starts the ranks itself)"
        )
    return settings, parsed


def _apply_json(
    keys: StrategyKeys, by: ConfigEntry, parsed: DeepSpeedJson, source: str, mode: str
) -> None:
    """Let the values of a JSON set what the config does not, and report settings that are ignored
    or not supported. ``source``: the name of the JSON for messages."""
    is_overridden = keys.overriding_mode(by, mode) is not None
    if parsed.problems and not is_overridden:
        text = "unsupported settings:\n  " + "\n  ".join(parsed.problems)
        fix = "remove these settings, or set them as the lines above say"
        keys.merge.refuse(by, text, fix, "parallel.mode")
    for setting in parsed.settings:
        if setting.target in _PRECISION:
            _precision(keys, by, setting, source)
        elif (
            not setting.target.startswith("parallel.")
            or setting.target == "parallel.reduce_dtype"  # of `zero1` to `zero3` too
            or (mode == "deepspeed" and not is_overridden)
        ):
            entry = nested_entry(by, setting.name, setting.value, source)
            keys.assign(by, setting.target, setting.sets, entry)
    if not is_overridden:
        keys.add_notice(by, parsed.ignored_text())


def _precision(keys: StrategyKeys, by: ConfigEntry, setting: Setting, source: str) -> None:
    """Apply `bf16.enabled` or `fp16.enabled`, which decide unless the config names a precision."""
    target, value, layer = _PRECISION[setting.target], setting.sets, BELOW_FILE
    precision = f"{setting.target.removeprefix('train_args.')}-mixed"
    if setting.sets is True:
        keys.add_notice(
            by, f"`{setting.name}: true` in it sets `train_args.precision` unless the config does"
        )
        in_file = [
            assigned
            for assigned in keys.merge.assigned
            if assigned.target in TARGETS and assigned.entry.layer == FILE
        ]
        if in_file and not any(is_firm(assigned) for assigned in in_file):
            for assigned in in_file:
                assigned.weak = True
            target, value, layer = PRECISION, precision, FILE
    entry = nested_entry(by, setting.name, setting.value, source, layer)
    keys.merge.assigned.append(Assignment(target, value, entry))
    if setting.sets is True:
        keys.merge.below_file.append(Assignment(PRECISION, precision, entry))


def read_native_json(keys: StrategyKeys) -> None:
    """Apply a DeepSpeed JSON that is given as Paceline's own `parallel.deepspeed_config`."""
    config = keys.native("parallel.deepspeed_config")
    if config is None or not isinstance(config.value, str | Mapping):
        return  # The schema rejects other types.
    by, native = config.entry, keys.native("parallel.mode")
    if by.path[-1] != "deepspeed_config" or not by.section:
        return
    if keys.line(by) is None:
        keys.merge.report(KeyBinding(by, target="parallel.deepspeed_config"), [])
    mode = "deepspeed" if native is None else native.value
    if mode is RESET:
        mode = "auto"
    if mode != "deepspeed":
        keys.add_notice(
            by, f"it belongs to `parallel.mode: deepspeed`, and the mode is {mode}", "warning"
        )
        return
    try:
        if isinstance(config.value, str) and not config.value.lstrip().startswith("{"):
            config.value = _find(keys, by, config.value)
        parsed = interpret(read_json(config.value, by.key))
    except ConfigError as error:
        keys.merge.problems.append(
            Problem(error.text(), by, fix=error.fix, target="parallel.deepspeed_config")
        )
        return
    source = "parallel.deepspeed_config"
    if isinstance(config.value, str):
        source = Path(config.value).name
    mode = "ddp" if parsed.stage == 0 else "deepspeed"
    if native is None:
        keys.assign(by, "parallel.mode", mode)
    else:
        native.value = mode
    if parsed.stage == 0:
        config.value = None
        keys.add_notice(by, "ZeRO stage 0 shards nothing: `parallel.mode: ddp`")
    elif parsed.stage:
        entry = nested_entry(by, "stage", parsed.stage, source)
        keys.assign(by, "parallel.deepspeed_stage", parsed.stage, entry)
    _apply_json(keys, by, parsed, source, mode)


def report_overridden_json(merge: Merge) -> None:
    """Add a warning for each value of a DeepSpeed JSON that the config overrides. The length of
    its schedule has no effect on another schedule."""
    length, kind = merge.winners.get(SCHEDULE_LENGTH), merge.winners.get(_SCHEDULE)
    if length and kind and length.entry.layer == BELOW_FILE and kind.entry.layer != BELOW_FILE:
        merge.set_winner(SCHEDULE_LENGTH, RESET, kind)
        text = f"{length.entry.located()} has no effect with {kind.entry.shown()}"
        merge.general_notices.append(("warning", text))
    for assigned in merge.below_file:
        winner, entry = merge.winners.get(assigned.target), assigned.entry
        if winner is None or winner.value in (RESET, assigned.value):
            continue
        if winner.entry.layer != BELOW_FILE:
            text = overridden_text(entry.located(), winner.entry)
            merge.general_notices.append(("warning", text))
