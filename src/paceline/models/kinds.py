"""What kinds of transformers' models are loaded, and how a saved model's kind is found. Imports no
libraries."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import yaml

from paceline.config.schema import Config
from paceline.core.files import write_json_atomic
from paceline.models.json_config import JsonObject, read_object
from paceline.models.vision.types import vision_type, vision_type_of

_CLASSIFIER = "ForSequenceClassification"
#: The class names and kind of labels of a classifier whose folder has only adapters and no
#: config.json: arguments of ``from_pretrained`` of its base model.
_CLASSES = "classes.json"


class HeadSettings(TypedDict, total=False):
    """What a model's config says about the head of a text classifier."""

    id2label: dict[int, str]
    label2id: dict[str, int]
    problem_type: str | None


@dataclass(frozen=True)
class ModelKind:
    """As what a model is loaded.

    Args:
        auto_class: name of transformers' class that loads it.
        noun: the kind, for messages.
        settings: values in the model's config that differ from its config.json.
        has_new_head: parameters that the files do not have, or have in another shape, are
            initialized.
    """

    auto_class: str = "AutoModelForCausalLM"
    noun: str = "causal language model"
    settings: HeadSettings = field(default_factory=HeadSettings)
    has_new_head: bool = False


LANGUAGE = ModelKind()
VISION_LANGUAGE = ModelKind("AutoModelForImageTextToText", "vision-language model")


def reads_images(config: Config) -> bool:
    """Return whether a config trains a vision-language model."""
    is_chosen = config.task == "sft" and not config.vision.text_only
    return is_chosen and vision_type(config.model) is not None


def kind_of(config: Config) -> ModelKind:
    """Return the kind of the language model of a config."""
    return VISION_LANGUAGE if reads_images(config) else LANGUAGE


def text_classifier(settings: HeadSettings, has_new_head: bool) -> ModelKind:
    """Return the kind of a text classifier. ``settings`` has the names of its classes."""
    return ModelKind(f"AutoModel{_CLASSIFIER}", "text classifier", settings, has_new_head)


def is_text_classifier(content: JsonObject) -> bool:
    """Return whether a config.json belongs to a text classifier."""
    architectures = content.get("architectures")
    return isinstance(architectures, list) and any(
        str(name).endswith(_CLASSIFIER) for name in architectures
    )


def save_classes(settings: HeadSettings, folder: Path) -> None:
    """Write the names of the classes next to the adapters of a text classifier."""
    write_json_atomic(folder / _CLASSES, dict(settings))


def saved_kind(folder: Path) -> ModelKind:
    """Return the kind of the model in the folder of a run, or of its adapters."""
    classes: Any = read_object(folder / _CLASSES)
    if classes is not None:
        names = classes.get("id2label")
        numbered = (
            {int(key): str(name) for key, name in names.items()} if isinstance(names, dict) else {}
        )
        settings: HeadSettings = classes
        settings["id2label"] = numbered
        return text_classifier(settings, has_new_head=True)
    content = read_object(folder / "config.json") or {}
    if is_text_classifier(content):
        return text_classifier({}, has_new_head=False)
    if folder.joinpath("adapter_config.json").is_file():
        base = (read_object(folder / "adapter_config.json") or {}).get("base_model_name_or_path")
        is_vision = vision_type(str(base)) is not None
    else:
        is_vision = vision_type_of(content) is not None
    return VISION_LANGUAGE if is_vision and not _was_trained_as_text(folder) else LANGUAGE


def _was_trained_as_text(folder: Path) -> bool:
    """Return whether the run that the folder is in has trained a causal language model of a type
    that can also be a vision-language model."""
    try:
        content: Any = yaml.safe_load((folder.parent / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return False
    if not isinstance(content, dict):
        return False
    vision = content.get("vision")
    is_text_only = isinstance(vision, dict) and vision.get("text_only") is True
    return content.get("task", "sft") != "sft" or is_text_only
