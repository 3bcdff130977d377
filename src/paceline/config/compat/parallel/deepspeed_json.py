"""Read a DeepSpeed JSON: settings that set a key of Paceline, that are passed to DeepSpeed, that
have no effect, and that are not supported.

No import of DeepSpeed or torch: the JSON is read while the config is loaded. Names and defaults are
from DeepSpeed's `runtime/constants.py` and `runtime/zero/config.py`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.config.compat.conversion import read_table
from paceline.config.schema.schedules import LENGTH
from paceline.config.yaml_read import YamlValue
from paceline.core.errors import ConfigError, did_you_mean

#: Keys of `zero_optimization` that are passed on to DeepSpeed, with the type of their value.
HONORED_ZERO: dict[str, type] = {
    "allgather_bucket_size": int,
    "allgather_partitions": bool,
    "contiguous_gradients": bool,
    "ignore_unused_parameters": bool,
    "overlap_comm": bool,
    "reduce_bucket_size": int,
    "reduce_scatter": bool,
    "round_robin_gradients": bool,
    "stage3_max_live_parameters": int,
    "stage3_max_reuse_distance": int,
    "stage3_model_persistence_threshold": int,
    "stage3_param_persistence_threshold": int,
    "stage3_prefetch_bucket_size": int,
    "sub_group_size": int,
    "use_multi_rank_bucket_allreduce": bool,
}
SHORT_NAMES = {
    key.removeprefix("stage3_"): key for key in HONORED_ZERO if key.startswith("stage3_")
}


@dataclass(frozen=True)
class Rule:
    """Why keys of ``deepspeed.yaml`` have no effect, or cannot be honored, and the further values
    that mean "off"."""

    reason: str
    keys: str
    off_values: Sequence[YamlValue] = ()

    def is_off(self, value: Any) -> bool:
        """Return whether a value leaves the feature off. Where true does so, false does not."""
        if any(off is True for off in self.off_values):
            return value is True or value in (None, "auto")
        return is_off(value) or value in self.off_values


def _rules(section: str) -> dict[str, Rule]:
    rules = [Rule(**group) for group in read_table("parallel/deepspeed.yaml")[section]]
    return {key: rule for rule in rules for key in rule.keys.split()}


#: Keys that do not change what is trained.
IGNORED = _rules("ignored")
#: Keys that cannot be honored when they are on.
REFUSED = _rules("refused")
_ZERO = "zero_optimization"
_SECTIONS: list[str] = read_table("parallel/deepspeed.yaml")["sections"].split()
_SETS: dict[str, str] = read_table("parallel/deepspeed.yaml")["sets"]
#: Keys for the dtype in which gradients are reduced or accumulated, and its names.
_REDUCTIONS = ("communication_data_type", "data_types.grad_accum_dtype")
_FLOAT32, _16_BITS = ("fp32", "float32"), ("fp16", "float16", "half", "bf16", "bfp16", "bfloat16")
_SCHEDULERS = {
    "warmuplr": "constant_with_warmup",
    "warmupdecaylr": "linear",
    "warmupcosinelr": "cosine",
}
_WITH_END = ("warmupdecaylr", "warmupcosinelr")
SCHEDULE_LENGTH = f"train_args.lr_scheduler_kwargs.{LENGTH}"


@dataclass(frozen=True)
class Setting:
    """A value of the JSON that sets a key of Paceline: where it lies in the JSON, the value there,
    and what it sets."""

    name: str
    value: Any
    target: str
    sets: Any


@dataclass
class DeepSpeedJson:
    """The result of reading a DeepSpeed JSON.

    Args:
        stage: ZeRO stage; None if the file has none.
        settings: values that set keys of Paceline.
        ignored: names of settings without effect, by reason.
        problems: one line for each unsupported setting.
    """

    stage: int | None = None
    settings: list[Setting] = field(default_factory=list)
    ignored: dict[str, list[str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def ignored_text(self) -> str:
        """One clause for a notice; empty if nothing is ignored."""
        parts = [
            f"{', '.join(f'`{name}`' for name in names)} ({reason})"
            for reason, names in self.ignored.items()
        ]
        return f"no effect: {'; '.join(parts)}" if parts else ""

    def _ignore(self, name: str, reason: str) -> None:
        self.ignored.setdefault(reason, []).append(name)

    def _refuse(self, name: str, why: str) -> None:
        self.problems.append(f"{name}: {why}")

    def _set(self, name: str, value: Any, target: str, sets: Any = None) -> None:
        self.settings.append(Setting(name, value, target, value if sets is None else sets))

    def read(self, name: str, value: Any) -> None:
        """Sort one key, by its dotted name, or all keys of a section."""
        section, _, key = name.rpartition(".")
        # DeepSpeed takes most names without `stage3_` too
        plain = name.replace(".stage3_", ".")
        if plain not in IGNORED and plain not in REFUSED:
            plain = f"{section}.*"
        if name in _SECTIONS:
            self._section(name, value)
        elif name in _REDUCTIONS:
            self._reduction(name, value)
        elif name in _SETS:
            if value not in ("auto", None):
                self._set(name, value, _SETS[name])
        elif section == _ZERO and SHORT_NAMES.get(key, key) in HONORED_ZERO:
            self._check_type(name, value, HONORED_ZERO[SHORT_NAMES.get(key, key)])
        elif plain in REFUSED:
            refused = REFUSED[plain]
            if not refused.is_off(value):
                shown = f"{name}: false" if value is False else name
                self._refuse(shown, refused.reason.replace("{value}", str(value)))
        elif plain in IGNORED:
            if IGNORED[plain].reason and not is_off(value):
                self._ignore(name, IGNORED[plain].reason)
        elif not key.startswith(("_", "$")):
            self._report_unknown(section, name, key)

    def _section(self, name: str, value: Any) -> None:
        """Read what is not decided key by key, then each key."""
        section = self._mapping(name, value)
        if name in ("bf16", "bfloat16", "fp16"):
            enabled = section.get("enabled")
            if isinstance(enabled, bool):
                setting = "fp16" if name == "fp16" else "bf16"
                self._set(f"{name}.enabled", enabled, f"train_args.{setting}")
            if enabled is not True:
                return
        elif name == "optimizer":
            self._optimizer(section)
        elif name == "scheduler":
            self._scheduler(section)
        elif name == _ZERO:
            self._zero(section)
        for key, item in section.items():
            self.read(f"{name}.{key}", item)

    def _reduction(self, name: str, value: Any) -> None:
        """Read the dtype in which gradients are reduced or accumulated."""
        if is_off(value):
            return
        if value in _16_BITS:
            self._set(name, value, "parallel.reduce_dtype", "auto")
        elif value in _FLOAT32:
            self._set(name, value, "parallel.reduce_dtype", "float32")
            self._refuse(
                name,
                f"{value}; DeepSpeed reduces and accumulates gradients in the type of"
                " `train_args.precision`; `parallel.mode: zero1`, `zero2` and `zero3` do so in"
                " float32",
            )
        else:
            self._refuse(name, f"{value!r} is not one of {', '.join(_FLOAT32 + _16_BITS)}")

    def _check_type(self, name: str, value: Any, kind: type) -> None:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_valid = is_number and value >= 0 and float(value).is_integer()
        if kind is bool:
            is_valid = isinstance(value, bool)
        if value not in (None, "auto") and not is_valid:
            expected = "a whole number" if kind is int else "true or false"
            self._refuse(name, f"{value!r} is not {expected}")

    def _report_unknown(self, section: str, name: str, key: str) -> None:
        names = (*_SECTIONS, *_REDUCTIONS, *_SETS, *IGNORED, *REFUSED)
        parts = [other.rpartition(".") for other in names]
        known = [last for prefix, _, last in parts if prefix == section]
        if section == _ZERO:
            known += [*HONORED_ZERO, *SHORT_NAMES]
        hint = did_you_mean(key, known, form="{}")
        why = "not a key of DeepSpeed that Paceline knows"
        self._refuse(name, f"{why}; {hint}" if hint else why)

    def _mapping(self, name: str, value: Any) -> dict[str, YamlValue]:
        if isinstance(value, Mapping):
            return dict(value)
        if not is_off(value):
            self._refuse(name, f"{value} is not an object")
        return {}

    def _optimizer(self, section: dict[str, YamlValue]) -> None:
        """Read the type, and the two betas that one key holds."""
        params = _params(section)
        kind = str(section.get("type", "auto")).lower()
        if kind == "adam" and params.get("adam_w_mode") is not False:
            kind = "adamw"  # DeepSpeed's own default for the name Adam
        if kind != "auto":
            self._set("optimizer.type", section["type"], "train_args.optim", kind)
        betas = params.get("betas")
        if isinstance(betas, list | tuple) and len(betas) == 2:
            for index, beta in enumerate(betas):
                if beta != "auto":
                    name = f"optimizer.params.betas[{index}]"
                    self._set(name, beta, f"train_args.adam_beta{index + 1}")
        elif not is_off(betas):
            why = "expected two numbers, as `train_args.adam_beta1` and `adam_beta2` are"
            self._refuse("optimizer.params.betas", why)

    def _scheduler(self, section: dict[str, YamlValue]) -> None:
        """Read the type. A schedule that Paceline does not have takes its other settings along."""
        kind = str(section.get("type", "auto"))
        name, length = "scheduler.params.total_num_steps", _params(section).get("total_num_steps")
        if kind.lower() in _WITH_END and not is_off(length):
            self._check_type(name, length, int)
            self._set(name, length, SCHEDULE_LENGTH)
        elif not is_off(length):
            self._ignore(name, "only WarmupDecayLR and WarmupCosineLR have an end")
        if kind == "auto":
            return
        if kind.lower() not in _SCHEDULERS:
            why = f"{kind}; set `train_args.lr_scheduler_type` and `lr_scheduler_kwargs`"
            self._refuse("scheduler.type", why)
            section.clear()
            return
        name = _SCHEDULERS[kind.lower()]
        self._set("scheduler.type", kind, "train_args.lr_scheduler_type", name)
        if "warmup_type" not in _params(section):
            reason = "the warm-up is linear; DeepSpeed's default is logarithmic"
            self._ignore("scheduler.params.warmup_type", reason)

    def _zero(self, section: dict[str, YamlValue]) -> None:
        """Read the stage, and where the optimizer's state and the parameters are to lie."""
        stage = section.get("stage")
        if stage is not None and (isinstance(stage, bool) or stage not in (0, 1, 2, 3)):
            self._refuse(f"{_ZERO}.stage", f"{stage}; there are the stages 0, 1, 2 and 3")
        elif stage is not None:
            self.stage = int(stage)
        optimizer, parameters = f"{_ZERO}.offload_optimizer", f"{_ZERO}.offload_param"
        optimizer_device = self._offload_device(optimizer, section.get("offload_optimizer"))
        parameter_device = self._offload_device(parameters, section.get("offload_param"))
        moves_optimizer = optimizer_device == "cpu" or section.get("cpu_offload") is True
        moves_parameters = parameter_device == "cpu" or section.get("cpu_offload_param") is True
        if moves_parameters and self.stage is not None and self.stage < 3:
            self._ignore(parameters, "parameters leave the device only at stage 3")
            moves_parameters = False
        if moves_parameters:
            if not moves_optimizer:
                reason = "the optimizer's state moves to the host with the parameters"
                self._ignore(optimizer, reason)
            self._set(parameters, "cpu", "parallel.cpu_offload", "all")
        elif moves_optimizer:
            self._set(optimizer, "cpu", "parallel.cpu_offload", "optimizer")

    def _offload_device(self, name: str, value: Any) -> str:
        section = value if isinstance(value, Mapping) else {"device": value}
        device = section.get("device", "none")
        device = "none" if device in (None, "auto", False) else str(device)
        if device not in ("none", "cpu"):
            why = f"{device}; Paceline offloads to the host's memory (cpu) only"
            self._refuse(f"{name}.device", why)
            return "none"
        if device == "cpu":
            for key, item in section.items():
                self.read(f"{name}.{key}", item)
            if section.get("pin_memory") is False:
                self._ignore(f"{name}.pin_memory", IGNORED[f"{name}.*"].reason)
        return device


def _params(section: Mapping[str, YamlValue]) -> Mapping[str, YamlValue]:
    """The `params` of an optimizer or a scheduler; empty if they are not a mapping."""
    params = section.get("params")
    return params if isinstance(params, Mapping) else {}


def is_off(value: Any) -> bool:
    """Whether a value of a DeepSpeed JSON leaves its feature off, or leaves it to the program
    (`auto`)."""
    if (
        value is None
        or value is False
        or value in ("auto", "none", "", 0)
        or (isinstance(value, list) and not value)
    ):
        return True
    if not isinstance(value, Mapping):
        return False
    if value.get("enabled") in (False, "auto"):
        return True
    return all(is_off(item) for item in value.values())


def interpret(config: Mapping[str, YamlValue]) -> DeepSpeedJson:
    """Read every key of a DeepSpeed JSON."""
    result = DeepSpeedJson()
    for key, value in config.items():
        result.read(key, value)
    return result


def looks_like_deepspeed(tree: Mapping[str, YamlValue]) -> bool:
    """Whether a mapping has the keys that only a DeepSpeed config has."""
    return "zero_optimization" in tree or "train_micro_batch_size_per_gpu" in tree


def read_json(
    config: str | Mapping[str, YamlValue] | None, key: str = "parallel.deepspeed_config"
) -> dict[str, YamlValue]:
    """The DeepSpeed config as a mapping; empty if there is none.

    Args:
        config: the mapping itself, JSON text, or the path of a file.
        key: the config key it was set with, for the error.

    Raises:
        ConfigError: the file cannot be read, or is not a JSON object.
    """
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return dict(config)
    try:
        text = (
            config
            if config.lstrip().startswith("{")
            else Path(config).expanduser().read_text(encoding="utf-8")
        )
        value = json.loads(text)
    except OSError as error:
        raise ConfigError(
            "`{key}: {config}` cannot be read: {reason}",
            code="deepspeed-config-unreadable",
            allowed="the path of a JSON file, or the mapping itself",
            fix="correct the path; for a ZeRO stage without a file set `parallel.mode: deepspeed`"
            " and `parallel.deepspeed_stage`",
            key=key,
            config=config,
            reason=error.strerror or error,
        ) from error
    except ValueError as error:
        raise ConfigError(
            "`{key}: {config}` is not valid JSON: {reason}",
            code="deepspeed-config-invalid-json",
            allowed="the path of a JSON file, or the mapping itself",
            key=key,
            config=config,
            reason=error,
        ) from error
    if not isinstance(value, dict):
        raise ConfigError(
            "`{key}: {config}` contains a {kind}",
            code="deepspeed-config-wrong-type",
            allowed="a JSON object",
            key=key,
            config=config,
            kind=type(value).__name__,
        )
    return value
