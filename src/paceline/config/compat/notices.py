"""The texts of notices about the keys of other tools."""

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.config.entries import ConfigEntry, short
from paceline.config.yaml_read import YamlValue
from paceline.core.texts import UserText

#: Why a key that nothing is known about is ignored.
NOT_NEEDED = UserText("Paceline behaves the same without it", code="same-without-key")
OVERRIDDEN = UserText("is overridden by the command line", code="remark-overridden-by-command-line")


def remark(text: str) -> UserText:
    """Return a text about a key with a code."""
    return text if isinstance(text, UserText) else UserText("{text}", code="remark", text=text)


def shown_settings(settings: Mapping[str, YamlValue]) -> str:
    """Return settings as `key: value`, separated by commas."""
    return ", ".join(f"`{key}: {short(value)}`" for key, value in settings.items())


def read_as_remark(target: str, value: Any, more: str = "") -> UserText:
    """Return the text that a key is read as a setting, which ends with ``more``."""
    settings = shown_settings({target: value})
    return UserText("is read as {settings}{more}", code="read-as", settings=settings, more=more)


def overridden_remark(winner: ConfigEntry) -> UserText:
    """Return the text that another key takes the place of a key."""
    return UserText("is overridden by {winner}", code="remark-overridden", winner=winner.shown())


def overridden_by_command_line(subject: str, winner: ConfigEntry) -> UserText:
    """Return the notice that an argument of the command takes the place of a key."""
    return UserText(
        "{subject} is overridden by the command line: {winner}",
        code="key-overridden-by-command-line",
        subject=subject,
        winner=winner.shown(),
    )


def key_read_as(subject: str, settings: str, text: str) -> UserText:
    """Return the notice about what a key is read as."""
    return UserText(
        "{subject} is read as {settings}{more}",
        code="key-read-as-with-remark" if text else "key-read-as",
        subject=subject,
        settings=settings,
        more=f"; {text}" if text else "",
        text=text,
    )


def key_remark(subject: str, text: str) -> UserText:
    """Return the notice that a text tells what a key does."""
    return UserText("{subject} {text}", code="key-remark", subject=subject, text=text)


def key_without_effect(subject: str, text: str) -> UserText:
    """Return the notice that a key has no effect, and why."""
    return UserText(
        "{subject} has no effect: {text}", code="key-without-effect", subject=subject, text=text
    )


def key_ignored(subject: str, text: str) -> UserText:
    """Return the notice that a key is not needed, and why."""
    return UserText("{subject} is ignored: {text}", code="key-ignored", subject=subject, text=text)


def keys_ignored(shown: Sequence[str]) -> UserText:
    """Return the notice about several keys that are not needed."""
    return UserText(
        "{count} keys that Paceline does not need are ignored (`paceline config KEY` says why):"
        " {keys}",
        code="keys-ignored",
        count=len(shown),
        keys=", ".join(shown),
    )
