"""Bind each entry's key: native, another tool's, or unknown; and the errors for unknown keys and
unsupported training methods."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any

from paceline.config.compat.conversion import UnsupportedValue
from paceline.config.compat.keys import (
    Alias,
    Ignored,
    alias_of,
    alias_tables,
    all_foreign,
    ignored_of,
    method_setting,
    method_tables,
    methods_of,
    named_method,
    task_of_method,
)
from paceline.config.entries import (
    FOREIGN_SECTIONS,
    ConfigEntry,
    Notice,
    Problem,
    quoted_names,
)
from paceline.config.fields import KEYS, SECTIONS, takes_value
from paceline.config.settings import Assignment, native_key
from paceline.core.errors import nearest
from paceline.core.texts import UserText

_MAX_SHOWN = 4
#: Similarity of a misspelt key to the key that is suggested (1: equal).
_MIN_SIMILARITY = 0.8


@dataclass(eq=False)
class KeyBinding:
    """The binding of a key: native (``target``), an alias, ignored, or unknown (none of them).

    Args:
        methods: the unsupported training methods that the key belongs to.
        assigned: what the key sets.
        notices: texts about the conversion of its value.
        resolved: texts about its resolution together with other keys.
    """

    entry: ConfigEntry
    target: str | None = None
    alias: Alias | None = None
    ignored: Ignored | None = None
    methods: tuple[str, ...] = ()
    assigned: list[Assignment] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)
    resolved: list[Notice] = field(default_factory=list)

    @property
    def native_key(self) -> str | None:
        """Return the native key that this key sets, as far as its name tells."""
        return self.target or (self.alias.target if self.alias else None)

    @property
    def tools(self) -> str:
        source = self.alias or self.ignored
        return source.tools if source else ""


def bind_key(entry: ConfigEntry) -> KeyBinding:
    """Bind an entry's key, native keys first.

    Keys of `train_args` may be written at the top level, and top-level keys under `train_args`.
    """
    # Keys of other tools are read at the top level and under `train_args`.
    is_outside = len(entry.path) == 1 or (len(entry.path) == 2 and entry.section == "train_args")
    methods = methods_of(entry.name, entry.value) if is_outside else ()
    if entry.section in FOREIGN_SECTIONS and len(entry.path) == 2:
        alias = alias_tables().sections.get(entry.key)
        if alias is not None:
            return KeyBinding(entry, alias=alias)
    target = native_key(entry)
    if target is not None:
        return KeyBinding(entry, target=target, methods=methods)
    if len(entry.path) <= (2 if entry.section else 1):
        alias = alias_of(entry.section, entry.name)
        ignored = None if alias else ignored_of(entry.name) or method_setting(entry.name)
        return KeyBinding(entry, alias=alias, ignored=ignored, methods=methods)
    return KeyBinding(entry)


def unknown_key(entry: ConfigEntry) -> Problem:
    """Describe an unknown key, with the nearest known one."""
    guess = _nearest_key(entry)
    fix = f"did you mean `{guess}`?" if guess else "remove it; `paceline config` lists all keys"
    if not guess and entry.section in SECTIONS:
        fix += f", and `{entry.section}` has {quoted_names(SECTIONS[entry.section].model_fields)}"
    what = UserText("unknown key `{key}`", code="unknown-key", key=entry.key, suggestion=guess)
    return Problem(what, entry, fix=fix, suggestion=guess)


def _nearest_key(entry: ConfigEntry) -> str | None:
    """Return the known key that an unknown one may be a misspelling of: it differs in a few
    letters, takes such a value, and does not mean the opposite."""
    name = entry.path[-1]
    fitting = [key for key, info in KEYS.items() if takes_value(info, entry.value)]
    by_last: dict[str, list[str]] = {}
    for key in fitting:
        by_last.setdefault(key.rpartition(".")[2], []).append(key)
    if name in by_last:
        return "` or `".join(by_last[name])
    prefix = f"{entry.section}." if entry.section in SECTIONS else ""
    inside = [key.removeprefix(prefix) for key in fitting if key.startswith(prefix)]
    siblings = [key for key in inside if "." not in key]
    if not prefix:
        siblings += [key for key in SECTIONS["train_args"].model_fields if key in by_last]
        siblings += list(SECTIONS) if isinstance(entry.value, dict) else []
    foreign = [key for key in all_foreign() if _is_same_kind(key, entry.value)]
    candidates = [
        nearest(name, [key for key in names if _is_close(name, key)], _MIN_SIMILARITY)
        for names in (siblings, by_last, foreign)
    ]

    def likelihood(key: str) -> float:
        # A key of the same section is more likely than a slightly closer one of another section.
        return SequenceMatcher(None, name, key).ratio() + (0.1 if key in siblings else 0)

    best = max((key for key in candidates if key), key=likelihood, default=None)
    if best is None:
        return None
    if best in siblings:
        return prefix + best
    return by_last[best][0] if best in by_last else best


def _is_close(name: str, key: str) -> bool:
    """Return whether a name differs from a key in at most a fifth of its letters, and does not mean
    the opposite."""
    return not is_opposite(name, key) and num_edits(name, key) <= max(1, len(name) // 5)


def num_edits(first: str, second: str) -> int:
    """Return the number of letters to insert, delete or replace, or of neighbors to swap
    (Damerau, 1964)."""
    before: list[int] = []
    row = list(range(len(second) + 1))
    for i, letter in enumerate(first, 1):
        previous, row = row, [i]
        for j, other in enumerate(second, 1):
            edits = min(previous[j] + 1, row[-1] + 1, previous[j - 1] + (letter != other))
            if i > 1 and j > 1 and first[i - 2 : i] == second[j - 2 : j][::-1]:
                edits = min(edits, before[j - 2] + 1)
            row.append(edits)
        before = previous
    return row[-1]


def _is_same_kind(key: str, value: Any) -> bool:
    """Return whether a key of another tool takes such a value, as far as its target tells."""
    alias = alias_of("", key)
    if alias is None or alias.target not in KEYS or isinstance(value, str):
        return not isinstance(value, dict)
    try:
        result = alias.convert(value)
    except UnsupportedValue:
        return False
    sets = result.sets | result.weak
    return all(takes_value(KEYS[target], item) for target, item in sets.items() if target in KEYS)


#: Prefixes that negate a key.
_OPPOSITES = ("un", "dis", "no_", "non_", "not_", "skip_", "without_", "inverse_")


def is_opposite(first: str, second: str) -> bool:
    """Return whether two similar names differ by a word that negates, such as ``disable_x`` and
    ``enable_x``."""
    if {"enable", "disable"} <= {*first.split("_"), *second.split("_")}:
        return True
    shorter, longer = sorted((first, second), key=len)
    return any(
        longer.replace(prefix, "", 1) == shorter or longer.count(prefix) != shorter.count(prefix)
        for prefix in _OPPOSITES
        if re.search(rf"(^|_){prefix}", longer) or re.search(rf"(^|_){prefix}", shorter)
    )


def unsupported_method(bindings: Sequence[KeyBinding]) -> Problem:
    """Describe a config with settings of an unsupported training method.

    Args:
        bindings: the keys that are settings of such a method, at least one.
    """
    named = [named_method(binding.entry.name, binding.entry.value) for binding in bindings]
    is_named = any(named)
    candidates = list(dict.fromkeys(name for name in named if name)) or likely_methods(bindings)
    entries = [binding.entry for binding in bindings]
    shown = entries[0].shown()
    for entry in entries[1:_MAX_SHOWN]:
        shown += f", {entry.located() if entry.line and not entry.token else entry.shown()}"
    if len(entries) > _MAX_SHOWN:
        shown += f" and {len(entries) - _MAX_SHOWN} more"
    methods = [method_tables().methods[name] for name in candidates]
    fix = (
        "train this file with the tool it was written for; to fine-tune on the answers of a"
        " supervised dataset instead, remove these keys"
    )
    if not is_named:
        fix += ", or keep them without effect by adding `task: sft`"
    verb = "requires" if len(entries) == 1 else "require"
    supported = dict.fromkeys(task for name in candidates if (task := task_of_method(name)))
    if supported and not is_named:
        tasks = " or ".join(f"`task: {name}`" for name in supported)
        return Problem(
            UserText(
                "{shown} {verb} to one of several training methods: {methods}",
                code="ambiguous-method",
                shown=shown,
                verb="belongs" if len(entries) == 1 else "belong",
                methods="; ".join(methods),
            ),
            entries[0],
            allowed=tasks,
            fix=f"state which one it is: add {tasks}",
            target="task",
        )
    return Problem(
        UserText(
            "{shown} {verb} {methods}, a training method that Paceline does not support"
            if len(methods) == 1
            else "{shown} {verb} a training method that Paceline does not support, one of:"
            " {methods}",
            code="unsupported-method",
            shown=shown,
            verb=verb,
            methods="; ".join(methods),
        ),
        entries[0],
        allowed=(
            "`task: sft`, `pretrain`, `dpo`, `orpo`, `kto`, `simpo`, `grpo`, `rloo`, `reward`,"
            " `classify`, `recommend`, and a custom task as `./file.py:Class`"
        ),
        fix=fix,
        target="task",
    )


def likely_methods(bindings: Sequence[KeyBinding]) -> list[str]:
    """Return the methods that have most of these keys."""
    counts = Counter(name for binding in bindings for name in binding.methods)
    max_count = max(counts.values())
    return [name for name in method_tables().methods if counts[name] == max_count]
