"""Exceptions that name the offending value, what is accepted and the fix."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_SIGINT = 130
EXIT_SIGTERM = 143


class PacelineError(Exception):
    """A failure that is printed as one paragraph. It can be created from the paragraph alone, so
    pickling preserves its attributes.

    Args:
        what: what failed, with the offending key and value.
        allowed: what is accepted.
        fix: what to do.
    """

    exit_code = EXIT_FAILED

    def __init__(self, what: str, *, allowed: str | None = None, fix: str | None = None) -> None:
        self.what = what.strip()
        self.allowed = allowed.strip() if allowed else None
        self.fix = fix.strip() if fix else None
        super().__init__(self.paragraph())

    def paragraph(self) -> str:
        """Return the message as one paragraph."""
        parts = [_sentence(self.what)]
        if self.allowed:
            parts.append(_sentence(f"Allowed: {self.allowed}"))
        if self.fix:
            parts.append(_sentence(f"To fix: {self.fix}"))
        return " ".join(parts)


class ConfigError(PacelineError):
    """The config, the input or the usage is invalid; nothing was started (exit code 2).

    Args:
        code: the kind of error in a few words, such as ``unknown-key``, for programs and tests.
    """

    exit_code = EXIT_USAGE

    def __init__(
        self,
        what: str,
        *,
        code: str = "invalid",
        allowed: str | None = None,
        fix: str | None = None,
    ) -> None:
        super().__init__(what, allowed=allowed, fix=fix)
        self.code = code


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

    def __init__(
        self,
        what: str,
        *,
        allowed: str | None = None,
        fix: str | None = None,
        ranks: Iterable[int] | None = None,
    ) -> None:
        super().__init__(what, allowed=allowed, fix=fix)
        self.ranks = None if ranks is None else list(ranks)


class OutOfMemory(RunError):
    """A rank could not allocate memory. A restart would fail in the same way.

    Args:
        needed_bytes: memory in use and the size of the failed allocation.
    """

    def __init__(self, what: str, needed_bytes: int = 0) -> None:
        super().__init__(what)
        self.needed_bytes = needed_bytes


class StoppedError(RunError):
    """The run was stopped by a signal. The exit code is 130 for SIGINT, otherwise 143."""

    def __init__(self, text: str, exit_code: int = EXIT_SIGTERM) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class NotStreamable(ConfigError):
    """The data cannot be streamed. With ``streaming: auto`` it is tokenized before the start."""


class MismatchError(RunError):
    """The ranks issued different collectives, which may be why other ranks ended without a message.
    A restart would fail in the same way."""

    def __init__(self, what: str) -> None:
        fix = (
            "let all ranks of a group call the same collectives, in one order, with tensors of one"
            " size and dtype"
        )
        super().__init__(what, fix=fix)


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
        f"unknown {kind} `{name}`",
        code="unknown-name",
        allowed=allowed or ", ".join(f"`{known_name}`" for known_name in names),
        fix=did_you_mean(name, names, fix),
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
