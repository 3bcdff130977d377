"""Config entries: the keys of a file or a command line as they were written."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.config.fields import MAPPINGS, SECTIONS, SOURCE_KEYS
from paceline.config.yaml_read import KeyPath, YamlValue, kind_of
from paceline.core.texts import UserText

#: (``info`` or ``warning``, text)
Notice = tuple[str, str]
FILE, OVERRIDE = 0, 1
#: Beginnings of top-level keys that are not read.
EXTENSIONS = ("x-", "_", ".")
#: Sections of other tools (Unsloth Studio), whose keys are read one by one.
FOREIGN_SECTIONS = ("training", "data", "logging")


@dataclass(frozen=True, eq=False)
class ConfigEntry:
    """A key as it was written.

    Args:
        layer: FILE or OVERRIDE.
        token: the argument on the command line, if it was given there.
        source: the other file that the value comes from, such as a DeepSpeed JSON.
    """

    path: tuple[str, ...]
    value: Any
    layer: int
    line: int | None = None
    token: str = ""
    source: str = ""

    @property
    def key(self) -> str:
        return ".".join(self.path)

    @property
    def section(self) -> str:
        is_nested = len(self.path) > 1
        return self.path[0] if is_nested and self.path[0] in (*SECTIONS, *FOREIGN_SECTIONS) else ""

    @property
    def name(self) -> str:
        return self.path[1] if self.section else self.path[0]

    def shown(self) -> str:
        return f"`{self.token}`" if self.token else f"`{self.key}: {short(self.value)}`"

    def located(self) -> str:
        """Return the key with its value, and where it was written."""
        return f"{self.shown()} ({self.place()})"

    def place(self) -> str:
        if self.source:
            return self.source
        if self.layer == OVERRIDE:
            return "command line" if self.token else "override"
        return f"line {self.line}" if self.line else "the file"


@dataclass
class Problem:
    """An error in the config.

    Args:
        what: the text, whose code is the kind of the error.
        target: the native key it concerns, if setting that key could resolve it.
        suggestion: the key that is probably meant.
    """

    what: UserText
    entry: ConfigEntry | None = None
    allowed: str | None = None
    fix: str | None = None
    target: str | None = None
    suggestion: str | None = None

    @property
    def code(self) -> str:
        return self.what.code


@dataclass
class EntryCollector:
    """Flattens a tree of keys into entries."""

    layer: int
    lines: Mapping[KeyPath, int] = field(default_factory=dict)
    entries: list[ConfigEntry] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    extensions: list[str] = field(default_factory=list)

    def add_tree(self, tree: Mapping[str, YamlValue]) -> None:
        """Add an entry for each key of a nested mapping, except keys such as `x-common` that only
        hold anchors, as in Docker Compose."""
        for key, value in tree.items():
            if str(key).startswith(EXTENSIONS):
                self.extensions.append(str(key))
                continue
            self.add(split_key(str(key)), value, source=(key,))

    def add(self, path: tuple[str, ...], value: Any, source: KeyPath = (), token: str = "") -> None:
        if len(path) == 1 and path[0] in SECTIONS:
            self._section(path[0], value, source, token)
            return
        if len(path) == 1 and path[0] in FOREIGN_SECTIONS and isinstance(value, Mapping):
            self._add_keys(path[0], value, source, token)
            return
        plain = _plain(value)
        self.entries.append(ConfigEntry(path, plain, self.layer, self.lines.get(source), token))

    def _section(self, name: str, value: Any, source: KeyPath, token: str) -> None:
        if isinstance(value, Mapping):
            self._add_keys(name, value, source, token)
        elif value is not None:
            entry = ConfigEntry((name,), value, self.layer, self.lines.get(source), token)
            first = next(iter(SECTIONS[name].model_fields))
            self.problems.append(
                Problem(
                    UserText(
                        "{shown}: `{name}` is a section; expected a mapping, got {kind}",
                        code="not-a-section",
                        shown=entry.shown(),
                        name=name,
                        kind=kind_of(value),
                    ),
                    entry,
                    quoted_names(SECTIONS[name].model_fields),
                    f"write {name}: {{{first}: ...}}, or {name}.{first}=... on the command line",
                )
            )

    def _add_keys(
        self, name: str, section: Mapping[str, YamlValue], source: KeyPath, token: str
    ) -> None:
        for key, item in section.items():
            self.add((name, *str(key).split(".")), item, (*source, key), token)


def split_key(key: str) -> tuple[str, ...]:
    """Split ``lora.rank`` into (lora, rank). A key is not split unless its first part is a section
    or another key with nested keys."""
    first = key.split(".")[0]
    nested = (*SECTIONS, *FOREIGN_SECTIONS, *MAPPINGS, *SOURCE_KEYS)
    has_nested_keys = first in nested or f"train_args.{first}" in nested
    return tuple(key.split(".")) if has_nested_keys else (key,)


def _plain(value: Any) -> Any:
    """Convert Python values to those that a YAML file can hold."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple | set | list):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return value


def as_bool(value: Any) -> Any:
    """Convert true and false that are passed as text; return anything else unchanged, for the
    schema to reject."""
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    return value


_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


def as_number(value: Any) -> Any:
    """Convert a number that is passed as text; return anything else unchanged."""
    if not isinstance(value, str) or not _NUMBER.fullmatch(value.strip()):
        return value
    return int(value) if re.fullmatch(r"\s*[-+]?\d+\s*", value) else float(value)


def quoted_names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def short(value: Any, max_chars: int = 70) -> str:
    """Format a value as YAML on one line, cut to ``max_chars`` characters."""
    if isinstance(value, str):
        text = value if value and "\n" not in value else json.dumps(value, ensure_ascii=False)
    elif isinstance(value, bool) or value is None:
        text = json.dumps(value)
    elif isinstance(value, list):
        text = "[" + ", ".join(short(item, max_chars) for item in value) + "]"
    elif isinstance(value, dict):
        items = (f"{key}: {short(item, max_chars)}" for key, item in value.items())
        text = "{" + ", ".join(items) + "}"
    else:
        text = repr(value) if isinstance(value, float) else str(value)
    return text if len(text) <= max_chars else text[: max_chars - 1] + "…"
