"""What each entry's key is: Paceline's own, another tool's, or unknown; and the errors for keys
that have no place here."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path

from paceline.config.compat.keys import (
    Alias,
    Ignored,
    alias_of,
    all_foreign,
    ignored_of,
    method_setting,
    method_tables,
    methods_of,
    named_method,
)
from paceline.config.entries import ConfigEntry, Problem, quoted_names
from paceline.config.fields import FREE, KEYS, SECTIONS, SOURCE_KEYS
from paceline.core.errors import nearest

_MAX_SHOWN = 4


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


def bind_key(entry: ConfigEntry) -> KeyBinding:
    """What an entry's key is. Paceline's own keys come first; those of train_args may stand at the
    top level, and those of the top level under train_args."""
    # keys of other tools may stand at the top level and under `train_args`
    is_outside = len(entry.path) == 1 or (len(entry.path) == 2 and entry.section == "train_args")
    methods = methods_of(entry.name, entry.value) if is_outside else ()
    target = _native(entry)
    if target is not None:
        return KeyBinding(
            entry, target=target, moved=not entry.key.startswith(target), methods=methods
        )
    if len(entry.path) <= (2 if entry.section else 1):
        alias = alias_of(entry.section, entry.name)
        ignored = None if alias else ignored_of(entry.name) or method_setting(entry.name)
        return KeyBinding(entry, alias=alias, ignored=ignored, methods=methods)
    return KeyBinding(entry)


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


def unknown_key(entry: ConfigEntry) -> Problem:
    """The error for a key that nobody knows, with the nearest one that is known."""
    close = _close(entry)
    fix = f"did you mean `{close}`?" if close else "remove it; docs/config.md lists all keys"
    if not close and entry.section:
        fix += f", and `{entry.section}` has {quoted_names(SECTIONS[entry.section].model_fields)}"
    return Problem(f"there is no key `{entry.key}`", entry, fix=fix)


def _close(entry: ConfigEntry) -> str | None:
    name = entry.path[-1]
    by_last: dict[str, list[str]] = {}
    for key in KEYS:
        by_last.setdefault(key.rpartition(".")[2], []).append(key)
    if name in by_last:
        return "` or `".join(by_last[name])
    prefix = f"{entry.section}." if entry.section else ""
    siblings = [
        key.removeprefix(prefix)
        for key in KEYS
        if key.startswith(prefix) and "." not in key.removeprefix(prefix)
    ]
    if not entry.section:
        siblings += list(SECTIONS) + list(SECTIONS["train_args"].model_fields)
    nearest_keys = [nearest(name, siblings), nearest(name, by_last), nearest(name, all_foreign())]

    def likelihood(key: str) -> float:
        # a key of the same section is likelier than one that is a letter nearer elsewhere
        return SequenceMatcher(None, name, key).ratio() + (0.1 if key in siblings else 0)

    best = max((key for key in nearest_keys if key), key=likelihood, default=None)
    if best is None:
        return None
    if best in siblings:
        return prefix + best
    return by_last[best][0] if best in by_last else best


def unsupported_method(meanings: Sequence[KeyBinding], hints: Iterable[str]) -> Problem:
    """The error for a config with settings of a method that Paceline does not have.

    Args:
        meanings: the keys that are settings of such a method, at least one.
        hints: texts in which the method's name may appear, such as the output folder; they only
            choose between methods that have all of these keys.
    """
    candidates = _candidates(meanings)
    hinted = _hinted(candidates, hints)
    entries = [meaning.entry for meaning in meanings]
    shown = ", ".join([entries[0].shown(), *(_shown(entry) for entry in entries[1:_MAX_SHOWN])])
    if len(entries) > _MAX_SHOWN:
        shown += f" and {len(entries) - _MAX_SHOWN} more"
    verb = "asks" if len(entries) == 1 else "ask"
    names = [method_tables().methods[name] for name in ([hinted] if hinted else candidates)]
    what = (
        f"{names[0]}, a training method that Paceline does not have"
        if len(names) == 1
        else "a training method that Paceline does not have, one of: " + "; ".join(names)
    )
    is_named = any(named_method(one.entry.name, one.entry.value) for one in meanings)
    how = (
        "train this file with the tool it was written for; to fine-tune on the answers of a"
        " supervised dataset instead, remove these keys"
    )
    return Problem(
        f"{shown} {verb} for {what}",
        entries[0],
        allowed=(
            "`task: sft`, `task: pretrain`, `task: classify`, `task: recommend`, and your own as"
            " `./file.py:Class`"
        ),
        fix=how if is_named else how + ", or keep them without effect by adding `task: sft`",
        target="task",
    )


def _shown(entry: ConfigEntry) -> str:
    return entry.shown() + (f" (line {entry.line})" if entry.line and not entry.token else "")


def _candidates(meanings: Sequence[KeyBinding]) -> list[str]:
    """The methods that have the most of these keys; a method that a value names comes before all
    others."""
    named = [name for one in meanings if (name := named_method(one.entry.name, one.entry.value))]
    if named:
        return list(dict.fromkeys(named))
    counts: dict[str, int] = {}
    for meaning in meanings:
        for name in meaning.methods:
            counts[name] = counts.get(name, 0) + 1
    most = max(counts.values())
    return [name for name in method_tables().methods if counts.get(name) == most]


def _hinted(candidates: list[str], hints: Iterable[str]) -> str | None:
    for text in hints:
        for name in sorted(candidates, key=len, reverse=True):
            if re.search(rf"(?<![a-z]){name.replace('_', '[-_]?')}(?![a-z])", text.lower()):
                return name
    return None


def hints_of(entries: Iterable[ConfigEntry], file: Path | None) -> list[str]:
    """Texts that often hold the method's name: the names of the run, and the file's last
    folders."""
    names = (
        "output_dir",
        "hub_model_id",
        "run_name",
        "wandb_run_name",
        "wandb_name",
        "wandb_project",
    )
    texts = [
        str(entry.value)
        for entry in entries
        if entry.name in names and isinstance(entry.value, str)
    ]
    return texts + (["/".join(file.parts[-3:])] if file is not None else [])
