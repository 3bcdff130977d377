"""LLaMA-Factory's ``dataset_info.json``: each key of it is either read or an error."""

from pathlib import Path
from typing import Any

from paceline.config.chat_names import CALL, ROLES
from paceline.config.compat.conversion import UnsupportedValue, read_json_object
from paceline.config.entries import quoted_names
from paceline.config.schema.tasks import ANSWER_TASKS
from paceline.config.yaml_read import YamlValue

FILE = "dataset_info.json"
_SUFFIXES = ("", ".json", ".jsonl", ".csv", ".parquet", ".txt")
#: LLaMA-Factory's columns of the alpaca format → Paceline's.
_ALPACA = {
    "prompt": "instruction",
    "query": "input",
    "response": "output",
    "history": "history",
    "system": "system",
    "tools": "tools",
    "images": "images",
}
_MEDIA = ("videos", "audios")
_ROLES = {
    "user_tag": "user", "assistant_tag": "assistant", "observation_tag": "tool",
    "function_tag": CALL, "system_tag": "system",
}  # fmt: skip
_KNOWN = {
    "hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "file_name", "cloud_file_name",
    "formatting", "ranking", "subset", "split", "folder", "num_samples", "revision", "columns",
    "tags",
}  # fmt: skip


def in_folder(sources: list[Any], folder: str, task: str, notes: list[str]) -> list[Any]:
    """Convert LLaMA-Factory's dataset names to sources, by the folder's ``dataset_info.json`` or by
    file name.

    Args:
        sources: the names in `dataset`; mappings are returned unchanged.
        folder: `dataset_dir`; `ONLINE` means the hub.
        task: task of the config; with `pretrain` the prompt column is read as plain text.
        notes: warnings for the user are appended here.
    """
    if folder == "ONLINE":
        return sources
    if folder.startswith("REMOTE:"):
        raise UnsupportedValue(
            f"`{folder}`: folders on the hub are not supported",
            f"download it, and set its path instead of `{folder}`",
        )
    root = Path(folder)
    table: dict[str, YamlValue] = {}
    if (root / FILE).is_file():
        table = read_json_object(root / FILE, "fix it, or set the files themselves")
    return [
        _source(source, root, table, task, notes) if isinstance(source, str) else source
        for source in sources
    ]


def _source(name: str, root: Path, table: dict[str, YamlValue], task: str, notes: list[str]) -> Any:
    plain, mark, count = name.partition("#")
    entry = table.get(plain)
    if isinstance(entry, dict):
        return _from_entry(_Entry(plain, entry, root / FILE), root, mark + count, task, notes)
    for suffix in _SUFFIXES:
        if (root / (plain + suffix)).exists() and not Path(plain).is_absolute():
            return str(root / (plain + suffix)) + mark + count
    return name


class _Entry:
    """An entry of ``dataset_info.json``."""

    def __init__(self, name: str, values: dict[str, YamlValue], file: Path) -> None:
        self.name, self.values, self.file = name, values, file
        self.columns = self._mapping("columns")
        self.tags = self._mapping("tags")

    def _mapping(self, key: str) -> dict[str, str]:
        value = self.values.get(key) or {}
        if not isinstance(value, dict):
            raise self.unsupported(f"`{key}`: expected a mapping", "write it as {...}")
        return {str(name): str(column) for name, column in value.items() if column is not None}

    def renamed(self, *names: str) -> dict[str, str]:
        """Return the columns that do not have their default name."""
        return {name: self.columns[name] for name in names if self.columns.get(name, name) != name}

    def unsupported(self, why: str, fix: str) -> UnsupportedValue:
        """Return an error that names the entry and its file."""
        return UnsupportedValue(f"`{self.name}` in {self.file}: {why}", fix)


def _from_entry(
    entry: _Entry, root: Path, mark: str, task: str, notes: list[str]
) -> dict[str, YamlValue]:
    _check(entry, task)
    unknown = sorted(set(entry.values) - _KNOWN)
    if unknown:
        notes.append(f"`{entry.name}`: unknown keys in {FILE}: {quoted_names(unknown)}")
    number = entry.values.get("num_samples")
    if number is not None and not mark:
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise entry.unsupported(
                f"`num_samples: {number}` is not a number of samples",
                "write a number of at least 1",
            )
        mark = f"#{number}"
    source: dict[str, YamlValue] = {"path": _path(entry, root) + mark}
    form, columns = _shape(entry, pretrain=task == "pretrain")
    source["format"] = form
    if task in ANSWER_TASKS:
        columns |= entry.renamed("chosen", "rejected", "kto_tag")
    if columns:
        source["columns"] = columns
    roles = {
        role: entry.tags[tag]
        for tag, role in _ROLES.items()
        if tag in entry.tags and ROLES.get(entry.tags[tag].lower()) != role
    }
    if roles and form != "alpaca":
        source["roles"] = roles
    for theirs, ours in (("subset", "name"), ("split", "split")):
        if entry.values.get(theirs):
            source[ours] = str(entry.values.get(theirs))
    return source


def _check(entry: _Entry, task: str) -> None:
    """Raise an error for data of another training method, media, and unsupported settings."""
    preference = f"marks pairs of answers, which `task: {task}` does not train on"
    other_data = "choose another dataset, or set `task: dpo`, `orpo`, `simpo` or `reward`"
    has_pairs = task in ANSWER_TASKS and task != "kto"
    if entry.values.get("ranking") and not has_pairs:
        raise entry.unsupported(f"`ranking: true` {preference}", other_data)
    for column in entry.columns:
        if column in ("chosen", "rejected") and not has_pairs:
            raise entry.unsupported(f"the column `{column}` {preference}", other_data)
        if column == "kto_tag" and task != "kto":
            raise entry.unsupported(
                f"`kto_tag` marks single answers, which `task: {task}` does not train on",
                "choose another dataset, or set `task: kto`",
            )
        if column in _MEDIA:
            raise entry.unsupported(
                f"{column} are not supported with `task: sft`", "use a text-only dataset"
            )
    for key in ("folder", "revision"):
        value = entry.values.get(key)
        if value and (key, value) not in (("revision", "main"), ("revision", "master")):
            raise entry.unsupported(
                f"`{key}: {value}` of a hub dataset is not supported",
                "download it and set `file_name`",
            )


def _path(entry: _Entry, root: Path) -> str:
    """Return the hub id or file of an entry; as in LLaMA-Factory, the hub comes first."""
    names = ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name", "file_name")
    key = next((name for name in names if entry.values.get(name)), None)
    if key is None:
        raise entry.unsupported(
            "it has neither `file_name` nor `hf_hub_url` nor `ms_hub_url`", "add one of them"
        )
    value = str(entry.values[key])
    paths = {
        "hf_hub_url": value, "ms_hub_url": f"modelscope:{value}", "file_name": str(root / value)
    }  # fmt: skip
    if key not in paths:
        raise entry.unsupported(
            f"`{key}: {value}` is not supported; `hf_hub_url`, `ms_hub_url` and `file_name` are",
            "download it and set `file_name`",
        )
    return paths[key]


def _shape(entry: _Entry, pretrain: bool) -> tuple[str, dict[str, str]]:
    """Return the format, and the names of its columns that are not the default ones."""
    form = str(entry.values.get("formatting") or "alpaca").lower()
    if form == "alpaca":
        return _alpaca(entry, pretrain)
    if form not in ("sharegpt", "openai"):
        raise entry.unsupported(f"unknown `formatting: {form}`", "use alpaca, sharegpt or openai")
    role = entry.tags.get("role_tag", "role" if form == "openai" else "from")
    content = entry.tags.get("content_tag", "content" if form == "openai" else "value")
    messages = entry.columns.get("messages", "messages" if form == "openai" else "conversations")
    columns = entry.renamed("system", "tools", "images")
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
        # LLaMA-Factory reads only the listed columns of an entry that lists columns.
        columns["input"] = ""
    return "alpaca", {ours: theirs for ours, theirs in columns.items() if ours != theirs}
