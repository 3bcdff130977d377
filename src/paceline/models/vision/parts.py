"""Find the parts of a vision-language model by the names that transformers gives them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import StrEnum
from typing import TYPE_CHECKING

from paceline.config.schema import Config
from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn


class Part(StrEnum):
    """A part of a vision-language model."""

    TOWER = "vision tower"
    PROJECTOR = "projector"
    LANGUAGE = "language model"
    AUDIO = "audio tower"  # never trained: rows have no audio


_TOWERS = (
    "vision_tower",
    "vision_model",
    "visual",
    "vision_encoder",
    "vision",
    "image_encoder",
    "vqmodel",
    "vqvae",
)
_LANGUAGE = ("language_model", "text_model", "lm_head", "llm")
#: Names of the projector where it is a module of the vision tower (Qwen, GLM).
_IN_TOWER = ("merger", "merger_list", "deepstack_merger_list")
_AUDIO = re.compile(r"audio|speech")


def part_of(name: str) -> Part:
    """Return the part of a parameter or module, by its dotted name in the model. What belongs
    neither to the vision tower nor to the language model is between them, and thus the
    projector."""
    names = name.removeprefix("model.").split(".")
    if names[0] in _LANGUAGE:
        return Part.LANGUAGE
    if _AUDIO.search(names[0]):
        return Part.AUDIO
    if names[0] in _TOWERS:
        return Part.PROJECTOR if names[1:2] and names[1] in _IN_TOWER else Part.TOWER
    return Part.PROJECTOR


def roots_of(model: nn.Module) -> dict[Part, list[str]]:
    """Return the dotted names of the modules and parameters that each part consists of."""
    roots: dict[Part, list[str]] = {part: [] for part in Part}
    for name, _ in model.named_parameters():
        names = name.split(".")
        first = 2 if names[0] == "model" else 1
        if names[first - 1] in _TOWERS and part_of(name) is Part.PROJECTOR:
            first += 1
        root = ".".join(names[:first])
        if root not in roots[part := part_of(name)]:
            roots[part].append(root)
    return roots


def frozen_parts(config: Config) -> list[Part]:
    """Return the parts of a vision-language model that the config does not train."""
    vision = config.vision
    parts = (
        (Part.TOWER, vision.freeze_vision_tower),
        (Part.PROJECTOR, vision.freeze_multi_modal_projector),
        (Part.LANGUAGE, vision.freeze_language_model),
        (Part.AUDIO, True),
    )
    return [part for part, is_frozen in parts if is_frozen]


def freeze_parts(model: nn.Module, config: Config) -> None:
    """Freeze the parts of a vision-language model that the config does not train.

    Raises:
        ConfigError: the model has no language model of a known name.
    """
    parts = frozen_parts(config)
    is_known = False
    for name, parameter in model.named_parameters():
        part = part_of(name)
        is_known = is_known or part is Part.LANGUAGE
        if part in parts:
            parameter.requires_grad_(False)
    if not is_known:
        raise ConfigError(
            "the parts of the vision-language model `{model}` are not known: none of its modules"
            " ({modules}) is named as a language model",
            code="vision-language-parts-unknown",
            allowed="models with a module {names}",
            fix="choose another model",
            model=config.model,
            modules=", ".join(name for name, _ in getattr(model, "model", model).named_children()),
            names=", ".join(f"`{name}`" for name in _LANGUAGE),
        )


def frozen_patterns(model: nn.Module, config: Config) -> Iterator[str]:
    """Yield regular expressions that match the names of the modules in frozen parts."""
    roots, frozen = roots_of(model), frozen_parts(config)
    inside = [root for root in roots[Part.PROJECTOR] if root.split(".")[-1] in _IN_TOWER]
    for part in frozen:
        for root in roots[part]:
            others = [name for name in inside if name.startswith(f"{root}.")]
            trained = "|".join(map(re.escape, others))
            lookahead = rf"(?!(?:{trained})(?:\.|$))" if others else ""
            yield rf"{lookahead}{re.escape(root)}(?:\..*)?"


def in_frozen_part(name: str, config: Config) -> bool:
    """Return whether a module or parameter belongs to a part that the config does not train."""
    return part_of(name) in frozen_parts(config)
