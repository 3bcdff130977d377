"""Configs as the page has them: what is wrong with one as it is typed, edits of the form put into
it, where two differ."""

import re
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

from pydantic import BaseModel, JsonValue

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
from paceline.web.files import JSONObject

__all__ = ["PRESETS", "check", "differences", "edit_yaml", "form", "load"]

_PLACE = re.compile(r"line (\d+)(?:, column \d+)?: ")
NAME = "config"  # what the typed text is called in messages


def load(text: str) -> Loaded:
    """A config that is right.

    Raises:
        ConfigError: it is not.
    """
    return load_text(text, NAME)


def check(text: str) -> JSONObject:
    """What is wrong with a config, and what its keys come to; as ``POST /api/check`` gives it."""
    loaded, mistakes = None, list[JsonValue]()
    try:
        loaded = load_text(text, NAME)
    except ConfigError as error:
        mistakes = _mistakes(error, text)
    notices = [] if loaded is None else loaded.notices
    return {
        "ok": loaded is not None,
        "error": mistakes[0] if mistakes else None,
        "errors": mistakes,
        "notices": [{"level": level, "text": notice} for level, notice in notices],
        "values": _written(text, loaded),
    }


def _mistakes(error: ConfigError, text: str) -> list[JsonValue]:
    if isinstance(error, ConfigMistakes):
        return [
            {
                "what": mistake.what,
                "allowed": mistake.allowed,
                "fix": mistake.fix,
                "key": mistake.key,
                "line": mistake.line,
            }
            for mistake in error.mistakes
        ]
    what = error.what.removeprefix(f"{NAME} ").removeprefix("is ")
    place = _PLACE.match(what)
    if not text.strip():
        what = "the config is empty"
    elif place:  # the page has a place of its own for it
        what = what[place.end() :]
    line = int(place[1]) if place else None
    return [{"what": what, "allowed": error.allowed, "fix": error.fix, "key": None, "line": line}]


def _written(text: str, loaded: Loaded | None) -> JSONObject:
    """The native keys that the text sets, each with its value and line."""
    try:
        document = parse_yaml(text, NAME)
    except ConfigError:
        return {}
    written: JSONObject = {}
    for key, value, line in _entries(document):
        if loaded is not None:
            value = attrgetter(key)(loaded.config)
            value = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
        written[key] = {"value": value, "line": line}
    return written


def _entries(document: Document) -> Iterator[tuple[str, Any, int | None]]:
    walk = EntryCollector(FILE, document.lines)
    walk.tree(document.value if isinstance(document.value, dict) else {})
    for entry in walk.entries:
        meaning = bind_key(entry)
        target = meaning.target or (meaning.alias.target if meaning.alias else None) or ""
        for key in (target, target.rpartition(".")[0], target.split(".")[0]):
            if key in KEYS:
                yield key, entry.value, entry.line
                break


def differences(run: Path, text: str) -> list[JsonValue]:
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
