"""The error for all mistakes in a config."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.config.entries import OVERRIDE, ConfigEntry, Problem
from paceline.core.errors import ConfigError


@dataclass(frozen=True)
class Mistake:
    """A single error in a config. ``key``: the native key, ``line``: counted from 1; None if
    unknown."""

    key: str | None
    line: int | None
    what: str
    allowed: str | None
    fix: str | None


class ConfigMistakes(ConfigError):
    """All errors in a config, in one message; ``mistakes`` lists them separately."""

    mistakes: Sequence[Mistake] = ()


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
        ConfigMistakes(
            _end_sentence(_with_place(problem, file)),
            code=problem.kind,
            allowed=_end_sentence(problem.allowed),
            fix=_end_sentence(problem.fix),
        )
        for problem in ordered
    ]
    error = errors[0]
    if len(errors) > 1:
        paragraphs = "\n".join(f"- {error.paragraph()}" for error in errors)
        what = f"the config has {len(errors)} errors:\n{paragraphs}"
        error = ConfigMistakes(what, code=error.code)
    error.mistakes = [_mistake(problem, key_of) for problem in ordered]
    return error


def _mistake(problem: Problem, key_of: Callable[[ConfigEntry], str | None]) -> Mistake:
    entry, key = problem.entry, None
    if entry is not None:
        key = problem.target or key_of(entry)
    return Mistake(
        key or None, entry.line if entry else None, problem.what, problem.allowed, problem.fix
    )


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
