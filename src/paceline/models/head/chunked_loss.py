"""Compute the cross entropy of a language model's head for a few tokens at a time.

The logits of all tokens of a micro-batch, in float32, are often the largest tensor of a step:
for 4,096 tokens and a vocabulary of 150,000 it has 2.5 GB, and the loss needs three copies of it.
Here the logits of a chunk of tokens exist until their part of the loss and its gradients are
computed, as in Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training" (2024),
section 3.2, and in ``torch.nn.functional.linear_cross_entropy``. That function has no autocast, no
adapters and no loss scaling, and computes linear layers only; the head here may be any module.

The loss is computed in the forward pass of the head's module (:func:`chunked_loss`), where a
strategy has gathered its weights, and the model runs as usual around it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from paceline.distributed.torch_compat import has_mixed_addmm, has_values
from paceline.models.blocks import wrap_forward
from paceline.models.head.softmax import (
    CachedLogitLosses,
    DeviceLogitLosses,
    LogitLosses,
    LogitTransform,
    weighted_sum,
)
from paceline.models.head.split_vocabulary import (
    SplitLogitLosses,
    SplitVocabulary,
    split_vocabulary,
)

#: Products of 16-bit matrices on a CPU that are added to a sum in float32 are computed in parts of
#: this size in bytes. On CUDA they are added without a copy.
_PRODUCT_BYTES = 16 << 20


@dataclass
class ChunkedLoss:
    """A computation of the loss in the forward pass of a head.

    Args:
        head: the module that computes the logits.
        transform: what the model does to the logits.
        targets: token ids [rows, tokens] or [tokens];
            :data:`~paceline.models.head.softmax.IGNORED` has no loss.
        keep: positions whose hidden states have a target, if the model passes all of them to the
            head; else None.
        chunk_tokens: number of tokens per chunk.
        label_smoothing: share of each target that is spread evenly over the vocabulary.
        counts_correct: whether to count the correct predictions, without gradients.
        token_losses: receives the loss of each token, float32 [tokens], unless None.
        token_weights: factors of the losses and correct predictions of the tokens in the result,
            float32 [tokens], or None.
        is_per_token: the result is the loss of each token instead of their sum, so that a caller
            can weight the tokens by what it computes from them. Backward computes the logits again.
        token_entropies: receives the entropy of the distribution of each token in nats, float32
            [tokens], without gradients, unless None. Requires ``is_per_token``, and a head whose
            vocabulary is not split.
    """

    head: nn.Module
    transform: LogitTransform
    targets: torch.Tensor
    keep: torch.Tensor | None
    chunk_tokens: int
    label_smoothing: float = 0.0
    counts_correct: bool = False
    token_losses: torch.Tensor | None = None
    token_weights: torch.Tensor | None = None
    is_per_token: bool = False
    token_entropies: torch.Tensor | None = None
    #: The number of targets that have the highest logit, once the head has run.
    num_correct: torch.Tensor | int = field(default=0, init=False)
    #: The result, once the head has run.
    total: torch.Tensor | None = field(default=None, init=False)

    @property
    def weights(self) -> list[nn.Parameter]:
        """The trained parameters of the head."""
        return [weight for weight in self.head.parameters() if weight.requires_grad]

    def run(self, forward: Any, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the loss in place of the head's ``forward``.

        Returns:
            Zeros [..., 1] in the place of the logits. They depend on the loss: its backward runs
            after the hooks that a strategy has registered on the model's output.
        """
        if self.keep is not None:
            hidden = hidden[:, self.keep]
        flat = hidden.flatten(0, -2)
        vocabulary = split_vocabulary(self.head)
        if vocabulary is not None:
            forward = vocabulary.forward
        device_type = flat.device.type
        job = _Job(self, forward, device_type, autocast_dtype(device_type), vocabulary)
        zeros = hidden.new_zeros((*hidden.shape[:-1], 1))
        if self.is_per_token:
            self.token_losses = torch.zeros(len(flat), dtype=torch.float32, device=flat.device)
        if not torch.is_grad_enabled():
            self.total = job.losses(flat)
            return zeros
        results: tuple[torch.Tensor, torch.Tensor]
        results = _ChunkedFunction.apply(flat, zeros, job, *self.weights)  # type: ignore[no-untyped-call]
        self.total, zeros = results
        return zeros

    def record(self, rows: slice, losses: torch.Tensor) -> torch.Tensor:
        """Return the sum of the losses of the tokens in ``rows``, times their weights."""
        if self.token_losses is not None:
            self.token_losses[rows] = losses
        if self.token_weights is None:
            return losses.sum()
        return weighted_sum(losses, self.token_weights[rows])

    def result(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the sum of the losses, or the loss of each token, [tokens]. Call it once.

        Args:
            logits: what the model returned as logits.
        """
        # The graph of the loss refers to this object: together they would exist, with the leaves
        # such as the hidden states that a pipeline stage received, until Python collects cycles.
        total, self.total = self.total, None
        assert total is not None, "the model did not call its head"
        zeros = logits.float()
        return total + (zeros.flatten() if self.is_per_token else zeros.sum())


@contextmanager
def chunked_loss(loss: ChunkedLoss) -> Iterator[ChunkedLoss]:
    """Make the head compute ``loss`` instead of logits within the block.

    The replacement is outside of whatever a strategy has put around the head's forward, such as
    the collectives of tensor parallelism: they run once for each chunk.
    """
    restore = wrap_forward(loss.head, loss.run)
    try:
        yield loss
    finally:
        restore()


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the dtype of autocast, or None if it is off."""
    if not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def is_computed_as_on_cpu(device_type: str) -> bool:
    """Return whether chunks are computed in the order of operations of a CPU, whose results must
    not change, instead of with few kernels."""
    return device_type == "cpu"


@dataclass(frozen=True)
class _Job:
    """The loop over the chunks of one micro-batch."""

    loss: ChunkedLoss
    forward: Any
    device_type: str
    low_dtype: torch.dtype | None
    vocabulary: SplitVocabulary | None

    @property
    def recomputes(self) -> bool:
        """Whether gradients are computed in the backward pass: gradients in float16 must be
        multiplied by the loss scale before they are rounded, and gradients of tokens with weights
        of their own by these weights before they are added; only the backward pass has these
        factors."""
        weight = next(self.loss.head.parameters(), None)
        stored = None if weight is None else weight.dtype
        return self.loss.is_per_token or torch.float16 in (self.low_dtype, stored)

    def chunks(self, hidden: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        for begin in range(0, len(hidden), self.loss.chunk_tokens):
            rows = slice(begin, begin + self.loss.chunk_tokens)
            yield rows, hidden[rows]

    def _losses(self, scale: torch.Tensor | None = None) -> LogitLosses:
        """Return what receives the logits of the chunks.

        Args:
            scale: factor of the gradients, or one for each token [tokens], or None.
        """
        if self.vocabulary is not None:
            return SplitLogitLosses(self.loss, self.vocabulary, scale)
        if is_computed_as_on_cpu(self.device_type):
            return CachedLogitLosses(self.loss, scale)
        return DeviceLogitLosses(self.loss, scale)

    def losses(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the result (:meth:`ChunkedLoss.result`), without gradients."""
        with torch.no_grad():
            losses = self._losses()
            for rows, x in self.chunks(hidden):
                losses.add(rows, self.forward(x.unsqueeze(0)).squeeze(0))
            total = losses.total()
        if self.loss.is_per_token:
            # Backward computes the losses again, and must not write them to the result.
            results, self.loss.token_losses = self.loss.token_losses, None
            assert results is not None, "run() has allocated it"
            return results
        return total

    def gradients(
        self, hidden: torch.Tensor, weights: Sequence[torch.Tensor], scale: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, list[torch.Tensor]]:
        """Compute the loss and its gradients in float32.

        Args:
            hidden: inputs of the head [tokens, width].
            weights: trained parameters of the head.
            scale: factor of the gradients, or one for each token [tokens], or None.

        Returns:
            The sum of the losses, the gradient of ``hidden`` (None if it has none) and the
            gradients of ``weights``.
        """
        losses = self._losses(scale)
        sums = [torch.zeros_like(weight, dtype=torch.float32) for weight in weights]
        inputs = torch.empty_like(hidden, dtype=torch.float32) if hidden.requires_grad else None
        head: Any = self.loss.head
        # FSDP makes the head an instance of a subclass of its class.
        is_plain = (
            isinstance(head, nn.Linear)
            and {name for name, _ in head.named_parameters()} <= {"weight", "bias"}
            and _function_of(self.forward) is nn.Linear.forward
        )
        with torch.autocast(
            self.device_type, dtype=self.low_dtype, enabled=self.low_dtype is not None
        ):
            if is_plain:  # one cast for all chunks
                values = _cast(head.weight.detach(), self.low_dtype)
                bias = None if head.bias is None else _cast(head.bias.detach(), self.low_dtype)
            for rows, x in self.chunks(hidden.detach()):
                add = partial(losses.differentiate_, rows)
                into = None if inputs is None else inputs[rows]
                if is_plain:
                    _linear_gradients(add, _cast(x, self.low_dtype), values, bias, into, sums)
                else:
                    self._module_gradients(add, x, weights, into, sums)
        if self.vocabulary is not None and inputs is not None:
            self.vocabulary.sum_gradient_(inputs, self.low_dtype or hidden.dtype)
        return losses.total(), inputs, sums

    def _module_gradients(
        self,
        differentiate_: Callable[[torch.Tensor], None],
        x: torch.Tensor,
        weights: Sequence[torch.Tensor],
        inputs: torch.Tensor | None,
        sums: list[torch.Tensor],
    ) -> None:
        """Add the gradients of a chunk for any head (an adapter, a split layer).

        Args:
            differentiate_: replaces the output of the head by the gradient of the loss.
            inputs: receives the gradient of ``x``.
        """
        with torch.enable_grad():
            x = x.unsqueeze(0).requires_grad_(inputs is not None)
            output = self.forward(x)
        gradient = output.detach()
        differentiate_(gradient.squeeze(0))
        wanted = [*weights] if inputs is None else [x, *weights]
        gradients = [*torch.autograd.grad(output, wanted, gradient, materialize_grads=True)]
        if inputs is not None:
            inputs.copy_(gradients.pop(0).squeeze(0))
        for total, part in zip(sums, gradients, strict=True):
            total += part


def _linear_gradients(
    differentiate_: Callable[[torch.Tensor, torch.Tensor | None], None],
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    inputs: torch.Tensor | None,
    sums: list[torch.Tensor],
) -> None:
    """Add the gradients of a chunk for a linear layer, if possible without a copy of the weight's.

    Args:
        differentiate_: replaces the output of the head by the gradient of the loss, and adds the
            sum over its rows to its second argument.
        inputs: receives the gradient of ``x``.
        sums: gradient sums of the trained parameters: the weight [vocabulary, width], the bias
            [vocabulary].
    """
    gradient = functional.linear(x, weight, bias)
    differentiate_(gradient, next((total for total in sums if total.dim() == 1), None))
    if inputs is not None:
        inputs.copy_(gradient @ weight)
    for total in sums:
        if total.dim() == 2:
            _add_product_(total, gradient.t(), x)


class _ChunkedFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, zeros: torch.Tensor, job: _Job, *weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.job = job
        ctx.dtypes = [hidden.dtype, *(weight.dtype for weight in weights)]
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(zeros)
        if job.recomputes:
            ctx.save_for_backward(hidden)
            return job.losses(hidden), zeros
        total, inputs, sums = job.gradients(hidden, weights, None)
        ctx.gradients = [inputs, *sums]
        return total, zeros

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None, _: Any) -> tuple[torch.Tensor | None, ...]:
        assert grad is not None, "the gradient of the loss is missing"
        if ctx.job.recomputes:
            (hidden,) = ctx.saved_tensors
            _, inputs, sums = ctx.job.gradients(hidden, ctx.job.loss.weights, grad)
            gradients = [inputs, *sums]
        else:
            if ctx.gradients is None:
                raise RuntimeError("the gradients of a chunked loss can be used only once")
            gradients = [each if each is None else each.mul_(grad) for each in ctx.gradients]
            ctx.gradients = None
        for number, dtype in enumerate(ctx.dtypes):  # each replaces the one in float32
            gradient = gradients[number]
            gradients[number] = None if gradient is None else gradient.to(dtype)
        hidden_gradient, *others = gradients
        return hidden_gradient, None, None, *others


def _add_product_(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add ``left @ right`` to a sum in float32."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif total.is_cuda and (has_mixed_addmm() or not has_values(total)):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        count = max(1, _PRODUCT_BYTES // (right.shape[1] * right.itemsize))
        for begin in range(0, len(total), count):
            total[begin : begin + count] += left[begin : begin + count] @ right


def _function_of(method: Any) -> Any:
    """Return the function of a bound method; None for what a strategy puts around a forward."""
    return getattr(method, "__func__", None)


def _cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor if dtype is None else tensor.to(dtype)
