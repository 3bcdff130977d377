"""The error for a config that asks for a training method that Paceline does not have."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from paceline.config.compat.methods import named_method
from paceline.config.compat.methods_table import METHODS
from paceline.config.entries import ConfigEntry, KeyBinding, Problem

_MAX_SHOWN = 4


def refusal(meanings: Sequence[KeyBinding], hints: Iterable[str]) -> Problem:
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
    names = [METHODS[name] for name in ([hinted] if hinted else candidates)]
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
    return [name for name in METHODS if counts.get(name) == most]


def _hinted(candidates: list[str], hints: Iterable[str]) -> str | None:
    for text in hints:
        for name in sorted(candidates, key=len, reverse=True):
            if re.search(rf"(?<![a-z]){name.replace('_', '[-_]?')}(?![a-z])", text.lower()):
                return name
    return None


def hints_of(entries: Iterable[ConfigEntry], file: Path | None) -> list[str]:
    """Texts that often hold the method's name: the names of the run, and the file's last folders."""
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
