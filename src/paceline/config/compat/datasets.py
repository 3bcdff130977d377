"""Convert other tools' ways to specify datasets to a list of sources."""

import re
from pathlib import Path
from typing import Any

from paceline.config.compat.conversion import Conversion, UnsupportedValue, as_names, by_case
from paceline.config.compat.values import chat_template, ratio, roles_to_train
from paceline.config.entries import Notice, quoted_names
from paceline.config.schema.data import DatasetSource
from paceline.config.yaml_read import YamlValue
from paceline.core.errors import did_you_mean

Source = str | dict[str, YamlValue]

_BUILDERS = ("json", "jsonl", "csv", "parquet", "text", "arrow")
#: Types of a source in axolotl → formats.
_TYPES = {
    "alpaca": "alpaca",
    "sharegpt": "sharegpt",
    "chat_template": "messages",
    "completion": "text",
    "pretrain": "text",
}
_COLUMNS = {  # key of the other tool → the column it names
    "field": "text", "text_column": "text", "field_messages": "messages",
    "message_field_role": "role", "message_field_content": "content",
    "field_instruction": "instruction", "field_input": "input", "field_output": "output",
    "field_system": "system", "field_human": "prompt", "field_model": "completion",
    "field_tools": "tools", "message_field_training": "weight",
    "message_field_training_detail": "train_detail", "field_thinking": "reasoning_content",
    "field_chosen": "chosen", "field_rejected": "rejected", "field_prompt": "prompt",
    "field_completion": "completion", "field_label": "label",
}  # fmt: skip
#: Fields of rows with preferences, whose format is detected.
_PREFERENCE_FIELDS = {
    "field_prompt", "field_chosen", "field_rejected", "field_completion", "field_label",
}  # fmt: skip
#: Ignored keys that change the training, and those that do not.
_IGNORED_WITH_WARNING = {
    "conversation", "revision", "shards", "skip", "drop_system_message",
    "split_thinking", "input_transform",
}  # fmt: skip
_IGNORED = _IGNORED_WITH_WARNING | {
    "trust_remote_code", "shards_idx", "preprocess_shards", "ds_type", "input_format", "data_dir",
    "template_thinking_key", "logprobs_field", "temperature", "format_string", "system_prompt",
    "system_format", "no_input_format", "seed",
}  # fmt: skip
_TEMPLATE = ("chat_template_jinja", "chat_template")
#: Settings of the loss: accepted if Paceline behaves the same, and an error otherwise.
_LOSS = {
    "roles_to_train": roles_to_train,
    "train_on_eos": by_case("train_on_eos"),
    "train_on_eot": by_case("train_on_eos"),
}
#: Keys of a message that `message_property_mappings` may rename.
_PROPERTIES = {
    "role",
    "content",
    "tool_calls",
    "tool_call_id",
    "name",
    "reasoning_content",
    "weight",
}
_FOREIGN = {
    *_COLUMNS, *_IGNORED, *_LOSS, *_TEMPLATE, "type", "data_files", "id", "config",
    "message_property_mappings", "sampling_ratio",
}  # fmt: skip


def train_sources(value: Any) -> Conversion:
    """Convert any tool's specification of the training data."""
    return _all(value, "dataset")


def train_sources_if_any(value: Any) -> Conversion:
    """Convert one of two keys with the training data, which may be empty."""
    return Conversion() if value in ([], "") else train_sources(value)


def eval_sources(value: Any) -> Conversion:
    """Convert any tool's specification of the validation data; an empty list means none."""
    return Conversion() if value in ([], "") else _all(value, "val_dataset")


def pretraining_sources(value: Any) -> Conversion:
    """Convert axolotl's `pretraining_dataset`: plain text and `task: pretrain`."""
    result = _all(value, "dataset")
    sources = result.sets["dataset"]
    listed = with_fields(sources if isinstance(sources, list) else [sources], {})
    texts = [{**source, "format": "text"} for source in listed]
    return Conversion({"dataset": texts, "task": "pretrain"}, notices=result.notices)


def mixture(value: Any) -> Conversion:
    """Convert TRL's `dataset_mixture`: `{datasets: [...], test_split_size: ...}`."""
    if not isinstance(value, dict) or "datasets" not in value:
        raise UnsupportedValue(
            "`dataset_mixture` has no `datasets`", "write dataset: [{path: ..., split: ...}]"
        )
    listed = [value["datasets"]] if isinstance(value["datasets"], dict) else value["datasets"]
    result = _all(with_shares(listed), "dataset")
    sets, notices = dict(result.sets), result.notices
    if value.get("test_split_size") is not None:
        sets.update(ratio(value["test_split_size"]).sets)
    rest = [key for key in value if key not in ("datasets", "test_split_size", "streaming")]
    if rest:
        text = f"{quoted_names(rest)} in it: the `seed` and the order of the config are used"
        notices = (*notices, ("info", text))
    return Conversion(sets, notices=notices)


def mixture_by_share(value: Any) -> Conversion:
    """Convert `{id: fraction}`."""
    if not isinstance(value, dict):
        return train_sources(value)
    listed = with_shares([{"path": name, "weight": share} for name, share in value.items()])
    return Conversion({"dataset": [source["path"] for source in listed]})


def weighted_sources(value: Any) -> Conversion:
    """Convert axolotl's `datasets`, where `weight` is the share of the rows that is used. Whether
    it is the weight in a mixture instead depends on `mixing`."""
    result = train_sources(value)
    items = value if isinstance(value, list) else [value]
    if any(isinstance(item, dict) and _is_number(item.get("weight")) for item in items):
        return Conversion({**result.sets, "_shares": True}, notices=result.notices)
    return result


def with_shares(sources: list[Any]) -> list[Any]:
    """Return the sources with `path#P%` instead of a `weight` that is a number."""
    return [
        _with_share(source)
        if isinstance(source, dict) and _is_number(source.get("weight"))
        else source
        for source in sources
    ]


def _with_share(source: dict[str, Any]) -> dict[str, Any]:
    share = source["weight"]
    key = "path" if "path" in source else "id"
    if not 0 < share <= 1:
        raise UnsupportedValue(
            f"`weight: {share}` of `{source.get(key)}` is not a share of its rows",
            "set a number above 0 and at most 1; for proportions of a mixture, also set"
            " `mixing: weights`",
        )
    rest = {name: field for name, field in source.items() if name != "weight"}
    return rest if share == 1 else {**rest, key: f"{source.get(key)}#{100 * share:g}%"}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _all(value: Any, key: str) -> Conversion:
    items = value if isinstance(value, list) else [value]
    if isinstance(value, str) and "," in value and not Path(value).exists():
        items = as_names(value)
    sources: list[Source] = []
    notices: list[Notice] = []
    for item in items:
        if isinstance(item, dict):
            sources.extend(_mapping(item, notices))
        elif isinstance(item, str):
            sources.append(_text(item))
        else:
            raise UnsupportedValue(
                f"`{item}` is not a data source", "write a path, a hub id, or a mapping with `path`"
            )
    data: Any = sources[0] if len(sources) == 1 and not isinstance(value, list) else sources
    template = _template(items)
    return Conversion(
        {key: data, **template.sets}, notices=(*dict.fromkeys(notices), *template.notices)
    )


def _template(items: list[Any]) -> Conversion:
    """Return the chat template that the sources set (axolotl); a run has one for all of them."""
    mappings = [item for item in items if isinstance(item, dict)]
    templates = [str(item[key]) for item in mappings for key in _TEMPLATE if item.get(key)]
    templates = list(dict.fromkeys(name for name in templates if name != "jinja"))
    if len(templates) > 1:
        raise UnsupportedValue(
            "the sources set different chat templates, but a run has only one",
            "keep one of them as `chat_template` of the config, or train on one source after the"
            " other",
        )
    return chat_template(templates[0]) if templates else Conversion()


def _text(item: str) -> Source:
    """Convert ms-swift's `id:subset#N` and `HF::id`."""
    item = re.sub(r"^HF::", "", item.strip())
    match = re.fullmatch(r"([\w.-]+/[\w.-]+):([\w.-]+)(#\d+)?", item)
    return item if match is None else {"path": match[1] + (match[3] or ""), "name": match[2]}


def _mapping(item: dict[str, Any], notices: list[Notice]) -> list[Source]:
    """Convert a mapping, native or of another tool, to a source (several if it lists files)."""
    native = set(DatasetSource.model_fields)
    for key in item:
        if key not in native and key not in _FOREIGN:
            raise UnsupportedValue(
                f"unknown key `{key}` of a source; known keys: {quoted_names(sorted(native))}",
                did_you_mean(key, native | _FOREIGN, "remove it"),
            )
    source = {key: value for key, value in item.items() if key in native and value is not None}
    if isinstance(source.get("columns"), list):
        source.pop("columns")
        text = "`columns` as a list: all columns are read and those of the format are used"
        notices.append(("info", text))
    for theirs, ours in (("id", "path"), ("config", "name")):
        if item.get(theirs) is not None:
            source.setdefault(ours, item[theirs])
    for key, convert in _LOSS.items():
        if key in item:
            convert(item[key])
    columns = _columns(item)
    if item.get("type") is not None:
        _set_type(item["type"], source, columns, notices)
    turns = {"sharegpt": "conversations", "messages": "messages"}.get(str(source.get("format")))
    if turns is not None and "text" in columns:  # `field` of older configs
        name = columns.pop("text")
        columns |= {turns: name} if name != turns else {}
    if columns.get("role") == "from" and columns.get("content") == "value":
        source["format"] = "sharegpt"
        turns = columns.pop("messages", "conversations")
        del columns["role"], columns["content"]
        columns |= {"conversations": turns} if turns != "conversations" else {}
    if columns:
        source["columns"] = {**columns, **source.get("columns", {})}
    ignored = [key for key in item if key in _IGNORED and item[key] is not None]
    if ignored:
        level = "warning" if _IGNORED_WITH_WARNING & set(ignored) else "info"
        notices.append((level, f"{quoted_names(ignored)} of a source: no effect"))
    return _files(item, source)


def _columns(item: dict[str, Any]) -> dict[str, str]:
    columns = {
        ours: str(item[theirs]) for theirs, ours in _COLUMNS.items() if item.get(theirs) is not None
    }
    renamed = item.get("message_property_mappings") or {}
    if not isinstance(renamed, dict):
        raise UnsupportedValue(
            "`message_property_mappings` of a source is not a mapping",
            "write message_property_mappings: {role: from, content: value}",
        )
    columns |= {ours: str(theirs) for ours, theirs in renamed.items() if ours in _PROPERTIES}
    return {ours: theirs for ours, theirs in columns.items() if ours != theirs}


def _set_type(
    kind: Any, source: dict[str, YamlValue], columns: dict[str, str], notices: list[Notice]
) -> None:
    """Apply the `type` of a source: the name of a format, or axolotl's custom prompt by fields."""
    if isinstance(kind, dict):
        columns.update(_columns(kind))
        rest = [key for key in kind if key not in _COLUMNS]
        if rest:
            text = "of `type`: prompts are formatted with the tokenizer's chat template"
            notices.append(("warning", f"{quoted_names(rest)} {text}"))
        if not _PREFERENCE_FIELDS & kind.keys():
            source.setdefault("format", "alpaca")
        return
    name = re.split(r"[.:]", str(kind).lower())[0]
    if name in _TYPES:
        source.setdefault("format", _TYPES[name])
    else:
        text = f"`type: {kind}` of a source: the format is detected from the columns instead"
        notices.append(("warning", text))


def _files(item: dict[str, YamlValue], source: dict[str, YamlValue]) -> list[Source]:
    """Return one source for each of the `data_files` of a loader such as `path: json`."""
    files = item.get("data_files")
    if files is None:
        return [source]
    folder = str(source.get("path", ".")).rstrip("/")
    prefix = "" if str(source.get("path")) in _BUILDERS else f"{folder}/"
    return [
        {**source, "path": f"{prefix}{file}"}
        for file in (files if isinstance(files, list) else [files])
    ]


def limit(sources: list[Any], number: int) -> list[Any]:
    """Append `#N` to the path of every source without a number of its own."""
    limited = []
    for source in sources:
        path = source if isinstance(source, str) else str(source.get("path", ""))
        if "#" not in path:
            path = f"{path}#{number}"
        limited.append(path if isinstance(source, str) else {**source, "path": path})
    return limited


def with_fields(
    sources: list[Any], fields: dict[str, YamlValue], replaces: bool = False
) -> list[dict[str, YamlValue]]:
    """Return the sources as mappings, with fields (split, name, columns, format) that they do not
    set themselves. ``replaces``: also with those that they set."""
    mappings = [{"path": source} if isinstance(source, str) else source for source in sources]
    return [{**source, **fields} if replaces else {**fields, **source} for source in mappings]
