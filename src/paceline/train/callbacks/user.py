"""Load the callbacks of the user, which the config names as ``./file.py:Class``."""

from __future__ import annotations

import inspect
import json
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, cast

from paceline.core.errors import ConfigError, did_you_mean
from paceline.core.texts import UserText
from paceline.core.user_code import import_user_module, user_error
from paceline.train.callbacks.base import Callback

if TYPE_CHECKING:
    from paceline.config.schema import Config

logger = logging.getLogger(__name__)

_FORM = "./file.py:Class or package.module:Class"


def load_callbacks(config: Config) -> dict[str, Callback]:
    """Return an instance of each class in ``callbacks``, by its name in the config. Every rank
    calls this, so that no instance is sent between processes.

    Raises:
        ConfigError: a file or class does not exist or is not a callback, or user code raised an
            exception; the message shows the line.
    """
    return {text: _load(text, config) for text in config.callbacks}


def check_callbacks(config: Config) -> None:
    """Check the callbacks as :func:`load_callbacks` does, and warn about methods that are never
    called although their names look like the names of a callback's methods."""
    known = [name for name in vars(Callback) if not name.startswith("_")]
    for text, callback in load_callbacks(config).items():
        for name in dir(callback):
            if name.startswith(("on_", "before_", "after_")) and name not in known:
                question = did_you_mean(name, known, f"known are {', '.join(known)}")
                logger.warning(
                    UserText(
                        "the callback {text} defines {name}, which Paceline does not call;"
                        " {question}",
                        code="unknown-callback-method",
                        text=text,
                        name=name,
                        question=question,
                    )
                )


def _load(text: str, config: Config) -> Callback:
    location, _, class_name = text.strip().rpartition(":")
    if not location or class_name.endswith(".py"):
        raise ConfigError(
            "`callbacks: [{text}]` names no class",
            code="callback-without-class",
            allowed=_FORM,
            text=text,
        )
    module = import_user_module(location, f"callbacks: [{text}]", _FORM)
    classes = sorted(name for name, value in vars(module).items() if _is_callback(value))
    listing = f"callbacks in it: {', '.join(classes) or 'none'}"
    callback_class = getattr(module, class_name, None)
    if not _is_callback(callback_class):
        problem = f"{location} has no class {class_name}"
        if callback_class is not None:
            problem = f"{class_name} is not a subclass of paceline.Callback"
        raise ConfigError(
            "`callbacks: [{text}]`: {problem}",
            code="unknown-callback-class",
            allowed=listing,
            fix=did_you_mean(class_name, classes, "derive it from paceline.Callback"),
            text=text,
            problem=problem,
        )
    return _create(cast("type[Callback]", callback_class), text, config)


def _is_callback(value: object) -> bool:
    return inspect.isclass(value) and issubclass(value, Callback) and value is not Callback


def _create(callback_class: type[Callback], text: str, config: Config) -> Callback:
    file = getattr(sys.modules.get(callback_class.__module__), "__file__", None)
    path = Path(file) if file else None
    try:
        callback = callback_class(config)
    except ConfigError:
        raise
    except Exception as error:
        fix = None
        if isinstance(error, TypeError) and f"{callback_class.__name__}.__init__()" in str(error):
            fix = "accept the config: def __init__(self, config): super().__init__(config)"
        raise user_error(f"`callbacks: [{text}]` failed", error, path, fix) from error
    try:
        json.dumps(callback.state_dict())
    except Exception as error:
        what = f"`callbacks: [{text}]`: state_dict() does not return JSON"
        fix = "return a dict of numbers, strings, lists and dicts"
        raise user_error(what, error, path, fix) from error
    return callback
