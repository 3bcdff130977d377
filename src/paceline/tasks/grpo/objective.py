"""The losses of GRPO and RLOO, computed from the log-probabilities of the tokens of completions.

Every loss is a sum over completions or tokens with a count by which the global sum is divided, so
it does not depend on ranks, micro-batches or accumulation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from paceline.config.schema.grpo import Grpo

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


@dataclass(frozen=True)
class GroupObjective:
    """Group relative policy optimization (Shao et al., "DeepSeekMath", 2024) with the variants
    Dr. GRPO (Liu et al., 2025), DAPO (Yu et al., 2025) and GSPO (Zheng et al., 2025).

    Args:
        beta: weight of the divergence from the reference model.
    """

    settings: Grpo
    beta: float

    def count(self, rows: int, tokens: float) -> float:
        """Return the term of a micro-batch in the divisor of the loss.

        Args:
            rows: number of completions.
            tokens: number of tokens with loss.
        """
        if self.settings.loss_type == "dapo":
            return tokens
        if self.settings.loss_type == "dr_grpo":
            return float(rows * self.settings.max_completion_length)
        return float(rows)

    def loss(self, tokens: CompletionTokens) -> tuple[torch.Tensor, dict[str, Metric]]:
        """Return the sum of the losses, and the metrics."""
        settings, mask = self.settings, tokens.mask
        log_ratio = tokens.logps - tokens.generated_logps
        is_by_sequence = settings.importance_sampling_level == "sequence"
        if is_by_sequence:
            mean = tokens.sum_by_row(log_ratio * mask) / tokens.lengths
            log_ratio = tokens.by_token(mean).expand_as(mask)
        advantages = tokens.by_token(tokens.advantages)
        ratio, (lowest, highest) = log_ratio.exp(), _bounds(settings)
        losses = -torch.min(ratio * advantages, ratio.clamp(lowest, highest) * advantages)
        is_clipped = ((ratio < lowest) & (advantages < 0)) | ((ratio > highest) & (advantages > 0))
        clipped = tokens.mean(is_clipped.to(mask.dtype))
        if is_by_sequence:  # one ratio for each completion
            of_rows = tokens.sum_by_row(is_clipped * mask) / tokens.lengths
            clipped = of_rows.sum(), torch.ones_like(of_rows).sum()
        metrics = {**_common_metrics(tokens), "clip_ratio": clipped}
        if self.beta and tokens.reference_logps is not None:
            difference = tokens.reference_logps - tokens.logps
            # Schulman's estimator k3; the ratio makes its gradient the unbiased one of the reverse
            # divergence (DeepSeek-AI, "DeepSeek-V3.2", 2025, section 3.1).
            divergence = (difference.exp() - difference - 1) * ratio
            losses = losses + self.beta * divergence
            metrics["kl"] = tokens.mean(divergence)
        if settings.loss_type == "grpo":
            return (tokens.sum_by_row(losses * mask) / tokens.lengths).sum(), metrics
        return (losses * mask).sum(), metrics


@dataclass(frozen=True)
class LeaveOneOutObjective:
    """REINFORCE leave-one-out (Ahmadian et al., "Back to Basics", 2024), with clipped ratios of the
    probabilities of whole completions. The divergence from the reference model is part of the
    rewards."""

    settings: Grpo

    def count(self, rows: int, tokens: float) -> float:
        """As in :meth:`GroupObjective.count`."""
        return float(rows)

    def loss(self, tokens: CompletionTokens) -> tuple[torch.Tensor, dict[str, Metric]]:
        """As in :meth:`GroupObjective.loss`."""
        mask, advantages = tokens.mask, tokens.advantages
        ratio = tokens.sum_by_row((tokens.logps - tokens.generated_logps) * mask).exp()
        lowest, highest = _bounds(self.settings)
        losses = -torch.min(ratio * advantages, ratio.clamp(lowest, highest) * advantages)
        is_clipped = ((ratio < lowest) & (advantages < 0)) | ((ratio > highest) & (advantages > 0))
        metrics = _common_metrics(tokens)
        metrics["clip_ratio"] = is_clipped.to(mask.dtype).sum(), torch.ones_like(ratio).sum()
        if tokens.reference_logps is not None:
            metrics["kl"] = tokens.mean(tokens.generated_logps - tokens.reference_logps)
        return losses.sum(), metrics


Objective = GroupObjective | LeaveOneOutObjective


def _bounds(settings: Grpo) -> tuple[float, float]:
    """Return the range within which ratios are not clipped."""
    above = settings.epsilon if settings.epsilon_high is None else settings.epsilon_high
    return 1 - settings.epsilon, 1 + above


def _common_metrics(tokens: CompletionTokens) -> dict[str, Metric]:
    difference = (tokens.generated_logps - tokens.sampled_logps).abs()
    return {"entropy": tokens.mean(tokens.entropies), "logprob_diff": tokens.mean(difference)}
