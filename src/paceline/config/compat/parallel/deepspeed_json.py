"""A DeepSpeed JSON: what of it sets a key of Paceline, what is passed on, what changes nothing,
what cannot be honored.

No import of DeepSpeed or torch: the JSON is read while the config is loaded. Names and defaults are
those of DeepSpeed's `runtime/constants.py` and `runtime/zero/config.py`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.config.compat.conversion import read_table
from paceline.core.errors import ConfigError, did_you_mean

#: Keys of `zero_optimization` that are passed on to DeepSpeed, with the type of their value.
HONOURED_ZERO: dict[str, type] = {
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
#: DeepSpeed takes these names without `stage3_` too.
SHORT_NAMES = {
    key.removeprefix("stage3_"): key for key in HONOURED_ZERO if key.startswith("stage3_")
}


def _reasons(section: str) -> dict[str, str]:
    """A section of ``deepspeed.yaml``: the reason of each key."""
    return {
        key: group["reason"]
        for group in read_table("parallel/deepspeed.yaml")[section]
        for key in group["keys"].split()
    }


#: Top-level keys that do not change what is trained, with the reason.
IGNORED = _reasons("ignored")
#: Top-level keys that cannot be honored when they are on, with the reason.
REFUSED = _reasons("refused")
#: Keys of `zero_optimization` without effect here, with the reason.
_IGNORED_ZERO = _reasons("ignored_zero")
_OFFLOAD_DETAIL = "Paceline configures the offload"
_DTYPES = "the types follow from the precision in `train_args`"
_FEATURE = "Paceline does not use this feature of DeepSpeed"
#: Values that mean "off" for keys of REFUSED whose off is not false or null.
_OFF_VALUES: dict[str, tuple[Any, ...]] = {
    "gradient_predivide_factor": (1, 1.0),
    "sequence_parallel_size": (0, 1),
    "tensor_parallel": ({"autotp_size": 0}, {"autotp_size": 1}),
}
#: Keys of `zero_optimization` that cannot be honored when they are on, with the values that mean
#: "off".
_REFUSED_ZERO: dict[str, tuple[Any, ...]] = {
    "leaf_module": (),
    "legacy_stage1": (),
    "mics_hierarchical_params_gather": (),
    "mics_shard_size": (-1, 0),
    "parameter_alignment": (),
    "zenflow": (),
    "zero_hpz_partition_size": (0, 1),
    "zero_quantized_gradients": (),
    "zero_quantized_nontrainable_weights": (),
    "zero_quantized_weights": (),
}
_PLAIN = {
    "train_micro_batch_size_per_gpu": "train_args.per_device_train_batch_size",
    "gradient_accumulation_steps": "train_args.gradient_accumulation_steps",
    "gradient_clipping": "train_args.max_grad_norm",
}
_OPTIMIZER_PARAMS = {
    "lr": "train_args.learning_rate",
    "eps": "train_args.adam_epsilon",
    "weight_decay": "train_args.weight_decay",
    "momentum": "train_args.momentum",
}
_SCHEDULERS = {
    "warmuplr": "constant_with_warmup",
    "warmupdecaylr": "linear",
    "warmupcosinelr": "cosine",
}
_SCHEDULER_PARAMS = {
    "warmup_max_lr": "train_args.learning_rate",
    "warmup_num_steps": "train_args.warmup_steps",
}
_KNOWN = (
    "bf16",
    "bfloat16",
    "fp16",
    "optimizer",
    "scheduler",
    "train_batch_size",
    "zero_optimization",
)


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
    """What a DeepSpeed JSON comes to.

    Args:
        stage: ZeRO stage; None if the file has none.
        settings: values that set keys of Paceline.
        ignored: names without effect here, by reason.
        problems: one line for each setting that cannot be honored.
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
        return f"without effect in it: {'; '.join(parts)}" if parts else ""

    def _ignore(self, name: str, reason: str) -> None:
        self.ignored.setdefault(reason, []).append(name)

    def _set(self, name: str, value: Any, target: str, sets: Any = None) -> None:
        self.settings.append(Setting(name, value, target, value if sets is None else sets))

    # -- sections
    def _top(self, key: str, value: Any) -> None:
        if key.startswith(("_", "$")) or key in ("comment", "description"):
            return
        if key not in _KNOWN and key not in _PLAIN and key not in IGNORED and key not in REFUSED:
            self._unknown(key, key, [*_KNOWN, *_PLAIN, *IGNORED, *REFUSED])
        elif key == "zero_optimization":
            self._zero(value)
        elif key in ("bf16", "bfloat16", "fp16"):
            self._precision(key, value)
        elif key in _PLAIN:
            if value not in ("auto", None):
                self._set(key, value, _PLAIN[key])
        elif (
            is_off(value) or key == "train_batch_size"
        ):  # the number of ranks decides whether the latter agrees
            pass
        elif key == "optimizer":
            self._optimizer(value)
        elif key == "scheduler":
            self._scheduler(value)
        elif key in IGNORED:
            if key != "zero_allow_untested_optimizer":  # which Paceline sets itself
                self._ignore(key, IGNORED[key])
        elif not any(value == off for off in _OFF_VALUES.get(key, ())):
            self.problems.append(f"{key}: {REFUSED[key]}")

    def _unknown(self, name: str, key: str, known: list[str]) -> None:
        hint = did_you_mean(key, known, form="{}")
        hint = f"; {hint}" if hint else ""
        self.problems.append(f"{name}: not a key of DeepSpeed that Paceline knows{hint}")

    def _mapping(self, name: str, value: Any) -> Mapping[str, Any]:
        if isinstance(value, Mapping):
            return value
        if not is_off(value):
            self.problems.append(f"{name}: {value} is not an object")
        return {}

    def _precision(self, key: str, value: Any) -> None:
        section = self._mapping(key, value)
        name = "fp16" if key == "fp16" else "bf16"
        enabled = section.get("enabled", False)
        if isinstance(enabled, bool) and "enabled" in section:
            self._set(f"{key}.enabled", enabled, f"train_args.{name}")
        if enabled is not True:
            return
        for one in (
            "fp16_master_weights_and_grads",
            "bf16_master_weights_and_grads",
            "bf16_optimizer_states",
        ):
            if not is_off(section.get(one)):
                self.problems.append(f"{key}.{one}: {_DTYPES}")
        if key == "fp16" and section.get("loss_scale", 0) not in (0, "auto"):
            self.problems.append(
                "fp16.loss_scale: a fixed loss scale; Paceline scales the loss dynamically (0)"
            )

    def _optimizer(self, value: Any) -> None:
        section = self._mapping("optimizer", value)
        self.problems += [
            f"optimizer.{key}: {_FEATURE}"
            for key in section
            if key not in ("type", "params", "legacy_fusion")
        ]
        params = dict(self._mapping("optimizer.params", section.get("params", {})))
        kind = str(section.get("type", "auto")).lower()
        decoupled = params.pop("adam_w_mode", True)
        if kind == "adam" and decoupled is not False:
            kind = "adamw"  # DeepSpeed's own default for the name Adam
        if kind != "auto":
            self._set("optimizer.type", section["type"], "train_args.optim", kind)
        for key, one in params.items():
            if one == "auto" or key in ("torch_adam", "fused", "foreach", "fp32_optimizer_states"):
                continue
            if key == "betas" and isinstance(one, list | tuple) and len(one) == 2:
                if one[0] != "auto":
                    self._set("optimizer.params.betas[0]", one[0], "train_args.adam_beta1")
                if one[1] != "auto":
                    self._set("optimizer.params.betas[1]", one[1], "train_args.adam_beta2")
            elif key in _OPTIMIZER_PARAMS:
                self._set(f"optimizer.params.{key}", one, _OPTIMIZER_PARAMS[key])
            elif not (key == "bias_correction" and one is True) and not is_off(one):
                self.problems.append(
                    f"optimizer.params.{key}: the optimizer is built from `train_args`"
                )

    def _scheduler(self, value: Any) -> None:
        section = self._mapping("scheduler", value)
        kind = str(section.get("type", "auto"))
        if kind != "auto" and kind.lower() not in _SCHEDULERS:
            self.problems.append(
                f"scheduler.type: {kind}; set `train_args.lr_scheduler_type` and"
                " `lr_scheduler_kwargs`"
            )
            return
        if kind != "auto":
            self._set(
                "scheduler.type", kind, "train_args.lr_scheduler_type", _SCHEDULERS[kind.lower()]
            )
            if "warmup_type" not in self._mapping("scheduler.params", section.get("params", {})):
                self._ignore(
                    "scheduler.params.warmup_type",
                    "the warm-up is linear; DeepSpeed's default is logarithmic",
                )
        for key, one in self._mapping("scheduler.params", section.get("params", {})).items():
            if (
                one == "auto"
                or (key in ("warmup_min_lr", "warmup_min_ratio") and one == 0)
                or key == "last_batch_iteration"
            ):
                continue
            if key in _SCHEDULER_PARAMS:
                self._set(f"scheduler.params.{key}", one, _SCHEDULER_PARAMS[key])
            elif key == "warmup_type" and one == "linear":
                continue
            else:
                self.problems.append(
                    f"scheduler.params.{key}: the schedule is that of"
                    " `train_args.lr_scheduler_type`"
                )

    def _zero(self, value: Any) -> None:
        section = dict(self._mapping("zero_optimization", value))
        stage = section.pop("stage", None)
        if stage is not None and (isinstance(stage, bool) or stage not in (0, 1, 2, 3)):
            self.problems.append(
                f"zero_optimization.stage: {stage}; there are the stages 0, 1, 2 and 3"
            )
        elif stage is not None:
            self.stage = int(stage)
        self._offload(section)
        for key, one in section.items():
            name = f"zero_optimization.{key}"
            plain = key.removeprefix("stage3_")
            if key in HONOURED_ZERO or key in SHORT_NAMES:
                kind = HONOURED_ZERO[SHORT_NAMES.get(key, key)]
                if one is not None and one != "auto" and not _is_a(one, kind):
                    self.problems.append(
                        f"{name}: {one!r} is not"
                        f" {'a whole number' if kind is int else 'true or false'}"
                    )
            elif plain in _IGNORED_ZERO:
                # which Paceline does in any case
                if not is_off(one) and not plain.startswith("gather_"):
                    self._ignore(name, _IGNORED_ZERO[plain])
            elif key in _REFUSED_ZERO:
                if not is_off(one) and one not in _REFUSED_ZERO[key]:
                    self.problems.append(f"{name}: {_FEATURE}")
            elif not key.startswith("_"):
                known = [*HONOURED_ZERO, *SHORT_NAMES, *_IGNORED_ZERO, *_REFUSED_ZERO]
                self._unknown(name, key, [*known, "stage", "offload_param"])

    def _offload(self, section: dict[str, Any]) -> None:
        """Set `parallel.offload` from where the optimizer's state and the parameters are to lie."""
        given = {key: section.pop(key, None) for key in ("offload_optimizer", "offload_param")}
        devices = {
            key: self._offload_device(f"zero_optimization.{key}", one) for key, one in given.items()
        }
        for legacy, key in (
            ("cpu_offload", "offload_optimizer"),
            ("cpu_offload_param", "offload_param"),
        ):
            if section.pop(legacy, None) is True:
                devices[key] = "cpu"
        parameters = devices["offload_param"] == "cpu"
        if parameters and self.stage is not None and self.stage < 3:
            self._ignore(
                "zero_optimization.offload_param", "parameters leave the device only at stage 3"
            )
            parameters = False
        if parameters:
            if devices["offload_optimizer"] != "cpu":
                self._ignore(
                    "zero_optimization.offload_optimizer",
                    "the optimizer's state moves to the host with the parameters",
                )
            self._set("zero_optimization.offload_param", "cpu", "parallel.offload", "all")
        elif devices["offload_optimizer"] == "cpu":
            self._set("zero_optimization.offload_optimizer", "cpu", "parallel.offload", "optimizer")

    def _offload_device(self, name: str, value: Any) -> str:
        device = value.get("device", "none") if isinstance(value, Mapping) else value
        device = "none" if device in (None, "auto", False) else str(device)
        if device not in ("none", "cpu"):
            self.problems.append(
                f"{name}.device: {device}; Paceline offloads to the host's memory (cpu) only"
            )
            return "none"
        if device == "cpu" and isinstance(value, Mapping):
            if value.get("ratio", 1) not in (1, "auto"):
                self.problems.append(
                    f"{name}.ratio: {value['ratio']}; Paceline offloads all of it (1.0) or nothing"
                )
            if not is_off(value.get("super_offload")):
                self.problems.append(f"{name}.super_offload: {_FEATURE}")
            details = [
                key
                for key in value
                if key not in ("device", "ratio", "super_offload", "pin_memory") and value[key]
            ]
            for key in details:
                self._ignore(f"{name}.{key}", _OFFLOAD_DETAIL)
            if value.get("pin_memory") is False:
                self._ignore(f"{name}.pin_memory", _OFFLOAD_DETAIL)
        return device


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
    return all(is_off(one) for one in value.values())


def _is_a(value: object, kind: type) -> bool:
    if kind is bool:
        return isinstance(value, bool)
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and value >= 0
        and float(value).is_integer()
    )


def interpret(given: Mapping[str, Any]) -> DeepSpeedJson:
    """Sort every key of a DeepSpeed JSON."""
    out = DeepSpeedJson()
    for key, value in given.items():
        out._top(key, value)
    return out


def looks_like_deepspeed(tree: Mapping[str, Any]) -> bool:
    """Whether a mapping has the keys that only a DeepSpeed config has."""
    return "zero_optimization" in tree or "train_micro_batch_size_per_gpu" in tree


def read_json(
    given: str | Mapping[str, Any] | None, key: str = "parallel.deepspeed_config"
) -> dict[str, Any]:
    """The DeepSpeed config as a mapping; empty if there is none.

    Args:
        given: the mapping itself, JSON text, or the path of a file.
        key: the config key it was given with, for the error.

    Raises:
        ConfigError: the file cannot be read, or is not a JSON object.
    """
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return dict(given)
    try:
        text = (
            given
            if given.lstrip().startswith("{")
            else Path(given).expanduser().read_text(encoding="utf-8")
        )
        value = json.loads(text)
    except OSError as error:
        raise ConfigError(
            f"`{key}: {given}` cannot be read: {error.strerror or error}",
            allowed="the path of a JSON file, or the mapping itself",
            fix=(
                "correct the path; for a ZeRO stage without a file set `parallel.mode: deepspeed`"
                " and `parallel.deepspeed_stage`"
            ),
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"`{key}: {given}` is not valid JSON: {error}",
            allowed="the path of a JSON file, or the mapping itself",
        ) from error
    if not isinstance(value, dict):
        raise ConfigError(
            f"`{key}: {given}` contains a {type(value).__name__}", allowed="a JSON object"
        )
    return value
