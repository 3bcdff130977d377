"""Load models of transformers that classify texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.config.schema import Config
from paceline.models.blocks import base_model
from paceline.models.builtin import config_numbers
from paceline.models.kinds import HeadSettings, ModelKind, is_text_classifier, text_classifier
from paceline.models.language import load_language_model

if TYPE_CHECKING:
    from torch import nn

#: What the config of a reward model says about its head.
REWARD_SETTINGS: HeadSettings = {
    "id2label": {0: "reward"},
    "label2id": {"reward": 0},
    "problem_type": None,
}
SINGLE, MULTI = "single_label_classification", "multi_label_classification"


def any_text_classifier(config: Config) -> ModelKind | None:
    """Return the kind of the model of a task that classifies texts, with any classes: the data have
    them. None for another task."""
    if config.task not in ("classify", "reward"):
        return None
    return text_classifier(REWARD_SETTINGS, has_new_head=True)


def known_classes(model: str) -> list[str]:
    """Return the names of a model's classes, in order; empty if it is not a text classifier."""
    content = config_numbers(model)
    names = content.get("id2label")
    if not isinstance(names, dict) or not is_text_classifier(content):
        return []
    return [str(names[key]) for key in sorted(names, key=int)]


def class_settings(classes: Sequence[str], is_multi: bool) -> HeadSettings:
    """Return what the config of a text classifier says about its classes."""
    return {
        "id2label": dict(enumerate(classes)),
        "label2id": {name: number for number, name in enumerate(classes)},
        "problem_type": MULTI if is_multi else SINGLE,
    }


def load_text_classifier(config: Config, settings: HeadSettings, pad_token_id: int) -> nn.Module:
    """Load the model to train, on the CPU, or on the meta device if that is the default device.

    A head that does not fit the settings is replaced by an initialized one. With LoRA, the head is
    trained in full and saved with the adapters.

    Args:
        settings: what the model's config says about its head.
        pad_token_id: the token after shorter texts of a batch.

    Raises:
        ConfigError: the model cannot be loaded.
    """
    kind = text_classifier(settings, has_new_head=True)
    model = load_language_model(config, kind)
    # Decoders classify by the last token of a text, which they find by the padding after it.
    base_model(model).config.get_text_config().pad_token_id = pad_token_id
    return model
