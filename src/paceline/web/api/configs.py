"""Configs as text: check one while it is typed, apply the form's edits, and compare it with the
config of a run."""

import contextlib
import re
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from typing import Any

from pydantic import BaseModel, JsonValue

from paceline.config.compat.binding import bind_key
from paceline.config.diff import changes_training
from paceline.config.entries import FILE, EntryCollector
from paceline.config.fields import KEYS
from paceline.config.load import Loaded, diff_configs, dump_yaml, load_config, load_text, own_keys
from paceline.config.messages import ConfigMistakes
from paceline.config.yaml_edit import edit_yaml
from paceline.config.yaml_read import parse_yaml
from paceline.core.errors import ConfigError, PacelineError
from paceline.core.run_dir import RunDir
from paceline.core.texts import notice_record
from paceline.web.api.config_paths import (
    line_of,
    missing_paths,
    unknown_built_ins,
    with_absolute_paths,
)
from paceline.web.files import JSONObject, as_object

_PLACE = re.compile(r"line (\d+)(?:, column \d+)?: ")
_NAME = "config"  # the name of the typed text in messages


def load(text: str) -> Loaded:
    """Load a config from its text.

    Raises:
        ConfigError: the config is not valid.
    """
    return load_text(text, _NAME)


def require(text: str, folder: Path) -> None:
    """Check a config before it is started.

    Raises:
        ConfigError: the config is not valid, or a path in it does not exist below ``folder``, or
            nothing with such a name is built in.
    """
    config = load(text).config
    for _, error in unknown_built_ins(config):
        raise error
    for mistake in missing_paths(config, folder, {}):
        raise ConfigError(
            "`{key}: {path}` does not exist in {folder}",
            code="path-does-not-exist",
            fix=str(mistake["fix"]),
            key=mistake["key"],
            path=mistake["path"],
            folder=folder,
        )


def check(text: str, folder: Path) -> JSONObject:
    """Return the mistakes of a config and the resolved values of its keys. Relative paths start at
    ``folder``."""
    loaded, mistakes = None, list[JsonValue]()
    try:
        loaded = load(text)
    except ConfigError as error:
        mistakes = _mistakes(error, text)
    values = _written(text, loaded)
    if loaded is not None:
        mistakes += missing_paths(loaded.config, folder, values)
        mistakes += [
            as_object({**error.record(), "key": key, "line": line_of(values, key)})
            for key, error in unknown_built_ins(loaded.config)
        ]
    return {
        "ok": not mistakes,
        "is_config": loaded is not None,
        "error": mistakes[0] if mistakes else None,
        "errors": mistakes,
        "notices": _notices(loaded),
        "values": values,
    }


def convert(text: str) -> JSONObject:
    """Return a config with Paceline's own keys, and the notices of the conversion.

    Raises:
        ConfigError: the text is not a config, or it cannot be converted.
    """
    loaded = load(text)
    return {"yaml": dump_yaml(own_keys(loaded.config)), "notices": _notices(loaded)}


def without_folder(text: str, moved_from: Path | None) -> str:
    """Return the config of a run for a new run: without the folder of the run.

    Args:
        text: the text of the config.
        moved_from: the folder at which its relative paths start, if they must become absolute.
    """
    if moved_from is not None:
        with contextlib.suppress(ConfigError):  # the form shows what is wrong
            text = with_absolute_paths(text, load(text).config, moved_from)
    return edit_yaml(text, {}, ["output_dir", "resume"])[0]


def _notices(loaded: Loaded | None) -> list[JsonValue]:
    notices = [] if loaded is None else loaded.notices
    return [as_object(notice_record(level, notice)) for level, notice in notices]


def _mistakes(error: ConfigError, text: str) -> list[JsonValue]:
    if isinstance(error, ConfigMistakes):
        return [asdict(mistake) for mistake in error.mistakes]
    what = error.what.removeprefix(f"{_NAME} ").removeprefix("is ")
    place = _PLACE.match(what)
    if not text.strip():
        what = "the config is empty"
    elif place:  # the page shows the line separately
        what = what[place.end() :]
    line = int(place[1]) if place else None
    record = as_object({**error.record(), "what": what, "key": None, "line": line})
    return [record]


def _written(text: str, loaded: Loaded | None) -> JSONObject:
    """Return the native keys that the text sets: ``{key: {value, line}}``."""
    try:
        document = parse_yaml(text, _NAME)
    except ConfigError:
        return {}
    collector = EntryCollector(FILE, document.lines)
    collector.add_tree(document.value if isinstance(document.value, dict) else {})
    written: JSONObject = {}
    for entry in collector.entries:
        target = bind_key(entry).native_key or ""
        candidates = (target, target.rpartition(".")[0], target.split(".")[0])
        key = next((key for key in candidates if key in KEYS), None)
        if key is None:
            continue
        value = entry.value
        if loaded is not None:
            value = _as_json(attrgetter(key)(loaded.config))
        written[key] = {"value": value, "line": entry.line}
    return written


def _as_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_as_json(item) for item in value]
    is_model = isinstance(value, BaseModel)
    return value.model_dump(mode="json", exclude_unset=True) if is_model else value


def differences(run: Path, text: str) -> list[JsonValue]:
    """Return the keys in which a config differs from the config of a run. ``needs_allow``: the
    change affects the numerics of the training."""
    overrides = {"output_dir": str(run), "resume": "auto"}
    new = load(edit_yaml(text, overrides)[0]).config
    try:
        old = load_config(RunDir(run).config, overrides).config
    except PacelineError as error:
        raise ConfigError(
            "cannot read the config of {run}: {reason}",
            code="panel-config-unreadable",
            fix="start a new run",
            run=run.name,
            reason=error.what,
        ) from error
    if new.parallel.mode == "auto":  # the run's config has what was chosen
        new.parallel.mode = old.parallel.mode
    if new.train_args.precision == "auto":  # the run's config has the resolved precision
        new.train_args.precision = old.train_args.precision
    return [
        {
            "key": key,
            "old": old_value,
            "new": new_value,
            "needs_allow": changes_training(key, old_value, new_value),
        }
        for key, old_value, new_value in diff_configs(old, new)
    ]
