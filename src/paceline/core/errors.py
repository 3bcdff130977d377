"""Errors that say what was given, what is allowed, and how to fix it."""

from collections.abc import Iterable
from difflib import get_close_matches

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_SIGINT = 130
EXIT_SIGTERM = 143


class PacelineError(Exception):
    """A failure that a person reads as one paragraph.

    Args:
        what: what happened or what was given, with its value and place.
        allowed: what would have been accepted.
        fix: what to type or change to go on.
    """

    exit_code = EXIT_FAILED

    def __init__(self, what: str, *, allowed: str | None = None, fix: str | None = None) -> None:
        self.what = what.strip()
        self.allowed = allowed.strip() if allowed else None
        self.fix = fix.strip() if fix else None
        super().__init__(self.paragraph())

    def paragraph(self) -> str:
        """The whole message as one paragraph: what, what is allowed, how to fix it."""
        parts = [_sentence(self.what)]
        if self.allowed:
            parts.append(_sentence(f"Allowed: {self.allowed}"))
        if self.fix:
            parts.append(_sentence(f"To fix: {self.fix}"))
        return " ".join(parts)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.allowed, self.fix))


class ConfigError(PacelineError):
    """The config, the input or the usage is wrong: nothing was started or written (exit code 2)."""

    exit_code = EXIT_USAGE


class RunError(PacelineError):
    """A run that had started failed (exit code 1)."""


class SaveError(RunError):
    """A checkpoint that must be written could not be. Every rank raises it; the text names the rank
    whose part failed."""


class FaultError(RunError):
    """A rank, a device, a link or a number went wrong in a way that going back to the newest
    checkpoint may mend. The launcher starts the ranks again, up to ``recovery.max_restarts`` times.
    Any other :class:`PacelineError` would only come again.

    Args:
        ranks: those to blame, where it is not the one that raises it.
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

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.allowed, self.fix), {"ranks": self.ranks})


class ReportedError(RunError):
    """A failure that a rank has already described in one paragraph, with the exit code of its
    process.

    Args:
        text: the whole paragraph.
        exit_code: what the command exits with.
        would_repeat: a restart from the newest checkpoint would end in the same failure.
    """

    def __init__(self, text: str, exit_code: int = EXIT_FAILED, would_repeat: bool = False) -> None:
        super().__init__(text)
        self.exit_code = exit_code
        self.would_repeat = would_repeat

    def paragraph(self) -> str:
        return self.what

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.what, self.exit_code, self.would_repeat))


class StoppedError(RunError):
    """A run that a signal stopped, with the exit code of its process (130 for SIGINT, else 143)."""

    def __init__(self, text: str, exit_code: int = EXIT_SIGTERM) -> None:
        super().__init__(text)
        self.exit_code = exit_code

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.what, self.exit_code))


class MismatchError(RunError):
    """The ranks have issued different collectives. It may be why other ranks are gone without a
    word, and would only come again."""


def _rebuild(
    kind: type[PacelineError], what: str, allowed: str | None, fix: str | None
) -> PacelineError:
    return kind(what, allowed=allowed, fix=fix)


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?", ":")) else text + "."


def unknown_name(
    kind: str, name: str, known: Iterable[str], *, allowed: str | None = None, fix: str = ""
) -> ConfigError:
    """The error for a name that is not one of ``known``.

    Args:
        kind: what the name is one of, such as "series".
        allowed: the known names in words; default: as they are.
        fix: what to do where no known name is near.
    """
    names = list(known)
    return ConfigError(
        f"there is no {kind} `{name}`",
        allowed=allowed or ", ".join(f"`{known_name}`" for known_name in names),
        fix=did_you_mean(name, names, fix),
    )


def did_you_mean(
    name: str, known: Iterable[str], otherwise: str = "", form: str = "`{}`", cutoff: float = 0.6
) -> str:
    """Ask for the known name nearest to ``name``, shown in ``form``; ``otherwise`` where none is
    near."""
    close = nearest(name, known, cutoff)
    return f"did you mean {form.replace('{}', close)}?" if close else otherwise


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known word closest to ``word``, or None where nothing comes near (a likeness of
    ``cutoff``, 1 is equal)."""
    matches = get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return matches[0] if matches else None


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, to be part of a message."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300].rstrip(".")
