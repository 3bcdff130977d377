"""Describe what the schema rejects (the value, what is allowed, how to fix it), and make one error
of all mistakes in a config."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from paceline.config.entries import OVERRIDE, ConfigEntry, Problem, short
from paceline.config.fields import CHINESE, KEYS, SECTIONS, SOURCE_KEYS, describe, literals, takes
from paceline.config.schema.base import CombinationError
from paceline.config.schema.data import DatasetSource
from paceline.config.yaml_read import YamlValue, kind_of
from paceline.core.errors import ConfigError, ErrorRecord, did_you_mean, nearest
from paceline.core.texts import UserText, Values

Find = Callable[[str], ConfigEntry | None]
_EXAMPLES = {
    "model": "add `model: Qwen/Qwen2.5-0.5B`, a local folder, or `builtin:NAME`",
    "dataset": "add `dataset: ./data.jsonl`, a hub id, or `builtin:NAME`",
}


def explain(error: ValidationError, data: dict[str, YamlValue], find: Find) -> list[Problem]:
    """Return a problem for each key that the schema rejects. ``find`` returns the entry that sets a
    native key."""
    by_key: dict[str, list[ErrorDetails]] = {}
    for details in error.errors(include_url=False):
        loc = details["loc"]
        depth = 2 if loc and loc[0] in SECTIONS else 1
        by_key.setdefault(".".join(str(part) for part in loc[:depth]), []).append(details)
    return [_describe(key, errors, data, find) for key, errors in by_key.items()]


def _describe(
    key: str, errors: list[ErrorDetails], data: dict[str, YamlValue], find: Find
) -> Problem:
    first = errors[0]
    if first["type"] == "missing" and key in _EXAMPLES and first["loc"] == (key,):
        return Problem(
            UserText("`{key}` is missing", code="missing-key", key=key),
            fix=f"{_EXAMPLES[key]} (or {key}=... on the command line)",
            target=key,
        )
    is_rule = first["type"] == "value_error" and len(first["loc"]) < len(key.split("."))
    if key not in KEYS or is_rule:
        return _combination(key, first, find)
    value, entry = _lookup(data, key), find(key)
    shown = shown_key(key, value, entry)
    if first["type"] == "value_error":
        text = _rule_text(first)
        shown = shown.removesuffix(",")
        what = UserText.of(f"{shown}: {text}", text.code, {**text.values, "shown": shown})
        return Problem(what, entry, target=key)
    if key in SOURCE_KEYS:
        return _source(key, value, errors, entry)
    return reject(
        key, value, entry, _reason(key, shown, value, [error["type"] for error in errors])
    )


def reject(key: str, value: Any, entry: ConfigEntry | None, what: UserText) -> Problem:
    """Describe a value that a native key does not accept."""
    similar = _similar(key, value)
    fix = f"did you mean `{similar}`?" if similar else None
    return Problem(what, entry, allowed=describe(KEYS[key]), fix=fix)


def _similar(key: str, value: Any) -> str:
    return (nearest(value.lower(), literals(KEYS[key])) or "") if isinstance(value, str) else ""


def shown_key(key: str, value: Any, entry: ConfigEntry | None) -> str:
    """Return a key with its value, as the user wrote them, and the native key they set."""
    if entry is None or (entry.key == key and not entry.token):
        return f"`{key}: {short(value)}`"
    same = entry.path[-1] == key.rpartition(".")[2]
    return entry.shown() if same else f"{entry.shown()}, which sets `{key}`,"


def _reason(key: str, shown: str, value: Any, types: list[str]) -> UserText:
    """Describe why a value is not accepted."""
    accepted = describe(KEYS[key], CHINESE)
    if any(name.startswith(("greater_than", "less_than")) for name in types):
        return UserText(
            "{shown} is out of range",
            code="out-of-range",
            shown=shown,
            accepted_in_chinese=accepted,
        )
    if set(types) <= {"literal_error", "list_type"} and isinstance(value, str | list):
        return UserText(
            "{shown} is not one of the accepted values",
            code="unknown-value",
            shown=shown,
            similar=_similar(key, value),
            accepted_in_chinese=accepted,
        )
    if "finite_number" in types:
        return _not_finite(key, shown)
    if "int_from_float" in types:
        return UserText(
            "{shown} is not a whole number",
            code="not-whole",
            shown=shown,
            accepted_in_chinese=accepted,
        )
    if isinstance(value, list | dict):
        return UserText(
            "{shown} contains an unsupported value",
            code="invalid-value",
            shown=shown,
            accepted_in_chinese=accepted,
        )
    return UserText(
        "{shown} is {kind}, which is not accepted",
        code="wrong-type",
        shown=shown,
        kind=kind_of(value),
        accepted_in_chinese=accepted,
    )


def _not_finite(key: str, shown: str) -> UserText:
    return UserText(
        "{shown} is not a finite number",
        code="not-finite",
        shown=shown,
        accepted_in_chinese=describe(KEYS[key], CHINESE),
    )


def _source(key: str, value: Any, errors: list[ErrorDetails], entry: ConfigEntry | None) -> Problem:
    """Describe the first error about a mapping, as it is the most specific one of the union."""
    shown = entry.shown() if entry else f"`{key}: {short(value)}`"
    for details in errors:
        if "DatasetSource" not in details["loc"] or details["type"] == "model_type":
            continue
        name = str(details["loc"][-1])
        info = DatasetSource.model_fields.get(name)
        if details["type"] == "missing":
            fix = "add path: a file, a folder or a hub id"
            text = "{shown}: `path` of the data source is missing"
            return Problem(UserText(text, code="missing-path", shown=shown), entry, fix=fix)
        if details["type"] == "extra_forbidden":
            what = UserText(
                "{shown}: unknown key `{name}` of a data source",
                code="unknown-source-key",
                shown=shown,
                name=name,
            )
            fix = did_you_mean(name, DatasetSource.model_fields, "remove it")
            return Problem(what, entry, describe(KEYS[key]), fix)
        if info is not None:
            what = UserText(
                "{shown}: unsupported value `{name}: {value}`",
                code="invalid-source-value",
                shown=shown,
                name=name,
                value=short(details["input"]),
            )
            fix = did_you_mean(str(details["input"]), literals(info))
            return Problem(what, entry, f"for `{name}`: {describe(info)}", fix)
    what = UserText("{shown} is not a data source", code="not-a-source", shown=shown)
    return Problem(what, entry, describe(KEYS[key]))


def _combination(key: str, first: ErrorDetails, find: Find) -> Problem:
    """Describe a violated rule about several keys, with the place of each key."""
    text = _rule_text(first)
    error = first.get("ctx", {}).get("error")
    keys = error.keys if isinstance(error, CombinationError) else ()
    entries = {name: entry for name in KEYS if name in keys and (entry := find(name))}
    if not entries:
        return Problem(text, find(key))
    places = [f"`{name}` ({entry.shown()}, {entry.place()})" for name, entry in entries.items()]
    what = UserText.of(f"{text}: {' and '.join(places)}", text.code, text.values)
    return Problem(what, list(entries.values())[-1])


def _rule_text(details: ErrorDetails) -> UserText:
    """Return the text of a violated rule of the schema."""
    error = details.get("ctx", {}).get("error")
    if isinstance(error, ValueError) and error.args and isinstance(error.args[0], UserText):
        return error.args[0]
    text = str(details["msg"]).removeprefix("Value error, ")
    return UserText("{text}", code="unsupported-combination", text=text)


def _lookup(data: dict[str, YamlValue], key: str) -> Any:
    value: Any = data
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def strict_problems(data: dict[str, YamlValue], find: Find) -> list[Problem]:
    """Return the problems that pydantic would convert silently: true and false as numbers, text as
    true or false, non-finite numbers."""
    out = []
    for key, info in KEYS.items():
        value, entry = _lookup(data, key), find(key)
        shown = shown_key(key, value, entry)
        if isinstance(value, bool) and takes(info, int, float) and not takes(info, bool):
            out.append(reject(key, value, entry, _not_a_number(key, shown)))
        elif isinstance(value, float) and not math.isfinite(value):
            out.append(reject(key, value, entry, _not_finite(key, shown)))
        elif (
            takes(info, bool)
            and not isinstance(value, bool | None)
            and not (isinstance(value, str) and value in literals(info))
            and not (isinstance(value, int) and takes(info, int))
        ):
            what = UserText(
                "{shown} is {kind}, not true or false",
                code="not-true-or-false",
                shown=shown,
                kind=kind_of(value),
                accepted_in_chinese=describe(info, CHINESE),
            )
            out.append(reject(key, value, entry, what))
    return out


def _not_a_number(key: str, shown: str) -> UserText:
    return UserText(
        "{shown} is true/false, not a number",
        code="not-a-number",
        shown=shown,
        accepted_in_chinese=describe(KEYS[key], CHINESE),
    )


# -- one error for all mistakes


@dataclass(frozen=True)
class Mistake:
    """A single error in a config. ``key``: the native key, ``line``: counted from 1; None if
    unknown."""

    code: str
    values: Values
    what: str
    allowed: str | None
    fix: str | None
    key: str | None
    line: int | None


class ConfigMistakes(ConfigError):
    """All errors in a config, in one message; ``mistakes`` lists them separately."""

    mistakes: Sequence[Mistake] = ()

    def printed(self) -> str:
        # Each of several mistakes ends with its own code.
        return self.what if len(self.mistakes) > 1 else super().printed()

    def record(self) -> ErrorRecord:
        record = super().record()
        if len(self.mistakes) > 1:  # the code is the one of the first mistake only
            record["code"] = "several-mistakes"
        return record


def config_error(
    problems: list[Problem], file: Path | None, key_of: Callable[[ConfigEntry], str | None]
) -> ConfigMistakes:
    """Return one error for all problems, in the order of the file, with the code of the first one.
    ``key_of`` returns the native key that an entry sets."""

    def line(problem: Problem) -> int:
        entry = problem.entry
        return 10**9 if entry is None or entry.line is None else entry.line

    ordered = sorted(problems, key=line)
    errors = [
        ConfigMistakes.from_record(
            {
                "code": problem.code,
                "what": _end_sentence(_with_place(problem, file)),
                "allowed": _end_sentence(problem.allowed) or None,
                "fix": _end_sentence(problem.fix) or None,
                "values": problem.what.values,
            }
        )
        for problem in ordered
    ]
    error = errors[0]
    if len(errors) > 1:
        paragraphs = "\n".join(f"- {error.printed()}" for error in errors)
        what = f"the config has {len(errors)} errors:\n{paragraphs}"
        error = ConfigMistakes(what, code=error.code)
    error.mistakes = [_mistake(problem, key_of) for problem in ordered]
    return error


def _mistake(problem: Problem, key_of: Callable[[ConfigEntry], str | None]) -> Mistake:
    entry = problem.entry
    key = (problem.target or key_of(entry) or None) if entry else None
    line = entry.line if entry else None
    what = problem.what
    return Mistake(what.code, what.values, what, problem.allowed, problem.fix, key, line)


def _end_sentence(text: str | None) -> str:
    """Return the text with a period if it ends in code, because another sentence follows."""
    return f"{text}." if text and text.endswith("`") else text or ""


def _with_place(problem: Problem, file: Path | None) -> str:
    entry = problem.entry
    if entry is None:
        return f"{file}: {problem.what}" if file is not None else problem.what
    if entry.layer == OVERRIDE or entry.source:
        return f"{entry.place()}: {problem.what}"
    return f"{file} line {entry.line}: {problem.what}" if entry.line else f"{file}: {problem.what}"
