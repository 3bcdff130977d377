"""Find out whether the token embedding and the output head of a language model can be split by the
rows of the vocabulary.

After Shoeybi et al., "Megatron-LM" (2019), section 3. Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.models.tensor_plan.style import EMBEDDING, HEAD

if TYPE_CHECKING:
    from torch import nn

#: Ending of the names of the classes of transformers that multiply embeddings by a number.
_SCALED = "ScaledWordEmbedding"


@dataclass(frozen=True)
class VocabularyLayer:
    """The embedding or the head of a model.

    Args:
        name: dotted name of the module.
        style: style of its split.
        reason: why every rank holds it in full, or None if it is split.
    """

    name: str
    style: str
    reason: str | None


def vocabulary_plan(model: nn.Module, planned: Collection[str] = ()) -> dict[str, str]:
    """Return {dotted name: style} of the embedding and the head, if they are split.

    Args:
        planned: modules that another plan splits.
    """
    layers = vocabulary_layers(model, planned)
    return {layer.name: layer.style for layer in layers if layer.reason is None}


def vocabulary_layers(model: nn.Module, planned: Collection[str] = ()) -> list[VocabularyLayer]:
    """Return the embedding and the head of a language model. If they share a weight, both are
    split or none. Layers in ``planned`` are left out."""
    embedding, head = _ends(model)
    names = {id(module): name for name, module in model.named_modules()}
    pairs = [(embedding, EMBEDDING), (head, HEAD)]
    layers = [
        (names[id(module)], style, _reason(model, module, style, (embedding, head)))
        for module, style in pairs
        if id(module) in names and names[id(module)] not in planned
    ]
    if _weight(embedding) is not None and _weight(embedding) is _weight(head):
        reason = next((reason for *_, reason in layers if reason is not None), None)
        if len(layers) < 2:
            reason = "it shares its weight with a layer that `parallel.tensor_plan` names"
        layers = [(name, style, reason) for name, style, _ in layers]
    return [VocabularyLayer(*layer) for layer in layers]


def _ends(model: nn.Module) -> tuple[Any, Any]:
    """Return the embedding and the head; None for each if there is none, or if other code than
    their forward pass may use their weights."""
    from paceline.models.blocks import base_model

    base = base_model(model)
    ends = []
    for method in ("get_input_embeddings", "get_output_embeddings"):
        try:
            ends.append(getattr(base, method)())
        except (AttributeError, NotImplementedError):  # the method of a model without this layer
            ends.append(None)
    can_generate = getattr(base, "can_generate", None)
    if ends[1] is None and callable(can_generate) and can_generate():
        return None, None  # the head may be computed with the weight of the embedding
    return ends[0], ends[1]


def _weight(module: Any) -> Any:
    return getattr(module, "weight", None)


def _reason(model: nn.Module, module: Any, style: str, ends: tuple[Any, Any]) -> str | None:
    """Return why a layer cannot be split, or None if it can."""
    from torch import nn

    if any("lora_" in name or "modules_to_save" in name for name, _ in module.named_modules()):
        return "it has an adapter, or is trained in full beside one"
    if style == EMBEDDING:
        if not _is_lookup(module):
            return f"it is a {type(module).__name__}, not a plain nn.Embedding"
    elif not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
        return f"it is a {type(module).__name__}, not a plain nn.Linear"
    if not module.weight.is_floating_point():
        return "its weight is quantized"
    users = [
        other
        for other in model.modules()
        if other is not ends[0]
        and other is not ends[1]
        and any(weight is module.weight for weight in other.parameters(recurse=False))
    ]
    return f"a {type(users[0]).__name__} uses its weight too" if users else None


def _is_lookup(module: Any) -> bool:
    """Return whether a module returns rows of its weight, up to a factor."""
    from torch import nn

    return (
        isinstance(module, nn.Embedding)
        and (
            type(module).forward is nn.Embedding.forward or type(module).__name__.endswith(_SCALED)
        )
        and module.max_norm is None
        and not module.scale_grad_by_freq
        and not module.sparse
    )
