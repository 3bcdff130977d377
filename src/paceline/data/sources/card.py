"""The configurations that the dataset card (``README.md``) of a folder declares, as on the Hugging
Face hub."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from paceline.core.errors import ConfigError, did_you_mean, first_line
from paceline.core.log import Notice
from paceline.core.texts import UserText

#: The name of the card.
CARD = "README.md"
_FENCE = "---"
#: Keys of a configuration that do not change how its files are read.
_WITHOUT_EFFECT = {"config_name", "data_files", "data_dir", "default", "features", "version"}
_WITHOUT_EFFECT |= {"description", "homepage", "license", "citation"}


@dataclass(frozen=True)
class CardConfig:
    """A configuration of a dataset.

    Args:
        patterns: patterns of the files of each split, relative to the folder; empty if the names
            of the files show the splits.
        data_dir: folder of the files, relative to the folder of the card.
        is_default: whether it is used without a name.
        unused: keys that Paceline does not read.
    """

    name: str
    patterns: Mapping[str, list[str]] = field(default_factory=dict)
    data_dir: str = "."
    is_default: bool = False
    unused: tuple[str, ...] = ()

    def patterns_of(self, split: str) -> list[str]:
        """Return the patterns of a split, relative to the folder of the card.

        Raises:
            ConfigError: a pattern is a URL, or leads out of the folder.
        """
        patterns = self.patterns[split]
        for pattern in patterns:
            if "://" in pattern or pattern.startswith("/") or ".." in pattern.split("/"):
                raise ConfigError(
                    "the configuration `{name}` of the dataset card names `{pattern}`, which is"
                    " not a file in its folder",
                    code="card-file-missing",
                    allowed="patterns relative to the folder",
                    fix="name the files in the config instead: `dataset: [FILE, ...]`",
                    name=self.name,
                    pattern=pattern,
                )
        return [PurePosixPath(self.data_dir, pattern).as_posix() for pattern in patterns]


def read_card(text: str | None, label: str) -> tuple[list[CardConfig], list[Notice]]:
    """Return the configurations that a dataset card declares, and messages about it.

    Args:
        text: the text of the card, or None without one.
        label: name of the folder of the card, for messages.
    """
    lines = [] if text is None else text.splitlines()
    if not lines or lines[0].removeprefix("\ufeff").strip() != _FENCE:
        return [], []
    end = next((n for n, line in enumerate(lines[1:], 1) if line.strip() == _FENCE), None)
    if end is None:
        return [], []
    import yaml

    try:
        values = yaml.safe_load("\n".join(lines[1:end]))
        entries = values.get("configs", []) if isinstance(values, dict) else []
        return [_read_config(entry) for entry in entries or []], []
    except (yaml.YAMLError, LookupError, ValueError, TypeError, AttributeError) as error:
        place = f"{label.rstrip('/')}/{CARD}"
        text = UserText(
            "{place}: `configs` cannot be read and is not used ({reason})",
            code="card-not-used",
            place=place,
            reason=first_line(error),
        )
        return [], [Notice("warning", text)]


def _read_config(entry: Any) -> CardConfig:
    if not isinstance(entry, dict) or not isinstance(entry.get("config_name"), str):
        raise ValueError("an entry has no `config_name`")
    data_dir = entry.get("data_dir") or "."
    if not isinstance(data_dir, str) or ".." in data_dir.split("/") or data_dir.startswith("/"):
        raise ValueError(f"`data_dir: {data_dir}` is not a folder below the card")
    return CardConfig(
        entry["config_name"],
        _read_patterns(entry.get("data_files")),
        PurePosixPath(data_dir).as_posix(),
        bool(entry.get("default", False)),
        tuple(sorted(str(key) for key in entry if key not in _WITHOUT_EFFECT)),
    )


def _read_patterns(value: Any) -> dict[str, list[str]]:
    """Return the patterns of each split. Patterns without a split are for training."""
    if value is None:
        return {}
    if isinstance(value, dict):
        value = [{"split": split, "path": paths} for split, paths in value.items()]
    entries = value if isinstance(value, list) else [value]
    patterns: dict[str, list[str]] = {}
    for entry in entries:
        has_split = isinstance(entry, dict)
        split, paths = (entry["split"], entry["path"]) if has_split else ("train", entry)
        paths = paths if isinstance(paths, list) else [paths]
        if not isinstance(split, str) or not all(isinstance(path, str) for path in paths):
            raise ValueError("`data_files` is neither patterns nor a list of {split, path}")
        patterns.setdefault(split, []).extend(paths)
    return patterns


def choose_config(configs: list[CardConfig], name: str | None, folder: str) -> CardConfig:
    """Return the configuration with this name, or the default one.

    Raises:
        ConfigError: there is none with this name, or none is the default.
    """
    names = [config.name for config in configs]
    if name is not None:
        if name not in names:
            raise unknown_name(folder, name, names)
        return configs[names.index(name)]
    defaults = [config for config in configs if config.is_default or config.name == "default"]
    if len(configs) == 1 or len(defaults) == 1:
        return (defaults or configs)[0]
    raise ConfigError(
        "the dataset `{folder}` has several configurations, and no single default",
        code="several-configurations",
        allowed=", ".join(names),
        fix="name one: `dataset: {path: {folder}, name: {names}}`",
        folder=folder,
        names=names[0],
    )


def unknown_name(folder: str, name: str, names: list[str]) -> ConfigError:
    """Return the error for a configuration that a dataset does not have."""
    return ConfigError(
        "the dataset `{folder}` has no configuration `{name}`",
        code="unknown-configuration",
        allowed=", ".join(names) or "none: leave `name` out",
        fix=did_you_mean(name, names, "correct `name` of the dataset"),
        folder=folder,
        name=name,
    )
