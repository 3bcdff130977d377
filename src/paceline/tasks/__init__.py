"""Tasks, which define the data, the model and the loss of a run. Importing this package imports no
torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.config.schema.tasks import CAUSAL_TASKS, PREFERENCE_TASKS, ROLLOUT_TASKS
from paceline.core.errors import ConfigError, did_you_mean
from paceline.data.sources.kinds import classifies_images
from paceline.models.kinds import reads_images

if TYPE_CHECKING:
    from paceline.config.schema import Config
    from paceline.tasks.base import Task

#: The built-in tasks, and the purpose of each.
BUILT_IN = {
    "sft": "language models, loss on the answers",
    "pretrain": "language models, loss on every token",
    "dpo": "language models, pairs of a preferred and a rejected answer",
    "orpo": "the same with an odds ratio and without a reference model",
    "simpo": "the same with mean log-probabilities and without a reference model",
    "kto": "language models, answers that are marked as good or bad",
    "grpo": "language models, completions of the model and rewards for them, compared by prompt",
    "rloo": "the same, each reward compared with the mean of the others",
    "reward": "text classifiers that score answers, pairs of a preferred and a rejected answer",
    "classify": "images or texts into classes",
    "recommend": "click prediction with embedding tables",
}


def load_task(config: Config) -> Task:
    """Return the task that ``config.task`` names: a built-in one, ``./file.py:Class`` or
    ``package.module:Class``.

    Raises:
        ConfigError: the task does not exist, or the user's file or class cannot be used.
    """
    name = config.task.strip()
    if reads_images(config):
        from paceline.tasks.vision_language import VisionLanguageTask

        return VisionLanguageTask(config)
    if name in ("sft", "pretrain"):
        from paceline.tasks.language import LanguageTask

        return LanguageTask(config)
    if name in PREFERENCE_TASKS:
        from paceline.tasks.preference.task import PreferenceTask

        return PreferenceTask(config)
    if name in ROLLOUT_TASKS:
        from paceline.tasks.grpo.task import GrpoTask

        return GrpoTask(config)
    if name == "reward":
        from paceline.tasks.preference.reward import RewardTask

        return RewardTask(config)
    if name == "classify" and classifies_images(config):
        from paceline.tasks.classify import ClassifyTask

        return ClassifyTask(config)
    if name == "classify":
        from paceline.tasks.text_classify import TextClassifyTask

        return TextClassifyTask(config)
    if name == "recommend":
        from paceline.tasks.recommend import RecommendTask

        return RecommendTask(config)
    if ":" in name or name.endswith(".py"):
        from paceline.tasks.user import load_user_task

        return load_user_task(config)
    built_in = ", ".join(f"{task} ({purpose})" for task, purpose in BUILT_IN.items())
    raise ConfigError(
        "unknown `task: {task}`",
        code="unknown-task",
        allowed="{built_in}; your own as ./file.py:Class or package.module:Class",
        fix=did_you_mean(name.lower(), BUILT_IN, "choose one of these", form="`task: {}`"),
        task=config.task,
        built_in=built_in,
    )


def uses_transformers(config: Config) -> bool:
    """Return whether the task trains a model of transformers that reads text."""
    if config.task == "classify":
        return not classifies_images(config)
    return config.task in (*CAUSAL_TASKS, "reward")


def check_inputs(config: Config) -> None:
    """Check that local files and folders of a language model and of its data exist. The task checks
    this too, but it imports torch first, which takes seconds.

    Raises:
        ConfigError: one does not exist or is not usable.
    """
    if not uses_transformers(config):
        return
    from paceline.data.sources.resolve import check_local_sources
    from paceline.models.files import check_files

    check_files(config)
    check_local_sources(config)
