"""Exceptions that name the offending value, what is accepted and the fix, and the code by which
``paceline help`` explains them and other languages express them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Self, TypedDict

from paceline.core.texts import UserText, Values, fill, plain_values

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_SIGINT = 130
EXIT_SIGTERM = 143
#: Environment variable with the path of a file for the record of an error, as JSON.
ERROR_FILE = "PACELINE_ERROR_FILE"


class ErrorRecord(TypedDict):
    """An error for another process."""

    code: str
    what: str
    allowed: str | None
    fix: str | None
    values: Values


class PacelineError(Exception):
    """A failure that is printed as one paragraph. It can be created from the paragraph alone, so
    pickling preserves its attributes.

    The three texts are templates: ``{name}`` is replaced by the value ``name``::

        ConfigError("`{key}` is not a key", code="unknown-key", fix="remove it", key=key)

    Args:
        what: what failed, with the offending key and value.
        code: the kind of error in a few words, such as ``unknown-key``. Each has one cause.
        allowed: what is accepted.
        fix: what to do.
        values: what replaces the fields.
    """

    exit_code = EXIT_FAILED
    #: The code of an error that was created without one.
    default_code = "failed"

    def __init__(
        self,
        what: str,
        /,
        *,
        code: str = "",
        allowed: str | None = None,
        fix: str | None = None,
        **values: object,
    ) -> None:
        self.code = code or self.default_code
        self.values: Values = plain_values(**values)
        self.what = fill(what.strip(), self.values)
        self.allowed = fill(allowed.strip(), self.values) if allowed else None
        self.fix = fill(fix.strip(), self.values) if fix else None
        super().__init__(self.paragraph())

    def paragraph(self) -> str:
        """Return the message as one paragraph."""
        parts = [_sentence(self.what)]
        if self.allowed:
            parts.append(_sentence(f"Allowed: {self.allowed}"))
        if self.fix:
            parts.append(_sentence(f"To fix: {self.fix}"))
        return " ".join(parts)

    def printed(self) -> str:
        """Return the message as commands print it, with the code for ``paceline help``."""
        return f"{self.paragraph()} [{self.code}]"

    def text(self) -> UserText:
        """Return what failed, as a text with the code and the values of the error."""
        return UserText.of(self.what, self.code, self.values)

    def record(self) -> ErrorRecord:
        """Return the error for another process, as :meth:`from_record` reads it."""
        return {
            "code": self.code,
            "what": self.what,
            "allowed": self.allowed,
            "fix": self.fix,
            "values": self.values,
        }

    @classmethod
    def from_record(cls, record: ErrorRecord) -> Self:
        """Return the error that another process has recorded."""
        error = cls("")
        error.code, error.what, error.values = record["code"], record["what"], record["values"]
        error.allowed, error.fix = record["allowed"], record["fix"]
        error.args = (error.paragraph(),)
        return error


class ConfigError(PacelineError):
    """The config, the input or the usage is invalid; nothing was started (exit code 2)."""

    exit_code = EXIT_USAGE
    default_code = "invalid"


class RunError(PacelineError):
    """A run that had started failed (exit code 1)."""


class SaveError(RunError):
    """A required checkpoint could not be written. Every rank raises it; the text names the rank
    that failed."""


class FaultError(RunError):
    """A failure of a rank, a device or a link, or a non-finite number, that may not happen again
    after resuming from the latest checkpoint. The launcher restarts the ranks, up to
    ``recovery.max_restarts`` times. Any other :class:`PacelineError` would happen again.

    Args:
        ranks: the ranks that caused the failure, if not the one that raises it.
    """

    default_code = "fault"

    def __init__(
        self, what: str, /, *, ranks: Iterable[int] | None = None, **settings: Any
    ) -> None:
        super().__init__(what, **settings)
        self.ranks = None if ranks is None else list(ranks)


class OutOfMemory(RunError):
    """A rank could not allocate memory. A restart would fail in the same way.

    Args:
        needed_bytes: memory in use and the size of the failed allocation.
    """

    default_code = "out-of-memory"

    def __init__(self, what: str, /, needed_bytes: int = 0, **values: Any) -> None:
        super().__init__(what, **values)
        self.needed_bytes = needed_bytes


class StoppedError(RunError):
    """The run was stopped by a signal. The exit code is 130 for SIGINT, otherwise 143."""

    default_code = "stopped"

    def __init__(self, text: str, /, exit_code: int = EXIT_SIGTERM, **values: Any) -> None:
        super().__init__(text, **values)
        self.exit_code = exit_code


class NotStreamable(ConfigError):
    """The data cannot be streamed. With ``streaming: auto`` it is tokenized before the start."""


class MismatchError(RunError):
    """The ranks issued different collectives, which may be why other ranks ended without a message.
    A restart would fail in the same way."""

    default_code = "different-collectives"

    def __init__(self, what: str, /, **values: Any) -> None:
        fix = (
            "let all ranks of a group call the same collectives, in one order, with tensors of one"
            " size and dtype"
        )
        super().__init__(what, **{"fix": fix, **values})


def write_error(error: PacelineError, path: str | None) -> None:
    """Write the record of an error for the process that has started this one, if it named a file
    for it in :data:`ERROR_FILE`."""
    if path:
        with suppress(OSError), open(path, "w", encoding="utf-8") as file:
            json.dump(error.record(), file)


def read_error(path: Path, exit_code: int | None) -> PacelineError | None:
    """Return the error that :func:`write_error` has written in a process; None if there is none."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        record = json.loads(path.read_text(encoding="utf-8"))
        kind = ConfigError if exit_code == EXIT_USAGE else RunError
        return kind.from_record(record)
    return None


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?", ":")) else text + "."


def unknown_name(
    kind: str, name: str, known: Iterable[str], *, allowed: str | None = None, fix: str = ""
) -> ConfigError:
    """Return the error for a name that is not one of ``known``.

    Args:
        kind: what the name stands for, such as "series".
        allowed: description of the known names; the names themselves by default.
        fix: what to do if no known name is similar.
    """
    names = list(known)
    return ConfigError(
        "unknown {kind} `{name}`",
        code="unknown-name",
        allowed=allowed or ", ".join(f"`{known_name}`" for known_name in names),
        fix=did_you_mean(name, names, fix),
        kind=kind,
        name=name,
    )


def did_you_mean(
    name: str, known: Iterable[str], otherwise: str = "", form: str = "`{}`", cutoff: float = 0.6
) -> str:
    """Return a question for the known name most similar to ``name``, shown in ``form``;
    ``otherwise`` if none is similar."""
    close = nearest(name, known, cutoff)
    return f"did you mean {form.replace('{}', close)}?" if close else otherwise


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known name most similar to ``name``; None if none has a similarity of ``cutoff``
    (1: equal)."""
    return next(iter(get_close_matches(name, list(known), n=1, cutoff=cutoff)), None)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, for use within a message."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300].rstrip(".")
