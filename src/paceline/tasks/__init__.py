"""The tasks: what a batch is and what its loss is. Importing this package imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from paceline.config.schema import Config
    from paceline.tasks.base import Task

#: The tasks that come with Paceline, and what each is for.
BUILT_IN = {
    "sft": "language models, loss on the answers",
    "pretrain": "language models, loss on every token",
    "classify": "images into classes",
    "recommend": "the chance of a click, with embedding tables",
}


def is_user_task(config: Config) -> bool:
    """Whether ``config.task`` names a class of the user, in a file or a module."""
    name = config.task.strip()
    return name not in BUILT_IN and (":" in name or name.endswith(".py"))


def load_task(config: Config) -> Task:
    """The task that ``config.task`` names: a built-in one, ``./file.py:Class`` or
    ``package.module:Class``.

    Raises:
        ConfigError: no such task; or the user's file or class cannot be used, with the reason.
    """
    name = config.task.strip()
    if name in ("sft", "pretrain"):
        from paceline.tasks.language import LanguageTask

        return LanguageTask(config)
    if name == "classify":
        from paceline.tasks.classify import ClassifyTask

        return ClassifyTask(config)
    if name == "recommend":
        from paceline.tasks.recommend import RecommendTask

        return RecommendTask(config)
    if is_user_task(config):
        from paceline.tasks.user import load_user_task

        return load_user_task(config)
    raise ConfigError(
        f"`task: {config.task}` is not known",
        allowed=", ".join(f"{one} ({what})" for one, what in BUILT_IN.items())
        + "; your own as ./file.py:Class or package.module:Class",
        fix=did_you_mean(name.lower(), BUILT_IN, "choose one of these", form="`task: {}`"),
    )
