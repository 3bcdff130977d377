"""The values of the tokens of completions from which losses are computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

#: Sum of the values of a metric, and the number of values.
Metric = tuple[torch.Tensor, torch.Tensor]


class SumByRow(Protocol):
    """Sums the values of tokens, in the shape of the targets, for each completion [rows]."""

    def __call__(self, values: torch.Tensor) -> torch.Tensor: ...


class ByToken(Protocol):
    """Repeats the value of each completion [rows] for its tokens, such that it can be multiplied by
    values in the shape of the targets."""

    def __call__(self, values: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class CompletionTokens:
    """The values of the tokens of completions. Tensors without a comment have the shape of the
    targets.

    Args:
        logps: log-probabilities with the current weights, with gradient.
        entropies: entropies of the distributions.
        mask: 1 for the tokens with loss, else 0.
        advantages: advantage of each completion [rows].
        old_logps: log-probabilities with the weights that generated the completions; None if these
            are the current weights.
        sampled_logps: log-probabilities when the tokens were drawn.
        reference_logps: log-probabilities with the reference model, or None.
        sum_by_row: sums values by completion.
        by_token: repeats values of completions for their tokens.
    """

    logps: torch.Tensor
    entropies: torch.Tensor
    mask: torch.Tensor
    advantages: torch.Tensor
    old_logps: torch.Tensor | None
    sampled_logps: torch.Tensor
    reference_logps: torch.Tensor | None
    sum_by_row: SumByRow
    by_token: ByToken

    @property
    def generated_logps(self) -> torch.Tensor:
        """The log-probabilities with the weights that generated the completions."""
        return self.logps.detach() if self.old_logps is None else self.old_logps

    @property
    def lengths(self) -> torch.Tensor:
        """The number of tokens with loss of each completion [rows], at least 1."""
        return self.sum_by_row(self.mask).clamp(min=1.0)

    def mean(self, values: torch.Tensor) -> Metric:
        """Return the terms of the mean over the tokens with loss."""
        return (values * self.mask).sum(), self.mask.sum()
