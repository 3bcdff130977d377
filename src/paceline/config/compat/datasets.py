"""The ways in which other tools name their data, turned into a list of sources."""

import re
from pathlib import Path
from typing import Any

from paceline.config.compat.conversion import Conversion, UnsupportedValue, as_names, by_case
from paceline.config.compat.values import chat_template, ratio, roles_to_train
from paceline.config.entries import quoted_names
from paceline.config.schema.data import DatasetSource
from paceline.config.yaml_read import YamlValue
from paceline.core.errors import did_you_mean

Source = str | dict[str, YamlValue]

_BUILDERS = {
    "json": "json",
    "jsonl": "json",
    "csv": "csv",
    "parquet": "parquet",
    "text": "text",
    "arrow": "arrow",
}
_COLUMNS = {  # their key → the column it names
    "field": "text", "text_column": "text", "field_messages": "messages",
    "message_field_role": "role", "message_field_content": "content",
    "field_instruction": "instruction", "field_input": "input", "field_output": "output",
    "field_system": "system", "field_human": "prompt", "field_model": "completion",
    "field_tools": "tools", "message_field_training": "weight",
    "message_field_training_detail": "train_detail", "field_thinking": "reasoning_content",
    "field_chosen": "chosen", "field_rejected": "rejected",
}  # fmt: skip
_DROPPED_WORDS = (
    "conversation revision trust_remote_code shards shards_idx preprocess_shards ds_type"
    " input_format drop_system_message data_dir split_thinking template_thinking_key"
    " input_transform skip logprobs_field temperature weight format_string system_prompt"
    " system_format no_input_format seed"
)
_DROPPED = set(_DROPPED_WORDS.split())
_TEMPLATE = ("chat_template_jinja", "chat_template")
_MATTER = {
    "conversation",
    "weight",
    "revision",
    "shards",
    "skip",
    "drop_system_message",
    "split_thinking",
    "input_transform",
}
#: Settings of the loss: taken where they say what Paceline does, and refused otherwise.
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
    *_COLUMNS, *_DROPPED, *_LOSS, *_TEMPLATE, "type", "data_files", "id", "config",
    "message_property_mappings", "sampling_ratio",
}  # fmt: skip


def train_sources(value: Any) -> Conversion:
    """Any tool's way to name the training data."""
    return _all(value, "dataset")


def eval_sources(value: Any) -> Conversion:
    """The same, for validation data; an empty list is none."""
    return Conversion() if value in ([], "") else _all(value, "val_dataset")


def pretraining_sources(value: Any) -> Conversion:
    out = _all(value, "dataset")
    sources = out.sets["dataset"]
    listed = with_fields(sources if isinstance(sources, list) else [sources], {})
    texts = [{**source, "format": "text"} for source in listed]
    return Conversion({"dataset": texts, "task": "pretrain"}, notices=out.notices)


def mixture(value: Any) -> Conversion:
    """TRL's `dataset_mixture`: `{datasets: [...], test_split_size: ...}`."""
    if not isinstance(value, dict) or "datasets" not in value:
        raise UnsupportedValue(
            "`dataset_mixture` has no `datasets`", "give dataset: [{path: ..., split: ...}]"
        )
    out = _all(value["datasets"], "dataset")
    sets = dict(out.sets)
    if value.get("test_split_size") is not None:
        sets.update(ratio(value["test_split_size"]).sets)
    rest = [key for key in value if key not in ("datasets", "test_split_size", "streaming")]
    says = out.notices
    if rest:
        text = "in it: the one `seed` and the order of the sources are used"
        says = (*says, ("info", f"{quoted_names(rest)} {text}"))
    return Conversion(sets, notices=says)


def mixture_by_share(value: Any) -> Conversion:
    """`{id: share}`: every row of each, for shares of a source cannot be taken."""
    if not isinstance(value, dict):
        return train_sources(value)
    shares = [f"{name} ({share})" for name, share in value.items() if share != 1]
    says = (
        (("warning", f"all rows are taken of {', '.join(shares)}; for fewer write `path#N`"),)
        if shares
        else ()
    )
    return Conversion({"dataset": list(value)}, notices=says)


def _all(value: Any, key: str) -> Conversion:
    items = (
        as_names(value)
        if isinstance(value, str) and "," in value and not Path(value).exists()
        else value
    )
    items = items if isinstance(items, list) else [items]
    sources: list[Source] = []
    says: list[tuple[str, str]] = []
    for item in items:
        if isinstance(item, dict):
            sources.extend(_mapping(item, says))
        elif isinstance(item, str):
            sources.append(_text(item))
        else:
            raise UnsupportedValue(
                f"`{item}` is not a source of samples",
                "give a path, a hub id, or a mapping with `path`",
            )
    whole: Any = sources[0] if len(sources) == 1 and not isinstance(value, list) else sources
    template = _one_template(items)
    return Conversion(
        {key: whole, **template.sets}, notices=(*dict.fromkeys(says), *template.notices)
    )


def _one_template(items: list[Any]) -> Conversion:
    """The chat template that sources name (axolotl); a run has one for all of them."""
    named = [
        item.get(key)
        for item in items
        if isinstance(item, dict)
        for key in _TEMPLATE
        if item.get(key)
    ]
    named = list(dict.fromkeys(str(one) for one in named if one != "jinja"))
    if len(named) > 1:
        raise UnsupportedValue(
            "the sources name different chat templates, and a run has one",
            "keep one of them, as `chat_template` of the config, or train on one source after the"
            " other",
        )
    return chat_template(named[0]) if named else Conversion()


def _text(item: str) -> Source:
    """ms-swift writes `id:subset#N`, and `HF::id` for the hub."""
    item = re.sub(r"^HF::", "", item.strip())
    match = re.fullmatch(r"([\w.-]+/[\w.-]+):([\w.-]+)(#\d+)?", item)
    if match is None:
        return item
    return {"path": match[1] + (match[3] or ""), "name": match[2]}


def _mapping(item: dict[str, Any], says: list[tuple[str, str]]) -> list[Source]:
    """One mapping, native or foreign, as one source (several where it lists files)."""
    native = set(DatasetSource.model_fields)
    for key in item:
        if key not in native and key not in _FOREIGN:
            fix = did_you_mean(key, native | _FOREIGN, "remove it")
            raise UnsupportedValue(
                f"a source has no key `{key}`; it has {quoted_names(sorted(native))}", fix
            )
    out = {key: value for key, value in item.items() if key in native and value is not None}
    if isinstance(out.get("columns"), list):
        out.pop("columns")
        says.append(
            ("info", "`columns` as a list: all columns are read and those of the format are used")
        )
    for theirs, ours in (("id", "path"), ("config", "name")):
        if item.get(theirs) is not None:
            out.setdefault(ours, item[theirs])
    for key, convert in _LOSS.items():
        if key in item:
            convert(item[key])
    columns = _columns(item)
    if item.get("type") is not None:
        _set_type(item["type"], out, columns, says)
    if columns.get("role") == "from" and columns.get("content") == "value":
        out["format"] = "sharegpt"
        turns = columns.get("messages", "conversations")
        columns = {
            key: name for key, name in columns.items() if key not in ("role", "content", "messages")
        }
        columns |= {"conversations": turns} if turns != "conversations" else {}
    if columns:
        out["columns"] = {**columns, **out.get("columns", {})}
    dropped = [
        key
        for key in item
        if key in _DROPPED and item[key] is not None and (key, item[key]) != ("weight", 1)
    ]
    if dropped:
        level = "warning" if _MATTER & set(dropped) else "info"
        says.append((level, f"{quoted_names(dropped)} of a source: without effect here"))
    return _files(item, out)


def _columns(item: dict[str, Any]) -> dict[str, str]:
    columns = {
        ours: str(item[theirs]) for theirs, ours in _COLUMNS.items() if item.get(theirs) is not None
    }
    for ours, theirs in (item.get("message_property_mappings") or {}).items():
        if ours in _PROPERTIES:
            columns[ours] = str(theirs)
    return {ours: theirs for ours, theirs in columns.items() if ours != theirs}


def _set_type(
    kind: Any, out: dict[str, YamlValue], columns: dict[str, str], says: list[tuple[str, str]]
) -> None:
    if isinstance(kind, dict):  # axolotl: the user's own prompt, by fields
        columns.update(_columns(kind))
        rest = [key for key in kind if key not in _COLUMNS]
        if rest:
            text = "of `type`: prompts are written with the tokenizer's chat template"
            says.append(("warning", f"{quoted_names(rest)} {text}"))
        out.setdefault("format", "alpaca")
        return
    name = re.split(r"[.:]", str(kind).lower())[0]
    formats = {
        "alpaca": "alpaca",
        "sharegpt": "sharegpt",
        "chat_template": "messages",
        "completion": "text",
        "pretrain": "text",
    }
    if name in formats:
        out.setdefault("format", formats[name])
    else:
        says.append(
            ("warning", f"`type: {kind}` of a source: the format is found from the columns instead")
        )


def _files(item: dict[str, YamlValue], out: dict[str, YamlValue]) -> list[Source]:
    """`data_files` of a loader such as `path: json` are the sources themselves."""
    files = item.get("data_files")
    if files is None:
        return [out]
    paths = [str(one) for one in (files if isinstance(files, list) else [files])]
    if str(out.get("path")) in _BUILDERS:
        return [{**out, "path": one} for one in paths]
    return [{**out, "path": f"{str(out.get('path', '.')).rstrip('/')}/{one}"} for one in paths]


def limit(sources: list[Any], number: int) -> list[Any]:
    """`path#N` on every source that has no number of its own."""
    out = []
    for one in sources:
        path = one if isinstance(one, str) else str(one.get("path", ""))
        new = path if "#" in path else f"{path}#{number}"
        out.append(new if isinstance(one, str) else {**one, "path": new})
    return out


def with_fields(sources: list[Any], fields: dict[str, YamlValue]) -> list[Any]:
    """Add fields (split, name, columns, format) to every source that does not say its own."""
    return [{**fields, **({"path": one} if isinstance(one, str) else one)} for one in sources]
