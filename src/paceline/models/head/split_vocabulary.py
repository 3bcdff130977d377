"""Compute the cross entropy of logits whose vocabulary is divided among ranks.

Each rank computes the logits of its rows of the vocabulary. Of each token, the maximum, the sum of
the exponentials and the target's logit are reduced over the ranks (Shoeybi et al., "Megatron-LM",
2019, section 3), so that no rank has all logits. All ranks issue the same collectives in the same
order, because they have the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from paceline.models.head.softmax import LogitLosses, LossOfTokens, weighted_sum

_ATTRIBUTE = "paceline_vocabulary"  # of a head


class VocabularyGroup(Protocol):
    """The ranks that divide a vocabulary."""

    def all_reduce(
        self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> Any:
        """Start an in-place all-reduce."""

    def wait(self, work: Any) -> None:
        """Wait for a collective."""


@dataclass(frozen=True)
class SplitVocabulary:
    """The part of the vocabulary that a head computes on this rank.

    Args:
        group: ranks that have the other parts.
        start, length: range of token IDs.
        size: number of token IDs of all ranks.
        forward: function that computes this rank's part of the logits.
    """

    group: VocabularyGroup
    start: int
    length: int
    size: int
    forward: Callable[[torch.Tensor], torch.Tensor]

    def reduce_(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        """Reduce a tensor over the ranks in place, and return it."""
        self.group.wait(self.group.all_reduce(tensor, op))
        return tensor

    def sum_gradient_(self, gradient: torch.Tensor, dtype: torch.dtype) -> None:
        """Sum the gradient of the head's input over the ranks, in place.

        Args:
            dtype: dtype in which it is sent.
        """
        if gradient.numel():
            gradient.copy_(self.reduce_(gradient.to(dtype), dist.ReduceOp.SUM))


def mark_split(head: nn.Module, vocabulary: SplitVocabulary) -> None:
    """Record that a head has a part of the vocabulary."""
    setattr(head, _ATTRIBUTE, vocabulary)


def split_vocabulary(head: Any) -> SplitVocabulary | None:
    """Return the part of the vocabulary that a head has; None if it has all of it."""
    return getattr(head, _ATTRIBUTE, None)


class SplitLogitLosses(LogitLosses):
    """Losses from this rank's part of the logits, in float32. The losses of all tokens are equal on
    all ranks.

    Args:
        scale: factor of the gradients, or one for each token [tokens], or None.
    """

    def __init__(
        self, loss: LossOfTokens, vocabulary: SplitVocabulary, scale: torch.Tensor | None = None
    ) -> None:
        super().__init__(loss)
        self.vocabulary = vocabulary
        local = self.ids - vocabulary.start
        self._is_local = ((local >= 0) & (local < vocabulary.length)).unsqueeze(1)
        self._picked_ids = local.clamp(0, vocabulary.length - 1).unsqueeze(1)
        self._losses = torch.zeros(len(self.ids), dtype=torch.float32, device=self.ids.device)
        self._is_correct = torch.zeros_like(self.ids, dtype=torch.bool)
        self._factors = self.gradient_factors(scale)
        self._at_targets = self._factors * (loss.label_smoothing - 1.0) * self._is_local

    def add(self, rows: slice, output: torch.Tensor) -> None:
        logits = self.loss.transform.apply_(output.to(torch.float32))
        best = logits.argmax(1, keepdim=True) if self.loss.counts_correct else None
        at_best = None if best is None else logits.gather(1, best)
        _, highest = self._exponentiate_(rows, logits)
        if best is not None and at_best is not None:
            # Of equal logits, the first token ID counts, as in torch.argmax.
            beyond = self.vocabulary.size
            first = (best + self.vocabulary.start).masked_fill(at_best != highest, beyond)
            self.vocabulary.reduce_(first, dist.ReduceOp.MIN)
            self._is_correct[rows] = first.squeeze(1) == self.ids[rows]

    def differentiate_(
        self, rows: slice, output: torch.Tensor, row_sum: torch.Tensor | None = None
    ) -> None:
        logits = self.loss.transform.apply_(output.to(torch.float32))
        slope = self.loss.transform.slope(logits)
        sums, _ = self._exponentiate_(rows, logits)
        factors, smoothing = self._factors[rows], self.loss.label_smoothing
        logits.mul_(factors / sums)
        if smoothing:
            logits.sub_(factors * (smoothing / self.vocabulary.size))
        logits.scatter_add_(1, self._picked_ids[rows], self._at_targets[rows])
        if slope is not None:
            logits.mul_(slope)
        if row_sum is not None:
            row_sum += logits.sum(0)
        if logits.dtype != output.dtype:
            output.copy_(logits)

    def _exponentiate_(
        self, rows: slice, logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Replace logits by probabilities times their sum over the whole vocabulary, and record
        the losses.

        Returns:
            The sums and the highest logits, each [tokens, 1].
        """
        smoothing = self.loss.label_smoothing
        highest = self.vocabulary.reduce_(logits.amax(1, keepdim=True), dist.ReduceOp.MAX)
        picked = logits.gather(1, self._picked_ids[rows])
        parts = [picked.masked_fill(self._is_local[rows].logical_not(), 0.0)]
        if smoothing:
            parts.append(logits.sum(1, keepdim=True))
        parts.append(logits.sub_(highest).exp_().sum(1, keepdim=True))
        picked, *of_all, sums = self.vocabulary.reduce_(torch.stack(parts), dist.ReduceOp.SUM)
        if smoothing:
            mean = of_all[0] / self.vocabulary.size
            picked = (1 - smoothing) * picked + smoothing * mean
        self._losses[rows] = (sums.log() + highest - picked).squeeze(1)
        return sums, highest

    def total(self) -> torch.Tensor:
        if self.loss.counts_correct:
            weights = self.loss.token_weights
            self.loss.num_correct = (
                self._is_correct.sum()
                if weights is None
                else weighted_sum(self._is_correct, weights)
            )
        return self.loss.record(slice(None), self._losses.masked_fill(self.is_ignored, 0.0))
