"""The paths and names in a config: which of them do not exist, and the same config for another
folder. Nothing is read, only looked up."""

import re
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from pathlib import Path

from pydantic import JsonValue

from paceline.config.schema import Config
from paceline.config.schema.data import DatasetSource
from paceline.config.yaml_edit import edit_yaml
from paceline.config.yaml_read import YamlValue
from paceline.core.errors import ConfigError, unknown_name
from paceline.core.hub import is_path
from paceline.web.files import JSONObject
from paceline.web.presets import BUILT_IN_DATASETS, BUILT_IN_MODELS

#: Keys with data, and what to do if it does not exist.
_DATA = {
    "dataset": "choose a dataset or upload one, or check the path",
    "val_dataset": "choose or upload the data, or check the path",
}
#: Keys with the name of a model.
_MODELS = ("model", "tokenizer", "lora.adapter")
#: Keys with a file or a folder.
_FILES = ("chat_template", "parallel.deepspeed_config", "vision.images_folder")
#: Keys with a class in a Python file, as `./file.py:NAME`.
_CODE = ("task", "parallel.mode", "callbacks")

#: Keys whose values can be built in: what they name, and the known names.
_BUILT_IN = {
    **dict.fromkeys(("model", "tokenizer"), ("built-in model", BUILT_IN_MODELS)),
    **dict.fromkeys(_DATA, ("built-in dataset", BUILT_IN_DATASETS)),
}

_PATTERN = re.compile(r"[*?\[{]")
#: `#N` and `#P%` after a path.
_PART = re.compile(r"#[\d.]+%?$")
#: Returns a name with its path replaced.
Rename = Callable[[str], str]


def missing_paths(config: Config, folder: Path, lines: Mapping[str, JsonValue]) -> list[JSONObject]:
    """Return a mistake for each path of a config that does not exist.

    Args:
        config: a valid config.
        folder: the folder at which relative paths start.
        lines: the keys of the text, each with ``{line}``.
    """
    mistakes: list[JSONObject] = []
    for key, name in _names(config):
        path = _path_of(key, name)
        if path is None or _exists(folder, path):
            continue
        mistakes.append(
            {
                "what": f"`{key}: {name}` does not exist in {folder}",
                "allowed": None,
                "fix": _DATA.get(key, "check the path"),
                "key": key,
                "line": line_of(lines, key),
                "code": "path-does-not-exist",
                "path": path,
                "folder": str(folder),
            }
        )
    return mistakes


def unknown_built_ins(config: Config) -> Iterator[tuple[str, ConfigError]]:
    """Yield the key and an error for each ``builtin:`` name that does not exist."""
    for key, name in _names(config):
        kind, known = _BUILT_IN.get(key, ("", {}))
        name = _path_part(key, name)
        if known and name.startswith("builtin:") and name not in known:
            yield key, unknown_name(kind, name, known)


def line_of(lines: Mapping[str, JsonValue], key: str) -> JsonValue:
    """Return the line of a key; None if the text does not contain it."""
    entry = lines.get(key)
    return entry.get("line") if isinstance(entry, dict) else None


def with_absolute_paths(text: str, config: Config, folder: Path) -> str:
    """Return the text of a config with each relative path that exists below ``folder`` made
    absolute.

    Args:
        text: the text of the config.
        config: what the text says.
        folder: the folder at which its relative paths start.
    """

    def rename(key: str) -> Rename:
        def renamed(name: str) -> str:
            path = _path_part(key, name)
            is_relative = not Path(path).expanduser().is_absolute()
            if not path or not is_relative or not _exists(folder, path):
                return name
            return f"{(folder / path).resolve()}{name[len(path) :]}"

        return renamed

    values: dict[str, YamlValue] = {}
    for key in (*_DATA, *_MODELS, *_FILES, *_CODE):
        value = attrgetter(key)(config)
        renamed = _renamed(value, rename(key))
        if renamed is not None and renamed != _plain(value):
            values[key] = renamed
    return edit_yaml(text, values)[0] if values else text


def _names(config: Config) -> Iterator[tuple[str, str]]:
    """Yield each key with a path, and its value; a list yields several."""
    for key in (*_DATA, *_MODELS, *_FILES, *_CODE):
        value = attrgetter(key)(config)
        for item in value if isinstance(value, list) else [value]:
            name = item.path if isinstance(item, DatasetSource) else item
            if isinstance(name, str):
                yield key, name


def _path_part(key: str, name: str) -> str:
    """Return the part of a value that is a path, if it is one."""
    if key in _CODE:
        file = name.rpartition(":")[0] if ".py:" in name else name
        return file if file.endswith(".py") else ""
    return _PART.sub("", name) if key in _DATA else name


def _path_of(key: str, name: str) -> str | None:
    """Return the path that a value must refer to; None if it can be something else."""
    path = _path_part(key, name)
    if not path or _PATTERN.search(path) or "://" in path or "\n" in path:
        return None
    if key == "chat_template":  # a name or the text of a template is common
        return path if path.endswith(".jinja") and is_path(path) else None
    return path if key in (*_FILES, *_CODE) or is_path(path) else None


def _exists(folder: Path, path: str) -> bool:
    try:
        return (folder / Path(path).expanduser()).exists()
    except (OSError, ValueError, RuntimeError):  # not a name that a file can have
        return False


def _renamed(value: object, rename: Rename) -> YamlValue:
    """Return the value with its paths replaced; None if it has none."""
    if isinstance(value, str):
        return rename(value)
    if isinstance(value, DatasetSource):
        return {**_source(value), "path": rename(value.path)}
    if isinstance(value, list):
        return [_renamed(item, rename) for item in value]
    return None


def _plain(value: object) -> YamlValue:
    return _renamed(value, lambda name: name)


def _source(source: DatasetSource) -> dict[str, YamlValue]:
    return source.model_dump(mode="json", exclude_unset=True)
