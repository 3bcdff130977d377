"""Merge the adapters of a run into the weights of its base model."""

from typing import Any

from torch import nn

from paceline.models.adapters.targets import adapter_layers


def merge_adapters(adapted: Any) -> Any:
    """Return the base model with its adapters merged into its weights.

    An embedding and a head that share a weight no longer do if the adapters change only one of
    them, and the config of the model says so: otherwise the other would change with it.
    """
    untie_adapted(adapted)
    model = adapted.merge_and_unload()
    embeddings, head = model.get_input_embeddings(), _head(model)
    if head is not None and head.weight is not embeddings.weight:
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = False
    return model


def untie_adapted(adapted: nn.Module) -> None:
    """Give each layer with an adapter a weight of its own."""
    uses: dict[int, int] = {}
    for _, parameter in adapted.named_parameters(remove_duplicate=False):
        uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    for _, layer in adapter_layers(adapted):
        base = layer.get_base_layer()
        weight = getattr(base, "weight", None)
        if isinstance(weight, nn.Parameter) and uses.get(id(weight), 0) > 1:
            uses[id(weight)] -= 1
            base.weight = nn.Parameter(weight.detach().clone(), weight.requires_grad)


def _head(model: Any) -> Any:
    return model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
