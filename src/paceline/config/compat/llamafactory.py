"""LLaMA-Factory's own files and settings: ``dataset_info.json``, whose names stand for data, and of
version 1 the data sets that a YAML file lists, and `peft_config`. Every key is read, or refused."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline.config.chat_names import CALL, ROLES
from paceline.config.compat.conversion import (
    Conversion,
    UnsupportedValue,
    by_case,
    is_off,
    read_json_object,
)
from paceline.config.compat.datasets import eval_sources, train_sources
from paceline.config.compat.values import targets
from paceline.config.yaml_read import YamlValue, parse_yaml
from paceline.core.errors import ConfigError, did_you_mean

FILE = "dataset_info.json"
_SUFFIXES = ("", ".json", ".jsonl", ".csv", ".parquet", ".txt")
#: their column → ours, in the alpaca and in the sharegpt format
_ALPACA = {
    "prompt": "instruction",
    "query": "input",
    "response": "output",
    "history": "history",
    "system": "system",
    "tools": "tools",
}
_MEDIA = ("images", "videos", "audios")
_ROLES = {
    "user_tag": "user", "assistant_tag": "assistant", "observation_tag": "tool",
    "function_tag": CALL, "system_tag": "system",
}  # fmt: skip
_KNOWN = {
    "hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "file_name", "cloud_file_name",
    "formatting", "ranking", "subset", "split", "folder", "num_samples", "revision", "columns",
    "tags",
}  # fmt: skip


def in_folder(sources: list[Any], folder: str, pretrain: bool, notes: list[str]) -> list[Any]:
    """LLaMA-Factory's names of datasets as sources: by the folder's ``dataset_info.json``, or files
    of their own name.

    Args:
        sources: what `dataset` names; mappings are left as they are.
        folder: `dataset_dir`; `ONLINE` stands for the hub.
        pretrain: the prompt's column is plain text.
        notes: gets what the user should know.
    """
    if folder == "ONLINE":
        return sources
    if folder.startswith("REMOTE:"):
        raise UnsupportedValue(
            f"`{folder}` is a folder on the hub, which is not read",
            f"download it, and give its path instead of `{folder}`",
        )
    root = Path(folder)
    has_table = (root / FILE).is_file()
    table = (
        read_json_object(root / FILE, "repair it, or give the files themselves")
        if has_table
        else {}
    )
    return [
        _source(one, root, table, pretrain, notes) if isinstance(one, str) else one
        for one in sources
    ]


def _source(
    name: str, root: Path, table: dict[str, YamlValue], pretrain: bool, notes: list[str]
) -> Any:
    plain, mark, count = name.partition("#")
    entry = table.get(plain)
    if isinstance(entry, dict):
        return _from_entry(_Entry(plain, entry, root / FILE), root, mark + count, pretrain, notes)
    for suffix in _SUFFIXES:
        if (root / (plain + suffix)).exists() and not Path(plain).is_absolute():
            return str(root / (plain + suffix)) + mark + count
    return name


class _Entry:
    """One dataset of the file, with errors that name it."""

    def __init__(self, name: str, values: dict[str, YamlValue], file: Path) -> None:
        self.name, self.values, self.file = name, values, file
        self.columns = self._mapping("columns")
        self.tags = self._mapping("tags")

    def _mapping(self, key: str) -> dict[str, str]:
        value = self.values.get(key) or {}
        if not isinstance(value, dict):
            raise self.refused(f"`{key}` is not a mapping", "write it as {...}")
        return {str(name): str(column) for name, column in value.items() if column is not None}

    def refused(self, why: str, fix: str) -> UnsupportedValue:
        return UnsupportedValue(f"`{self.name}` in {self.file}: {why}", fix)


def _from_entry(
    entry: _Entry, root: Path, mark: str, pretrain: bool, notes: list[str]
) -> dict[str, YamlValue]:
    _check(entry)
    unknown = sorted(set(entry.values) - _KNOWN)
    if unknown:
        notes.append(
            f"`{entry.name}`: {', '.join(f'`{key}`' for key in unknown)} has no meaning in {FILE}"
        )
    number = entry.values.get("num_samples")
    if number is not None and not mark:
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise entry.refused(
                f"`num_samples: {number}` is not a number of samples",
                "write a number of at least 1",
            )
        mark = f"#{number}"
    source: dict[str, YamlValue] = {"path": _path(entry, root) + mark}
    form, columns = _shape(entry, pretrain)
    source["format"] = form
    if columns:
        source["columns"] = columns
    words = {role: entry.tags[tag] for tag, role in _ROLES.items() if tag in entry.tags}
    roles = {role: word for role, word in words.items() if ROLES.get(word.lower()) != role}
    if roles and form != "alpaca":
        source["roles"] = roles
    for theirs, ours in (("subset", "name"), ("split", "split")):
        if entry.values.get(theirs):
            source[ours] = str(entry.values.get(theirs))
    return source


def _check(entry: _Entry) -> None:
    """Refuse data of another training method, media, and choices that cannot be made."""
    supervised = "choose a dataset for supervised fine-tuning, or use the tool that has this method"
    preference = (
        "marks it as preference data, for DPO, ORPO, SimPO or reward modeling, which Paceline does"
        " not have"
    )
    if entry.values.get("ranking"):
        raise entry.refused(f"`ranking: true` {preference}", supervised)
    for column in entry.columns:
        if column in ("chosen", "rejected"):
            raise entry.refused(f"the column `{column}` {preference}", supervised)
        if column == "kto_tag":
            raise entry.refused(
                "`kto_tag` marks it as data for KTO, which Paceline does not have", supervised
            )
        if column in _MEDIA:
            raise entry.refused(
                f"it has {column}, and `task: sft` reads text alone", "use a dataset of text"
            )
    for key in ("folder", "revision"):
        value = entry.values.get(key)
        if value and (key, value) not in (("revision", "main"), ("revision", "master")):
            raise entry.refused(
                f"`{key}: {value}` of a hub dataset cannot be chosen",
                "download it and give `file_name`",
            )


def _path(entry: _Entry, root: Path) -> str:
    """As LLaMA-Factory chooses: the hub before a file."""
    if entry.values.get("hf_hub_url"):
        return str(entry.values.get("hf_hub_url"))
    if entry.values.get("ms_hub_url"):
        return f"modelscope:{entry.values.get('ms_hub_url')}"
    for key in ("om_hub_url", "script_url", "cloud_file_name"):
        if entry.values.get(key):
            raise entry.refused(
                f"`{key}: {entry.values.get(key)}` is not read; `hf_hub_url`, `ms_hub_url` and"
                " `file_name` are",
                "download it and give `file_name`",
            )
    if not entry.values.get("file_name"):
        raise entry.refused(
            "it has neither `file_name` nor `hf_hub_url` nor `ms_hub_url`", "add one of them"
        )
    return str(root / str(entry.values.get("file_name")))


def _shape(entry: _Entry, pretrain: bool) -> tuple[str, dict[str, str]]:
    """The format, and the names of its columns where they are not the usual ones."""
    form = str(entry.values.get("formatting") or "alpaca").lower()
    if form == "alpaca":
        return _alpaca(entry, pretrain)
    if form not in ("sharegpt", "openai"):
        raise entry.refused(
            f"`formatting: {form}` is not known", "write alpaca, sharegpt or openai"
        )
    role = entry.tags.get("role_tag", "role" if form == "openai" else "from")
    content = entry.tags.get("content_tag", "content" if form == "openai" else "value")
    messages = entry.columns.get("messages", "messages" if form == "openai" else "conversations")
    columns = {
        key: entry.columns[key] for key in ("system", "tools") if entry.columns.get(key, key) != key
    }
    if (role, content) == ("role", "content"):
        return "messages", columns | ({"messages": messages} if messages != "messages" else {})
    if messages != "conversations":
        columns["conversations"] = messages
    if (role, content) != ("from", "value"):
        columns |= {"from": role, "value": content}
    return "sharegpt", columns


def _alpaca(entry: _Entry, pretrain: bool) -> tuple[str, dict[str, str]]:
    if pretrain:
        text = entry.columns.get("prompt", "instruction")
        return "text", {"text": text} if text != "text" else {}
    columns = {
        ours: entry.columns[theirs] for theirs, ours in _ALPACA.items() if theirs in entry.columns
    }
    if columns and "input" not in columns:
        # LLaMA-Factory does not read a column that an entry with columns leaves out
        columns["input"] = ""
    return "alpaca", {ours: theirs for ours, theirs in columns.items() if ours != theirs}


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
    sources = [_yaml_source(name, entry, value) for name, entry in tree.items()]
    return Conversion({key: sources}, notices=tuple(dict.fromkeys(_weights(tree))))


def _yaml_source(name: str, entry: Mapping[str, YamlValue], file: str) -> dict[str, YamlValue]:
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
    source: dict[str, YamlValue] = {
        "path": f"{path}#{count}" if count else str(path),
        "format": _FORMATS[converter],
    }
    return source | ({"split": entry["split"]} if entry.get("split") else {})


def _weights(tree: Mapping[str, Mapping[str, YamlValue]]) -> list[tuple[str, str]]:
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
    says = [line for out in outs for line in out.notices]
    says += [("warning", f"without effect in it: {', '.join(left)}")] if left else []
    sets = {key: one for out in outs for key, one in out.sets.items()}
    return Conversion(
        sets, weak={key: one for out in outs for key, one in out.weak.items()}, notices=tuple(says)
    )
