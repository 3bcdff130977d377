"""Configs as the page has them: what is wrong with one as it is typed, edits of the form put into
it, where two differ."""

import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from paceline.config.compat.binding import bind_key
from paceline.config.diff import changes_training
from paceline.config.entries import FILE, EntryCollector
from paceline.config.fields import KEYS
from paceline.config.load import ConfigMistakes, Loaded, diff_configs, load_config, load_text
from paceline.config.yaml_edit import edit_yaml
from paceline.config.yaml_read import Document, parse_yaml
from paceline.core.errors import ConfigError, PacelineError
from paceline.core.run_dir import RunDir
from paceline.web.api.form import PRESETS, form

__all__ = ["PRESETS", "check", "differences", "edit_yaml", "form", "load"]

_PLACE = re.compile(r"line (\d+)(?:, column \d+)?: ")
NAME = "config"  # what the typed text is called in messages


def load(text: str) -> Loaded:
    """A config that is right.

    Raises:
        ConfigError: it is not.
    """
    return load_text(text, NAME)


def check(text: str) -> dict[str, Any]:
    """What is wrong with a config, and what its keys come to; as ``POST /api/check`` gives it."""
    try:
        loaded = load_text(text, NAME)
    except ConfigError as error:
        found = _errors(error, text)
        return {
            "ok": False,
            "error": found[0],
            "errors": found,
            "notices": [],
            "values": _written(text, None),
        }
    return {
        "ok": True,
        "error": None,
        "errors": [],
        "notices": [{"level": level, "text": text} for level, text in loaded.notices],
        "values": _written(text, loaded),
    }


def _errors(error: ConfigError, text: str) -> list[dict[str, Any]]:
    if isinstance(error, ConfigMistakes):
        return [
            {
                "what": one.what,
                "allowed": one.allowed,
                "fix": one.fix,
                "key": one.key,
                "line": one.line,
            }
            for one in error.mistakes
        ]
    what = error.what.removeprefix(f"{NAME} ").removeprefix("is ")
    place = _PLACE.match(what)
    if not text.strip():
        what = "the config is empty"
    elif place:  # the page has a place of its own for it
        what = what[place.end() :]
    line = int(place[1]) if place else None
    return [{"what": what, "allowed": error.allowed, "fix": error.fix, "key": None, "line": line}]


def _written(text: str, loaded: Loaded | None) -> dict[str, dict[str, Any]]:
    """The native keys that the text sets, each with its value and line."""
    try:
        document = parse_yaml(text, NAME)
    except ConfigError:
        return {}
    found: dict[str, dict[str, Any]] = {}
    for key, value, line in _entries(document):
        if loaded is not None:
            value = loaded.config
            for part in key.split("."):
                value = getattr(value, part)
            value = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
        found[key] = {"value": value, "line": line}
    return found


def _entries(document: Document) -> list[tuple[str, Any, int | None]]:
    walk = EntryCollector(FILE, document.lines)
    walk.tree(document.value if isinstance(document.value, dict) else {})
    out = []
    for entry in walk.entries:
        meaning = bind_key(entry)
        target = meaning.target or (meaning.alias.target if meaning.alias else None) or ""
        key = next(
            (
                one
                for one in (target, target.rpartition(".")[0], target.split(".")[0])
                if one in KEYS
            ),
            None,
        )
        if key is not None:
            out.append((key, entry.value, entry.line))
    return out


def differences(run: Path, text: str) -> list[dict[str, Any]]:
    """Where a config differs from a run's own, as ``POST /api/runs/ID/diff`` gives it."""
    there = {"output_dir": str(run), "resume": "auto"}
    new = load_text(edit_yaml(text, there)[0], NAME).config
    try:
        old = load_config(RunDir(run).config, there).config
    except PacelineError as error:
        raise ConfigError(
            f"the run's own config cannot be read: {error.what}", fix="start a new run"
        ) from error
    if new.train_args.precision == "auto":  # the run's config holds what it was resolved to
        new.train_args.precision = old.train_args.precision
    return [
        {
            "key": key,
            "old": before,
            "new": after,
            "needs_allow": changes_training(key, before, after),
        }
        for key, before, after in diff_configs(old, new)
    ]
