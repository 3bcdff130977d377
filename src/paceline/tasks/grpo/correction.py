"""The correction for an engine that draws tokens with other probabilities than training computes:
truncated importance sampling (Yao et al., "Your Efficient RL Framework Secretly Brings You
Off-Policy RL Training", 2025), with the variants of TRL."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.config.schema.grpo import CorrectionMode, Grpo
from paceline.tasks.grpo.tokens import CompletionTokens, Metric


@dataclass(frozen=True)
class ProbabilityCorrection:
    """Multiplies losses by the ratio of the probabilities in training to those with which the
    tokens were drawn.

    Args:
        lowest, highest: limits of the ratio; None for none.
    """

    mode: CorrectionMode
    lowest: float | None
    highest: float | None

    @classmethod
    def of(cls, settings: Grpo, task: str) -> ProbabilityCorrection | None:
        """Return the correction that a config asks for, or None."""
        if not settings.corrects_probabilities:
            return None
        return cls(
            settings.correction_mode(task),
            settings.importance_sampling_clip_min,
            settings.importance_sampling_clip_max,
        )

    @property
    def is_by_sequence(self) -> bool:
        """Whether there is one ratio for each completion, not for each token."""
        return self.mode.startswith("sequence")

    def ratios(self, tokens: CompletionTokens) -> tuple[torch.Tensor, dict[str, Metric]]:
        """Return the ratios and their metrics: the ratio of each completion [rows], or of each
        token in the shape of the targets."""
        assert tokens.old_logps is not None, "the task asks for `old_logps`"
        difference = (tokens.old_logps - tokens.sampled_logps) * tokens.mask
        # An engine gives no number for a token whose probability it does not know.
        difference = torch.nan_to_num(difference, nan=0.0)
        if self.is_by_sequence:
            difference = tokens.sum_by_row(difference)
        ratios = difference.exp()
        is_outside = torch.zeros_like(ratios, dtype=torch.bool)
        if self.lowest is not None:
            is_outside |= ratios < self.lowest
        if self.highest is not None:
            is_outside |= ratios > self.highest
        if self.mode.endswith("mask"):
            ratios = ratios.masked_fill(is_outside, 0.0)
        elif self.lowest is not None or self.highest is not None:
            ratios = ratios.clamp(self.lowest, self.highest)
        return ratios, {
            "importance_ratio": self._mean(ratios, tokens),
            "importance_clipped": self._mean(is_outside.to(ratios.dtype), tokens),
        }

    def _mean(self, values: torch.Tensor, tokens: CompletionTokens) -> Metric:
        if self.is_by_sequence:
            return values.sum(), torch.ones_like(values).sum()
        return tokens.mean(values)
