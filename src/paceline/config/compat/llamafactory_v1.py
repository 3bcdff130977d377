"""Settings of LLaMA-Factory v1: data sets listed in a YAML file, and `peft_config`."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline.config.compat.conversion import Conversion, UnsupportedValue, by_case, is_off
from paceline.config.compat.datasets import eval_sources, train_sources
from paceline.config.compat.values import targets
from paceline.config.yaml_read import parse_yaml
from paceline.core.errors import ConfigError, did_you_mean

_FORMATS = {"alpaca": "alpaca", "sharegpt": "sharegpt", None: "auto"}
_KEYS = (
    "path", "file_name", "hf_hub_url", "dataset_dir", "source", "converter", "size", "num_samples",
    "weight", "split", "streaming",
)  # fmt: skip


def train_dataset(value: Any) -> Conversion:
    """`train_dataset`: a YAML file that lists data sets, a file of samples, or a hub id."""
    return _dataset(value, "dataset", train_sources)


def eval_dataset(value: Any) -> Conversion:
    """`eval_dataset`, which LLaMA-Factory v1 takes as a YAML file too."""
    return _dataset(value, "val_dataset", eval_sources)


def _dataset(value: Any, key: str, otherwise: Callable[[Any], Conversion]) -> Conversion:
    if not isinstance(value, str) or not value.endswith((".yaml", ".yml")):
        return otherwise(value)
    path = Path(value).expanduser()
    if not path.is_file():
        raise UnsupportedValue(
            f"there is no file {value}, which is to list the data sets",
            f"correct the path, or write {key}: [{{path: ...}}]",
        )
    try:
        tree = parse_yaml(path.read_text(encoding="utf-8"), value).value
    except (ConfigError, OSError, UnicodeDecodeError) as error:
        raise UnsupportedValue(
            f"{value} cannot be read: {error}", f"correct it, or write {key}: [{{path: ...}}]"
        ) from None
    if (
        not isinstance(tree, Mapping)
        or not tree
        or not all(isinstance(one, Mapping) for one in tree.values())
    ):
        raise UnsupportedValue(
            f"{value} does not list data sets by name",
            "write NAME: {path: FILE, converter: alpaca}",
        )
    sources = [_source(name, one, value) for name, one in tree.items()]
    return Conversion({key: sources}, says=tuple(dict.fromkeys(_weights(tree))))


def _source(name: str, entry: Mapping[str, Any], file: str) -> dict[str, Any]:
    for key in entry:
        if key not in _KEYS:
            raise UnsupportedValue(
                f"`{name}` in {file} has `{key}`",
                did_you_mean(key, _KEYS, f"use {', '.join(_KEYS)}"),
            )
    path = entry.get("path") or entry.get("file_name") or entry.get("hf_hub_url")
    if not path:
        raise UnsupportedValue(f"`{name}` in {file} names no data", "write path: FILE or a hub id")
    if entry.get("dataset_dir") and entry.get("file_name"):
        path = str(Path(str(entry["dataset_dir"])) / str(path))
    converter = entry.get("converter")
    if converter == "pair":
        raise UnsupportedValue(
            f"`{name}` in {file} is preference data (`converter: pair`)", "use supervised data"
        )
    if converter not in _FORMATS:
        raise UnsupportedValue(
            f"`{name}` in {file} has `converter: {converter}`",
            "use alpaca or sharegpt, or leave it out",
        )
    count = entry.get("size") or entry.get("num_samples")
    source: dict[str, Any] = {
        "path": f"{path}#{count}" if count else str(path),
        "format": _FORMATS[converter],
    }
    return source | ({"split": entry["split"]} if entry.get("split") else {})


def _weights(tree: Mapping[str, Any]) -> list[tuple[str, str]]:
    weighted = [name for name, entry in tree.items() if entry.get("weight") not in (None, 1, 1.0)]
    return (
        [("warning", f"`weight` of {', '.join(weighted)}: every sample is seen once per epoch")]
        if weighted
        else []
    )


def peft_config(value: Any) -> Conversion:
    """`peft_config: {name: lora, r: 16, ...}`."""
    if is_off(value):
        return Conversion()
    if not isinstance(value, Mapping):
        raise UnsupportedValue("expected a mapping", "write peft_config: {name: lora, r: 16}")
    rest = {key: one for key, one in value.items() if one is not None}
    outs = [by_case("tuner")(rest.pop("name", "lora"))]
    for key, name in (
        ("r", "rank"),
        ("lora_rank", "rank"),
        ("lora_alpha", "alpha"),
        ("lora_dropout", "dropout"),
    ):
        if key in rest:
            outs.append(Conversion({f"lora.{name}": rest.pop(key)}))
    if "target_modules" in rest:
        outs.append(targets(rest.pop("target_modules")))
    if "adapter_name_or_path" in rest:
        outs.append(Conversion({"lora.adapter": rest.pop("adapter_name_or_path")}))
    left = [key for key, one in rest.items() if not is_off(one)]
    says = [line for out in outs for line in out.says]
    says += [("warning", f"without effect in it: {', '.join(left)}")] if left else []
    sets = {key: one for out in outs for key, one in out.sets.items()}
    return Conversion(
        sets, weak={key: one for out in outs for key, one in out.weak.items()}, says=tuple(says)
    )
