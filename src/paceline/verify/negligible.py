"""Which weights `paceline verify` leaves out of its comparison: those whose gradient is nothing but
rounding.

A bias that is added to all keys alike shifts every attention score of a query by the same amount,
so its gradient is 0 (under rotary embedding, that of the dimensions without it). In floating point
it is not exactly 0, and AdamW divides it by its own size: rounding errors, which differ between
strategies, become steps as large as any other.
"""

import math
from typing import Any

import torch

from paceline.parallel.base import Strategy

#: Largest share of the largest tensor's gradient norm that counts as rounding.
GRADIENT_RATIO = 1e-6
#: Largest share of the trained elements that may be left out.
LARGEST_SHARE = 0.01


class GradientWatch:
    """Follows the gradients of a strategy that has them whole on one rank, step by step."""

    def __init__(self, strategy: Strategy) -> None:
        self._parameters = {
            part.name: part.key for part in strategy.tensor_shards() if part.key is not None
        }
        self._tensors: dict[str, float] = {}  # largest ratio of each tensor so far
        # the same for each element of a tensor with one dimension
        self._elements: dict[str, torch.Tensor] = {}
        self._clip = strategy.clip_grad_norm
        strategy.clip_grad_norm = self._noting_clip  # type: ignore[method-assign]

    def _noting_clip(self, max_norm: float) -> torch.Tensor:
        self._note()
        return self._clip(max_norm)

    @torch.no_grad()
    def _note(self) -> None:
        gradients = {
            name: one.grad.float() for name, one in self._parameters.items() if one.grad is not None
        }
        norms = {name: float(one.norm()) for name, one in gradients.items()}
        largest = max(norms.values(), default=0.0)
        if not math.isfinite(largest) or largest == 0:
            return  # an update that is skipped
        for name, norm in norms.items():
            self._tensors[name] = max(self._tensors.get(name, 0.0), norm / largest)
            if gradients[name].dim() == 1:
                ratios = gradients[name].abs() / largest
                before = self._elements.get(name)
                self._elements[name] = ratios if before is None else torch.maximum(before, ratios)

    def negligible(self) -> dict[str, tuple[float, torch.Tensor]]:
        """Name of a parameter → (the largest ratio of what is left out of it, a mask that is true
        there), the smallest first.

        Left out are tensors whose gradient norm stayed below :data:`GRADIENT_RATIO` times the
        largest tensor's in every step, and of tensors with one dimension also single elements:
        those of which a whole tensor would have stayed below it.
        """
        found: dict[str, tuple[float, torch.Tensor]] = {}
        for name, ratio in self._tensors.items():
            parameter = self._parameters[name]
            if 0 < ratio < GRADIENT_RATIO:
                found[name] = ratio, torch.ones(parameter.shape, dtype=torch.bool)
            elif name in self._elements and ratio:
                elements = self._elements[name].cpu()
                mask = elements < GRADIENT_RATIO / math.sqrt(elements.numel())
                # exact zeros alone are zeros under every strategy
                if bool((elements[mask] > 0).any()):
                    found[name] = float(elements[mask].norm()), mask
        most = LARGEST_SHARE * sum(one.numel() for one in self._parameters.values())
        kept, total = {}, 0
        for name, (ratio, mask) in sorted(found.items(), key=lambda entry: entry[1][0]):
            total += int(mask.sum())
            if total > most:
                break
            kept[name] = ratio, mask
        return kept


def listing(negligible: dict[str, tuple[float, torch.Tensor]]) -> list[dict[str, Any]]:
    """For the certificate: ``{name, gradient_ratio, elements, of}``."""
    return [
        {"name": name, "gradient_ratio": ratio, "elements": int(mask.sum()), "of": mask.numel()}
        for name, (ratio, mask) in negligible.items()
    ]
