"""The losses of GRPO and RLOO, computed from the log-probabilities of the tokens of completions.

Every loss is a sum over completions or tokens with a count by which the global sum is divided, so
it does not depend on ranks, micro-batches or accumulation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.config.schema.grpo import Grpo
from paceline.tasks.grpo.correction import ProbabilityCorrection
from paceline.tasks.grpo.tokens import CompletionTokens, Metric


@dataclass(frozen=True)
class GroupObjective:
    """Group relative policy optimization (Shao et al., "DeepSeekMath", 2024) with the variants
    Dr. GRPO (Liu et al., 2025), DAPO (Yu et al., 2025) and GSPO (Zheng et al., 2025).

    Args:
        beta: weight of the divergence from the reference model.
        correction: correction for the engine that has drawn the tokens, or None.
    """

    settings: Grpo
    beta: float
    correction: ProbabilityCorrection | None = None

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
        if self.correction is not None:
            factors, of_factors = self.correction.ratios(tokens)
            is_of_row = self.correction.is_by_sequence
            losses = losses * (tokens.by_token(factors) if is_of_row else factors)
            metrics |= of_factors
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
    rewards.

    Args:
        correction: correction for the engine that has drawn the tokens, by completions; or None.
    """

    settings: Grpo
    correction: ProbabilityCorrection | None = None

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
        if self.correction is not None:
            factors, of_factors = self.correction.ratios(tokens)
            losses = losses * factors
            metrics |= of_factors
        return losses.sum(), metrics


Objective = GroupObjective | LeaveOneOutObjective


def _bounds(settings: Grpo) -> tuple[float, float]:
    """Return the range within which ratios are not clipped."""
    above = settings.epsilon if settings.epsilon_high is None else settings.epsilon_high
    return 1 - settings.epsilon, 1 + above


def _common_metrics(tokens: CompletionTokens) -> dict[str, Metric]:
    difference = (tokens.generated_logps - tokens.sampled_logps).abs()
    # An engine gives no number for a token whose probability it does not know.
    is_known = tokens.mask * difference.isfinite()
    sums = (difference.nan_to_num(0.0, 0.0) * is_known).sum(), is_known.sum()
    return {"entropy": tokens.mean(tokens.entropies), "logprob_diff": sums}
