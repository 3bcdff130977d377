"""The settings of LLaMA-Factory v1: datasets that a YAML file lists, and mappings with the name of
a plugin and its settings, such as `peft_config: {name: lora, r: 16}`. Each setting is read or
reported."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline.config.compat.conversion import (
    Conversion,
    Convert,
    UnsupportedValue,
    by_case,
    flag,
    is_off,
    listed,
    to,
    warning,
)
from paceline.config.compat.datasets import eval_sources, train_sources
from paceline.config.compat.values import adapter_path, module_names, per_epoch, targets
from paceline.config.entries import Notice, quoted_names
from paceline.config.yaml_read import YamlValue, parse_yaml
from paceline.core.errors import ConfigError, did_you_mean

_FORMATS = {"alpaca": "alpaca", "sharegpt": "sharegpt", "pair": "auto", None: "auto"}
_KEYS = (
    "path", "file_name", "hf_hub_url", "dataset_dir", "source", "converter", "size", "num_samples",
    "weight", "split", "streaming",
)  # fmt: skip


def train_dataset(value: Any) -> Conversion:
    """Convert `train_dataset`: a YAML file that lists datasets, a data file, or a hub id."""
    return _dataset(value, "dataset", train_sources)


def eval_dataset(value: Any) -> Conversion:
    """Convert `eval_dataset`, which can also be a YAML file in LLaMA-Factory v1."""
    return _dataset(value, "val_dataset", eval_sources)


def _dataset(value: Any, key: str, convert: Callable[[Any], Conversion]) -> Conversion:
    """Read the sources that a YAML file lists; ``convert`` reads any other value."""
    if not isinstance(value, str) or not value.endswith((".yaml", ".yml")):
        return convert(value)
    fix = f"correct it, or write {key}: [{{path: ...}}]"
    try:
        tree = parse_yaml(Path(value).expanduser().read_text(encoding="utf-8"), value).value
    except FileNotFoundError:
        raise UnsupportedValue(f"file not found: {value}", fix) from None
    except (ConfigError, OSError, UnicodeDecodeError) as error:
        raise UnsupportedValue(f"cannot read {value}: {error}", fix) from None
    is_list_of_datasets = isinstance(tree, Mapping) and all(
        isinstance(entry, Mapping) for entry in tree.values()
    )
    if not tree or not is_list_of_datasets:
        raise UnsupportedValue(
            f"{value}: expected a mapping of names to datasets",
            "write NAME: {path: FILE, converter: alpaca}",
        )
    sets: dict[str, YamlValue] = {
        key: [_source(name, entry, value) for name, entry in tree.items()]
    }
    if any(entry.get("converter") == "pair" for entry in tree.values()):
        sets["_pairs"] = True
    weighted = [name for name, entry in tree.items() if entry.get("weight") not in (None, 1)]
    text = f"`weight` of {', '.join(weighted)}: every sample is used once per epoch"
    return warning(text if weighted else "", sets)


def _source(name: str, entry: Mapping[str, YamlValue], file: str) -> dict[str, YamlValue]:
    for key in entry:
        if key not in _KEYS:
            raise UnsupportedValue(
                f"`{name}` in {file}: unknown key `{key}`",
                did_you_mean(key, _KEYS, f"use {', '.join(_KEYS)}"),
            )
    path = entry.get("path") or entry.get("file_name") or entry.get("hf_hub_url")
    if not path:
        raise UnsupportedValue(
            f"`{name}` in {file}: `path` is missing", "write path: FILE or a hub id"
        )
    if entry.get("dataset_dir") and entry.get("file_name"):
        path = str(Path(str(entry["dataset_dir"])) / str(path))
    converter = entry.get("converter")
    if converter not in _FORMATS:
        raise UnsupportedValue(
            f"`{name}` in {file}: unsupported `converter: {converter}`",
            "use alpaca, sharegpt or pair, or remove it",
        )
    count = entry.get("size") or entry.get("num_samples")
    source: dict[str, YamlValue] = {
        "path": f"{path}#{count}" if count else str(path),
        "format": _FORMATS[converter],
    }
    return source | ({"split": entry["split"]} if entry.get("split") else {})


def _betas(value: Any) -> Conversion:
    if not isinstance(value, list) or len(value) != 2:
        raise UnsupportedValue("`betas` are two numbers", "write betas: [0.9, 0.999]")
    return Conversion({"train_args.adam_beta1": value[0], "train_args.adam_beta2": value[1]})


def _always(number: float) -> Convert:
    """Return a converter for a setting that has this value in Paceline."""

    def convert(value: Any) -> Conversion:
        if value != number:
            raise UnsupportedValue(f"{value} is not supported", f"use {number}")
        return Conversion()

    return convert


#: Settings of adapters that have no effect.
_WITHOUT_EFFECT = (
    "cast_trainable_params_to_fp32", "export_dir", "export_size", "export_hub_model_id",
    "infer_dtype", "export_legacy_format",
)  # fmt: skip
#: Settings of each mapping → their converters.
_PEFT: dict[str, Convert] = {
    "name": by_case("tuner"),
    "r": to("lora.rank"),
    "lora_rank": to("lora.rank"),
    "lora_alpha": to("lora.alpha"),
    "lora_dropout": to("lora.dropout"),
    "use_rslora": flag("lora.use_rslora"),
    "use_dora": flag("lora.use_dora"),
    "init_lora_weights": by_case("init_weights"),
    "target_modules": targets,
    "modules_to_save": listed("lora.modules_to_save"),
    "adapter_name_or_path": adapter_path,
    "freeze_trainable_layers": by_case("trained_layers"),
    "freeze_trainable_modules": by_case("freeze_modules"),
    "freeze_extra_modules": module_names,
    **{name: lambda value: Conversion() for name in _WITHOUT_EFFECT},
}
_QUANTIZATION: dict[str, Convert] = {
    "name": by_case("quantization_method"),
    "quantization_bit": by_case("bits"),
    "quantization_type": by_case("four_bit_type"),
    "double_quantization": flag("lora.double_quant"),
    "compute_dtype": lambda value: Conversion(),
}
_OPTIMIZER: dict[str, Convert] = {
    "name": by_case("optim"),
    "lr": to("train_args.learning_rate"),
    "learning_rate": to("train_args.learning_rate"),
    "wd": to("train_args.weight_decay"),
    "weight_decay": to("train_args.weight_decay"),
    "betas": _betas,
    "adamw_betas": _betas,
    "eps": to("train_args.adam_epsilon"),
    "adamw_eps": to("train_args.adam_epsilon"),
    "nesterov": _always(True),
    "ns_steps": _always(5),
}
_SCHEDULE: dict[str, Convert] = {
    "name": by_case("scheduler"),
    "warmup_steps": to("train_args.warmup_steps"),
    "num_warmup_steps": to("train_args.warmup_steps"),
    "warmup_ratio": to("train_args.warmup_ratio"),
    "min_lr": to("train_args.lr_scheduler_kwargs.min_lr"),
    "min_lr_rate": to("train_args.lr_scheduler_kwargs.min_lr_rate"),
}


def peft_config(value: Any) -> Conversion:
    """Convert `peft_config: {name: lora, r: 16, ...}`."""
    return _plugin(value, "peft_config: {name: lora, r: 16}", {"name": "lora"}, _PEFT)


def quant_config(value: Any) -> Conversion:
    """Convert `quant_config: {name: bnb, quantization_bit: 4}`."""
    example = "quant_config: {name: bnb, quantization_bit: 4}"
    defaults: dict[str, YamlValue] = {}
    if isinstance(value, Mapping) and str(value.get("name")).lower() == "bnb":
        defaults = {"quantization_bit": 4}
    return _plugin(value, example, defaults, _QUANTIZATION)


def optim_config(value: Any) -> Conversion:
    """Convert `optim_config: {name: muon, wd: 0.1, ...}`."""
    kind = str(value.get("name")).lower() if isinstance(value, Mapping) else ""
    momentum = to("train_args.muon_momentum" if kind == "muon" else "train_args.momentum")
    example = "optim_config: {name: adamw, weight_decay: 0.1}"
    return _plugin(value, example, {}, {**_OPTIMIZER, "momentum": momentum})


def lr_scheduler_config(value: Any) -> Conversion:
    """Convert `lr_scheduler_config: {name: cosine, warmup_ratio: 0.1}`."""
    return _plugin(value, "lr_scheduler_config: {name: cosine}", {}, _SCHEDULE)


def _plugin(
    value: Any, example: str, defaults: dict[str, YamlValue], converters: dict[str, Convert]
) -> Conversion:
    """Convert a mapping with the name of a plugin and its settings, or the name alone.

    Args:
        example: shown in the error for another value.
        defaults: settings that the mapping may leave out.
        converters: a converter for each setting; others have no effect, which is reported.
    """
    if is_off(value):
        return Conversion()
    if isinstance(value, str):
        value = {"name": value}
    if not isinstance(value, Mapping):
        raise UnsupportedValue("expected a mapping", f"write {example}")
    settings = defaults | {key: item for key, item in value.items() if item is not None}
    sets: dict[str, YamlValue] = {}
    weak: dict[str, YamlValue] = {}
    notices: list[Notice] = []
    for key, convert in converters.items():
        if key not in settings:
            continue
        try:
            result = convert(settings[key])
        except UnsupportedValue as error:
            raise UnsupportedValue(f"`{key}`: {error.why}", error.fix) from None
        sets |= result.sets
        weak |= result.weak
        notices += result.notices
    ignored = [key for key, item in settings.items() if key not in converters and not is_off(item)]
    if ignored:
        notices.append(("warning", f"no effect: {quoted_names(ignored)}"))
    return Conversion(sets, weak, tuple(notices))


def save_epochs(value: Any) -> Conversion:
    """Convert the number of epochs between two checkpoints to checkpoints per epoch."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return per_epoch("_saves_per_epoch")(1 / value if is_number and value > 0 else value)
