"""Draw tokens from the logits of a model.

The random numbers are a function of the run's seed, the step, the prompt, the number of the
completion, and the position. They do not depend on the rank that draws them, nor on the completions
that are drawn beside them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from paceline.distributed.seeds import derive_seed


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Args:
        temperature: divisor of the logits.
        top_k: number of the most probable tokens that can be drawn; 0 for all.
        top_p: probability of the most probable tokens that can be drawn; 1 for all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def draw(
        self, logits: torch.Tensor, uniforms: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw a token from each row of logits by inversion of the cumulative distribution.

        Args:
            logits: [rows, vocabulary].
            uniforms: a number in [0, 1) for each row, float64 [rows].

        Returns:
            The tokens, int64 [rows], and their log-probabilities at this temperature, float32
            [rows]. ``top_k`` and ``top_p`` do not change the log-probabilities: the loss computes
            them from all tokens too.
        """
        scores = logits.float() / self.temperature
        logps = scores.log_softmax(-1)
        allowed = self._restrict(logps)
        # A sum of 100,000 probabilities in float32 would be too coarse for the last of them.
        wide = torch.float32 if logits.device.type == "mps" else torch.float64
        cumulative = allowed.exp().to(wide).cumsum(-1)
        thresholds = uniforms.to(cumulative).unsqueeze(1) * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, thresholds, right=True)
        # Rounding may place a threshold at the very end, after the last token that has a chance.
        last = (allowed > -torch.inf).long().cumsum(-1).argmax(-1, keepdim=True)
        tokens = torch.minimum(tokens, last)
        return tokens.squeeze(1), logps.gather(1, tokens).squeeze(1)

    def _restrict(self, logps: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities, -inf for tokens that cannot be drawn."""
        if 0 < self.top_k < logps.shape[1]:
            lowest = logps.topk(self.top_k, dim=-1).values[:, -1:]
            logps = logps.masked_fill(logps < lowest, -torch.inf)
        if self.top_p < 1.0:
            ordered, order = logps.sort(dim=-1, descending=True, stable=True)
            probabilities = ordered.softmax(-1)
            # The token that exceeds the limit is the last one that can be drawn.
            is_out = probabilities.cumsum(-1) - probabilities >= self.top_p
            is_out = torch.zeros_like(is_out).scatter(1, order, is_out)
            logps = logps.masked_fill(is_out, -torch.inf)
        return logps


def draw_uniforms(
    seed: int, purpose: str, step: int, prompt: int, num_completions: int, length: int
) -> torch.Tensor:
    """Return a number in [0, 1) for each token of the completions of a prompt.

    Args:
        purpose: what the completions are for, such as ``rollout``.
        prompt: index of the prompt in the dataset.
        length: largest number of tokens of a completion.

    Returns:
        float64 [num_completions, length], on the CPU.
    """
    rows = [
        np.random.Generator(
            np.random.Philox(derive_seed(seed, purpose, step, prompt, index))
        ).random(length)
        for index in range(num_completions)
    ]
    return torch.from_numpy(np.stack(rows))
