"""What kinds of transformers' models are loaded, and how a saved model's kind is found. Imports no
libraries."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from paceline.config.schema import Config
from paceline.core.files import write_json_atomic
from paceline.models.builtin import model_type
from paceline.models.hub_configs import fetch_config
from paceline.models.json_config import JsonObject, read_object

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


@dataclass(frozen=True)
class VisionFamily:
    """A family of vision-language models.

    Args:
        tower, projector, language: names of the submodules of its base model.
        has_rows: whether images have a dimension of rows, [rows, images, channels, height, width];
            otherwise the images of all rows follow each other, [images, channels, height, width].
    """

    tower: str
    projector: str
    language: str
    has_rows: bool


_IDEFICS = VisionFamily("vision_model", "connector", "text_model", has_rows=True)
#: The supported families, by ``model_type``.
VISION_FAMILIES = {
    "idefics3": _IDEFICS,
    "smolvlm": _IDEFICS,
    "llava": VisionFamily(
        "vision_tower", "multi_modal_projector", "language_model", has_rows=False
    ),
}


def vision_family(model: str) -> VisionFamily | None:
    """Return the family of a vision-language model, or None for another model. The config.json of a
    hub ID is downloaded if it is not known, because it decides how the model is trained."""
    fetch_config(model)
    return VISION_FAMILIES.get(model_type(model) or "")


def reads_images(config: Config) -> bool:
    """Return whether a config trains a vision-language model."""
    return config.task == "sft" and vision_family(config.model) is not None


def kind_of(config: Config) -> ModelKind:
    """Return the kind of the language model of a config."""
    return VISION_LANGUAGE if reads_images(config) else LANGUAGE


def frozen_parts(config: Config) -> list[str]:
    """Return the names of the submodules of a vision-language model that are not trained; empty for
    another model."""
    family, vision = vision_family(config.model), config.vision
    if family is None:
        return []
    parts = (
        (family.tower, vision.freeze_vision_tower),
        (family.projector, vision.freeze_multi_modal_projector),
        (family.language, vision.freeze_language_model),
        ("lm_head", vision.freeze_language_model),
    )
    return [name for name, is_frozen in parts if is_frozen]


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
        is_vision = vision_family(str(base)) is not None
    else:
        is_vision = content.get("model_type") in VISION_FAMILIES
    return VISION_LANGUAGE if is_vision else LANGUAGE
