"""Compute the cross entropy of the logits of a chunk of tokens, and its gradient in their place.

On a CPU, 16-bit logits are converted to float32 a few rows at a time, so that they stay in its
cache. On accelerators, the kernels read and write device memory in any case, and each has a fixed
cost: there the whole chunk is converted at once, and what needs one number per token is computed
for all chunks together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from paceline.models.shape.loss_memory import FLOAT_LOGITS_BYTES

#: Target of a token without loss.
IGNORED = -100


def weighted_sum(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum of a vector in float32. Autocast would compute a product of two
    vectors in low precision."""
    return (values * weights).sum()


@dataclass(frozen=True)
class LogitTransform:
    """What a model does to the head's output: ``cap · tanh(scale · x / cap)``, or ``scale · x``
    without a cap."""

    scale: float = 1.0
    cap: float | None = None

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the function of ``logits``; the argument itself if it is the identity."""
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)

    def apply_(self, logits: torch.Tensor) -> torch.Tensor:
        """Replace ``logits`` by the function of them, and return them."""
        if self.scale != 1.0:
            logits.mul_(self.scale)
        return logits if self.cap is None else logits.div_(self.cap).tanh_().mul_(self.cap)

    def slope(self, transformed: torch.Tensor) -> torch.Tensor | None:
        """Return the derivative at the given results without its factor ``scale``, or None if it is
        1 everywhere."""
        if self.cap is None:
            return None
        return (transformed / self.cap).square_().neg_().add_(1)


class LossOfTokens(Protocol):
    """What is computed from the logits
    (:class:`~paceline.models.head.chunked_loss.ChunkedLoss`)."""

    transform: LogitTransform
    targets: torch.Tensor
    label_smoothing: float
    counts_correct: bool
    token_weights: torch.Tensor | None
    token_entropies: torch.Tensor | None
    num_correct: torch.Tensor | int

    def record(self, rows: slice, losses: torch.Tensor) -> torch.Tensor:
        """Return the sum of the losses of the tokens in ``rows``, times their weights."""


class LogitLosses(ABC):
    """The losses of the tokens of a micro-batch, which receives the logits chunk by chunk."""

    def __init__(self, loss: LossOfTokens) -> None:
        self.loss, self.ids = loss, loss.targets.reshape(-1)
        self.is_ignored = self.ids == IGNORED

    def gradient_factors(self, scale: torch.Tensor | None) -> torch.Tensor:
        """Return the factors of the gradients with respect to the head's output, 0 without loss,
        float32 [tokens, 1].

        Args:
            scale: factor of the gradients, or one for each token [tokens], or None.
        """
        factors = self.is_ignored.logical_not() * self.loss.transform.scale
        for each in (scale, self.loss.token_weights):
            if each is not None:
                factors = factors * each
        return factors.float().unsqueeze(1)

    @abstractmethod
    def add(self, rows: slice, output: torch.Tensor) -> None:
        """Compute the losses of a chunk, without gradients.

        Args:
            rows: the tokens of the chunk.
            output: output of the head [tokens, vocabulary]. It may be changed.
        """

    @abstractmethod
    def differentiate_(
        self, rows: slice, output: torch.Tensor, row_sum: torch.Tensor | None = None
    ) -> None:
        """Compute the losses of a chunk, and replace the output of the head by their gradient.

        Args:
            rows: the tokens of the chunk.
            output: output of the head [tokens, vocabulary].
            row_sum: the sum over the tokens of the gradient in float32 is added to it
                [vocabulary].
        """

    @abstractmethod
    def total(self) -> torch.Tensor:
        """Return the sum of the losses of all chunks. Call it once, at the end."""


class CachedLogitLosses(LogitLosses):
    """On a CPU: a few rows of 16-bit logits are in float32 at a time.

    Args:
        scale: factor of the gradients, or one for each token [tokens], or None.
    """

    def __init__(self, loss: LossOfTokens, scale: torch.Tensor | None = None) -> None:
        super().__init__(loss)
        self._scale = scale
        self._total = torch.zeros((), dtype=torch.float32, device=self.ids.device)

    def add(self, rows: slice, output: torch.Tensor) -> None:
        ids, weights = self._targets_of(rows)
        losses = output.new_empty(len(output), dtype=torch.float32)
        for part, logits in self._float_logits(output):
            if self.loss.counts_correct:
                is_correct = logits.argmax(1) == ids[part]
                self.loss.num_correct += (
                    is_correct.sum() if weights is None else weighted_sum(is_correct, weights[part])
                )
            losses[part] = _softmax_(logits, ids[part], self.loss.label_smoothing)
            if self.loss.token_entropies is not None:
                self.loss.token_entropies[rows][part] = _entropies_of(logits)
        self._total += self.loss.record(rows, losses)

    def differentiate_(
        self, rows: slice, output: torch.Tensor, row_sum: torch.Tensor | None = None
    ) -> None:
        ids, weights = self._targets_of(rows)
        scale = _rows_of(self._scale, rows)
        losses = output.new_empty(len(output), dtype=torch.float32)
        # Changes of the logits in float32 change the output, unless a function returns others.
        is_in_place = output.dtype == torch.float32 and self.loss.transform == LogitTransform()
        # A sum over a part of the rows would be rounded differently.
        max_bytes = FLOAT_LOGITS_BYTES if row_sum is None else 4 * output.numel()
        for part, logits in self._float_logits(output, max_bytes):
            losses[part] = self._gradient_(
                logits, ids[part], _rows_of(weights, part), _rows_of(scale, part)
            )
            if row_sum is not None:
                row_sum += logits.sum(0)
            if not is_in_place:
                output[part] = logits
        self._total += self.loss.record(rows, losses)

    def total(self) -> torch.Tensor:
        return self._total

    def _targets_of(self, rows: slice) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.ids[rows], _rows_of(self.loss.token_weights, rows)

    def _float_logits(
        self, output: torch.Tensor, max_bytes: int = FLOAT_LOGITS_BYTES
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield rows of a chunk and their transformed logits in float32, which may be changed in
        place. At most ``max_bytes`` of them are converted at a time."""
        count = len(output)
        if output.dtype != torch.float32:
            count = max(1, max_bytes // (4 * output.shape[1]))
        for begin in range(0, len(output), count):
            part = slice(begin, begin + count)
            yield part, self.loss.transform.apply(output[part].to(torch.float32))

    def _gradient_(
        self,
        logits: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor | None,
        scale: torch.Tensor | None,
    ) -> torch.Tensor:
        """Replace logits by the gradient with respect to the head's output; return the losses."""
        transform = self.loss.transform
        slope = transform.slope(logits)
        smoothing = self.loss.label_smoothing
        losses = _softmax_(logits, ids, smoothing)
        has_loss = (ids != IGNORED).unsqueeze(1)
        picked = ids.clamp(min=0).unsqueeze(1)
        logits.scatter_add_(1, picked, logits.new_full(picked.shape, smoothing - 1.0))
        if smoothing:
            logits.sub_(smoothing / logits.shape[1])
        factor = transform.scale if scale is None else scale * transform.scale
        if isinstance(factor, torch.Tensor) and factor.dim():
            factor = factor.unsqueeze(1)
        if weights is not None:
            factor = factor * weights.unsqueeze(1)
        logits.mul_(has_loss * factor)
        if slope is not None:
            logits.mul_(slope)
        return losses


class DeviceLogitLosses(LogitLosses):
    """On accelerators: few kernels per chunk. No kernel computes one number per token only, except
    where it writes to these vectors [tokens, 1] of all chunks.

    Args:
        scale: factor of the gradients, or one for each token [tokens], or None.
    """

    def __init__(self, loss: LossOfTokens, scale: torch.Tensor | None = None) -> None:
        super().__init__(loss)
        self._picked_ids = self.ids.clamp(min=0).unsqueeze(1)
        self._predicted = torch.empty_like(self._picked_ids) if loss.counts_correct else None
        self._highest, self._picked, self._sums, self._means = torch.empty(
            (4, len(self.ids), 1), dtype=torch.float32, device=self.ids.device
        )
        self._factors = self.gradient_factors(scale)
        self._at_targets = self._factors * (loss.label_smoothing - 1.0)

    def add(self, rows: slice, output: torch.Tensor) -> None:
        logits = self._read(rows, output)
        if self._predicted is not None:
            torch.argmax(logits, 1, keepdim=True, out=self._predicted[rows])
        self._exponentiate_(rows, logits)
        if self.loss.token_entropies is not None:
            self.loss.token_entropies[rows] = _entropies_of(logits.div_(self._sums[rows]))

    def differentiate_(
        self, rows: slice, output: torch.Tensor, row_sum: torch.Tensor | None = None
    ) -> None:
        logits = self._read(rows, output)
        slope = self.loss.transform.slope(logits)
        self._exponentiate_(rows, logits)
        factors, smoothing = self._factors[rows], self.loss.label_smoothing
        logits.mul_(factors / self._sums[rows])
        if smoothing:
            logits.sub_(factors * (smoothing / logits.shape[1]))
        logits.scatter_add_(1, self._picked_ids[rows], self._at_targets[rows])
        if slope is not None:
            logits.mul_(slope)
        if row_sum is not None:
            row_sum += logits.sum(0)
        if logits.dtype != output.dtype:
            output.copy_(logits)

    def _read(self, rows: slice, output: torch.Tensor) -> torch.Tensor:
        """Return the transformed logits in float32, and record what the losses need of them."""
        logits = self.loss.transform.apply_(output.to(torch.float32))
        torch.amax(logits, 1, keepdim=True, out=self._highest[rows])
        torch.gather(logits, 1, self._picked_ids[rows], out=self._picked[rows])
        if self.loss.label_smoothing:
            torch.mean(logits, 1, keepdim=True, out=self._means[rows])
        return logits

    def _exponentiate_(self, rows: slice, logits: torch.Tensor) -> None:
        """Replace logits by probabilities times their sum, which is recorded."""
        exponentials = logits.sub_(self._highest[rows]).exp_()
        torch.sum(exponentials, 1, keepdim=True, out=self._sums[rows])

    def total(self) -> torch.Tensor:
        smoothing, picked = self.loss.label_smoothing, self._picked
        if smoothing:
            picked = (1 - smoothing) * picked + smoothing * self._means
        losses = (self._sums.log() + self._highest - picked).squeeze(1)
        if self._predicted is not None:
            is_correct, weights = self._predicted.squeeze(1) == self.ids, self.loss.token_weights
            self.loss.num_correct = (
                is_correct.sum() if weights is None else weighted_sum(is_correct, weights)
            )
        return self.loss.record(slice(None), losses.masked_fill(self.is_ignored, 0.0))


def _rows_of(values: torch.Tensor | None, rows: slice) -> torch.Tensor | None:
    """Return the factors of some tokens, if each token has one."""
    return values if values is None or values.dim() == 0 else values[rows]


def _entropies_of(probabilities: torch.Tensor) -> torch.Tensor:
    """Return the entropy of each row in nats, [tokens]."""
    entropies: torch.Tensor = torch.special.entr(probabilities).sum(1)
    return entropies


def _softmax_(logits: torch.Tensor, targets: torch.Tensor, smoothing: float) -> torch.Tensor:
    """Replace logits [tokens, vocabulary] by probabilities; return the losses [tokens].

    Args:
        smoothing: share of each target that is spread evenly over the vocabulary.
    """
    highest = logits.amax(1, keepdim=True)
    picked = logits.gather(1, targets.clamp(min=0).unsqueeze(1))
    if smoothing:
        picked = (1 - smoothing) * picked + smoothing * logits.mean(1, keepdim=True)
    sums = logits.sub_(highest).exp_().sum(1, keepdim=True)
    losses = sums.log() + highest - picked
    logits.div_(sums)
    return losses.squeeze(1).masked_fill(targets == IGNORED, 0.0)
