"""From what a person wrote to what it sets: each key of a file or a command line becomes an entry,
each entry assignments."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from paceline.config.compat.keys import Alias, Ignored, alias_of, all_foreign, ignored_of
from paceline.config.compat.methods import method_setting, methods_of
from paceline.config.fields import FREE, KEYS, SECTIONS, SOURCE_KEYS
from paceline.config.yaml_read import KeyPath, kind_of
from paceline.core.errors import nearest

FILE, OVERRIDE = 0, 1


@dataclass(frozen=True, eq=False)
class ConfigEntry:
    """One key as a person wrote it. ``layer`` is FILE or OVERRIDE; ``token`` the words on the
    command line; ``source`` the other file that the value comes from, such as a DeepSpeed JSON."""

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
        return self.path[0] if len(self.path) > 1 and self.path[0] in SECTIONS else ""

    @property
    def name(self) -> str:
        return self.path[1] if self.section else self.path[0]

    def shown(self) -> str:
        return f"`{self.token}`" if self.token else f"`{self.key}: {short(self.value)}`"

    def place(self) -> str:
        if self.source:
            return self.source
        if self.layer == OVERRIDE:
            return "command line" if self.token else "override"
        return f"line {self.line}" if self.line else "the file"


@dataclass
class Problem:
    """Something wrong with the config. ``target``: the native key it concerns, if an override of
    that could settle it."""

    what: str
    entry: ConfigEntry | None = None
    allowed: str | None = None
    fix: str | None = None
    target: str | None = None


@dataclass
class KeyBinding:
    """What a key is: native (``target``), an alias, ignored, or none of them.

    ``methods``: the training methods that Paceline does not have and that the key asks for.
    """

    entry: ConfigEntry
    target: str | None = None
    alias: Alias | None = None
    ignored: Ignored | None = None
    moved: bool = False
    methods: tuple[str, ...] = ()

    @property
    def tools(self) -> str:
        return self.alias.tools if self.alias else self.ignored.tools if self.ignored else ""


@dataclass
class EntryCollector:
    """Flattens a tree of keys into entries."""

    layer: int
    lines: Mapping[KeyPath, int] = field(default_factory=dict)
    entries: list[ConfigEntry] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def tree(self, tree: Mapping[str, Any]) -> None:
        for key, value in tree.items():
            self.add(split_key(str(key)), value, source=(key,))

    def add(self, path: tuple[str, ...], value: Any, source: KeyPath = (), token: str = "") -> None:
        if len(path) == 1 and path[0] in SECTIONS:
            self._section(path[0], value, source, token)
            return
        plain = _plain(value)
        self.entries.append(ConfigEntry(path, plain, self.layer, self.lines.get(source), token))

    def _section(self, name: str, value: Any, source: KeyPath, token: str) -> None:
        if isinstance(value, Mapping):
            for key, item in value.items():
                self.add((name, *str(key).split(".")), item, (*source, key), token)
        elif value is not None:
            entry = ConfigEntry((name,), value, self.layer, self.lines.get(source), token)
            first = next(iter(SECTIONS[name].model_fields))
            what = f"{entry.shown()}: `{name}` is a section, and this is {kind_of(value)}"
            fix = f"write {name}: {{{first}: ...}}, or {name}.{first}=... on the command line"
            self.problems.append(Problem(what, entry, _listed(SECTIONS[name].model_fields), fix))


def split_key(key: str) -> tuple[str, ...]:
    """``lora.rank`` → (lora, rank); a key of which the first part is no section stays whole."""
    parts = tuple(key.split("."))
    if (
        parts[0] in SECTIONS
        or parts[0] in FREE
        or parts[0] in SOURCE_KEYS
        or f"train_args.{parts[0]}" in FREE
    ):
        return parts
    return (key,)


def _plain(value: Any) -> Any:
    """Python values as a YAML file would hold them."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple | set):
        return [_plain(item) for item in value]
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return value


def meaning_of(entry: ConfigEntry) -> KeyBinding:
    """What an entry's key is. Paceline's own keys come first; those of train_args may stand at the
    top level, and those of the top level under train_args."""
    methods = methods_of(entry.name, entry.value) if _may_be_foreign(entry) else ()
    target = _native(entry)
    if target is not None:
        return KeyBinding(
            entry, target=target, moved=not entry.key.startswith(target), methods=methods
        )
    if len(entry.path) <= (2 if entry.section else 1):
        alias = alias_of(entry.section, entry.name)
        if alias is not None:
            return KeyBinding(entry, alias=alias, methods=methods)
        return KeyBinding(
            entry, ignored=ignored_of(entry.name) or method_setting(entry.name), methods=methods
        )
    return KeyBinding(entry)


def _may_be_foreign(entry: ConfigEntry) -> bool:
    """Keys of other tools are taken at the top level and under `train_args`."""
    return len(entry.path) == 1 or (len(entry.path) == 2 and entry.section == "train_args")


def _native(entry: ConfigEntry) -> str | None:
    rest = entry.path[2:] if entry.section else entry.path[1:]
    candidates = (
        [f"{entry.section}.{entry.name}"]
        if entry.section
        else [entry.name, f"train_args.{entry.name}"]
    )
    if entry.section == "train_args":
        candidates.append(entry.name)
    for target in candidates:
        if target in KEYS and (not rest or target in FREE or target in SOURCE_KEYS):
            return ".".join((target, *rest))
    return None


def unknown(entry: ConfigEntry) -> Problem:
    """The error for a key that nobody knows, with the nearest one that is known."""
    close = _close(entry)
    fix = (
        f"did you mean `{close}`?"
        if close
        else f"remove it; docs/config.md lists all keys{_of_section(entry)}"
    )
    return Problem(f"there is no key `{entry.key}`", entry, fix=fix)


def _of_section(entry: ConfigEntry) -> str:
    return (
        f", and `{entry.section}` has {_listed(SECTIONS[entry.section].model_fields)}"
        if entry.section
        else ""
    )


def _close(entry: ConfigEntry) -> str | None:
    name = entry.path[-1]
    by_last: dict[str, list[str]] = {}
    for key in KEYS:
        by_last.setdefault(key.rpartition(".")[2], []).append(key)
    if name in by_last:
        return "` or `".join(by_last[name])
    prefix = f"{entry.section}." if entry.section else ""
    own = [
        key.removeprefix(prefix)
        for key in KEYS
        if key.startswith(prefix) and "." not in key.removeprefix(prefix)
    ]
    if not entry.section:
        own += list(SECTIONS) + list(SECTIONS["train_args"].model_fields)
    found = [
        one
        for one in (nearest(name, own), nearest(name, by_last), nearest(name, all_foreign()))
        if one
    ]
    if not found:
        return None
    # a key of the same section is likelier than one that is a letter nearer elsewhere
    best = max(
        found, key=lambda one: SequenceMatcher(None, name, one).ratio() + (0.1 if one in own else 0)
    )
    if best in own:
        return prefix + best
    return by_last[best][0] if best in by_last else best


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def short(value: Any, most: int = 70) -> str:
    """A value as YAML would show it on one line, cut to ``most`` characters."""
    if isinstance(value, str):
        text = value if value and "\n" not in value else json.dumps(value, ensure_ascii=False)
    elif isinstance(value, bool) or value is None:
        text = json.dumps(value)
    elif isinstance(value, list):
        text = "[" + ", ".join(short(item, most) for item in value) + "]"
    elif isinstance(value, dict):
        text = "{" + ", ".join(f"{key}: {short(item, most)}" for key, item in value.items()) + "}"
    else:
        text = repr(value) if isinstance(value, float) else str(value)
    return text if len(text) <= most else text[: most - 1] + "…"
