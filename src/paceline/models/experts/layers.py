"""Find the layers of experts of a transformers model."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.models.blocks import base_model

if TYPE_CHECKING:
    from torch import nn

#: Names of the argument with the numbers of each token's experts [tokens, experts of a token].
_INDICES = ("top_k_index", "router_indices")
#: Attributes with the number of experts, those that compute nothing included.
_NUM_EXPERTS = ("total_experts", "num_experts")
#: Ends of the class names of routers whose experts do not get these numbers.
_ROUTERS = ("Router", "Gating")
#: The style of experts that get their tokens from other ranks, in the plans of transformers.
_DISPATCH_STYLE = "ep_dispatch_experts"


@dataclass(frozen=True)
class ExpertLayer:
    """The experts of a layer, or their router.

    Args:
        name: name of the module in the model without adapters.
        num_experts: number of experts.
        module: the module that is called with the experts of each token; or a router, whose last
            result are its logits [tokens, experts].
        position: position of the experts of each token among the arguments; None for a router.
        argument: name of this argument; empty for a router.
    """

    name: str
    num_experts: int
    module: nn.Module
    position: int | None
    argument: str = ""


def find_expert_layers(model: Any) -> list[ExpertLayer]:
    """Return the layers of experts of a model, in their order; empty for a model of another
    kind."""
    base = base_model(model)
    layers = [layer for layer in map(_experts, *_named(base)) if layer is not None]
    if layers:
        return layers
    return [layer for layer in map(_router, *_named(base)) if layer is not None]


def has_expert_plan(model: Any) -> bool:
    """Return whether transformers has a plan that divides the experts of a model among ranks."""
    config = getattr(base_model(model), "config", None)
    text_config = config.get_text_config() if config is not None else None
    plan = getattr(text_config, "base_model_ep_plan", None) or {}
    return _DISPATCH_STYLE in plan.values()


def num_divided_experts(model: Any) -> int:
    """Return the number whose divisors are the numbers of ranks that can divide the experts of a
    model; 0 if no number can."""
    if not has_expert_plan(model):
        return 0
    return math.gcd(*(layer.num_experts for layer in find_expert_layers(model)))


def _named(model: nn.Module) -> tuple[list[str], list[nn.Module]]:
    """Return the names and the modules of a model."""
    named = dict(model.named_modules())
    return list(named), list(named.values())


def _experts(name: str, module: nn.Module) -> ExpertLayer | None:
    number = next(
        (getattr(module, each, None) for each in _NUM_EXPERTS if hasattr(module, each)), 0
    )
    if not isinstance(number, int) or number < 1 or not _is_of_transformers(module):
        return None
    arguments = list(inspect.signature(type(module).forward).parameters)[1:]
    indices = next((each for each in _INDICES if each in arguments), None)
    if indices is None:
        return None
    name = name.replace(".base_layer", "")  # with LoRA on the weights of the experts
    return ExpertLayer(name, number, module, arguments.index(indices), indices)


def _router(name: str, module: nn.Module) -> ExpertLayer | None:
    number = getattr(module, "num_experts", None)
    is_router = type(module).__name__.endswith(_ROUTERS) and hasattr(module, "top_k")
    if not isinstance(number, int) or not is_router or not _is_of_transformers(module):
        return None
    return ExpertLayer(name, number, module, None)


def _is_of_transformers(module: nn.Module) -> bool:
    return type(module).__module__.startswith("transformers.")
