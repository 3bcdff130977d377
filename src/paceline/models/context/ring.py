"""Ring attention: each rank receives the keys and values of the others, one rank at a time, while
it computes with those it has.

Results of blocks are merged by the logarithms of the sums of the exponentials of their scores (Liu
et al., "Ring Attention with Blockwise Transformers", 2023). In contrast to that paper, keys do not
travel from rank to rank: each rank gets from each other rank exactly the keys that its queries
attend to, so nothing is sent that the causal mask or a window hides.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from paceline.distributed.communicator import Communicator
from paceline.models.context.blocks import RingStep
from paceline.models.context.exchange import PeerMessages, send_and_receive
from paceline.models.context.kernels import BlockKernel, MergedOutput, split_runs, take
from paceline.models.kernels.fused_attention import States


@dataclass(frozen=True)
class Ring:
    """What a layer's ring attention depends on, besides its queries, keys and values.

    Args:
        steps: the steps of this rank.
        scale: factor of the scores.
    """

    group: Communicator
    steps: tuple[RingStep, ...]
    scale: float
    kernel: BlockKernel


def ring_attention(states: States, ring: Ring) -> torch.Tensor:
    """Compute the attention of this rank's queries.

    Args:
        states: queries [tokens of this rank, heads, head_size], keys, and values, which may be
            narrower.

    Returns:
        [tokens of this rank, heads, head_size of the values].
    """
    output: torch.Tensor = _RingAttention.apply(*states, ring)  # type: ignore[no-untyped-call]
    return output


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ring: Ring
    ) -> torch.Tensor:
        sizes = _sizes(query, value, ring.kernel)
        wide = _pad(query, sizes.padded)
        kind = _sum_dtype(query)
        merged = query.new_zeros(wide.shape, dtype=kind)
        merged_lse = query.new_full(wide.shape[:2], -torch.inf, dtype=kind)
        for step, keys, values, _ in _received(ring, key, value, sizes):
            for part in ring.kernel.forward((wide, keys, values), step.blocks, ring.scale):
                for tokens, (output, lse) in split_runs(part.queries, part.output, part.lse):
                    merge(merged[tokens], merged_lse[tokens], output, lse)
        result = merged[..., : sizes.value].to(query.dtype)
        ctx.ring = ring
        ctx.save_for_backward(query, key, value, result, merged_lse)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ring: Ring = ctx.ring
        query, key, value, output, lse = ctx.saved_tensors
        sizes = _sizes(query, value, ring.kernel)
        wide = _pad(query, sizes.padded)
        merged = MergedOutput(
            _pad(output, sizes.padded), lse, _pad(grad.to(output.dtype).contiguous(), sizes.padded)
        )
        kind = _sum_dtype(query)
        query_grad = query.new_zeros(wide.shape, dtype=kind)
        own_grad = key.new_zeros(*key.shape[:2], sizes.head + sizes.value, dtype=kind)
        returning = _Returning(ring, own_grad)
        for step, keys, values, num_keys in _received(ring, key, value, sizes):
            is_own = step is ring.steps[0]
            shape = (num_keys, *own_grad.shape[1:])
            step_grad = own_grad if is_own else own_grad.new_zeros(shape)
            states = (wide, keys, values)
            for part in ring.kernel.backward(states, step.blocks, ring.scale, merged):
                for tokens, (each,) in split_runs(part.queries, part.query_grad):
                    query_grad[tokens] += each
                pair = part.key_grad, part.value_grad
                for tokens, (of_keys, of_values) in split_runs(part.keys, *pair):
                    step_grad[tokens, :, : sizes.head] += of_keys[..., : sizes.head]
                    step_grad[tokens, :, sizes.head :] += of_values[..., : sizes.value]
            if not is_own:
                returning.start(step, step_grad.to(key.dtype))
        returning.finish()
        key_grad, value_grad = own_grad.to(key.dtype).split((sizes.head, sizes.value), dim=-1)
        return query_grad[..., : sizes.head].to(query.dtype), key_grad, value_grad, None


class _Sizes(NamedTuple):
    """Head sizes of queries and keys, of values, and of all of them in the kernel."""

    head: int
    value: int
    padded: int


def _sizes(query: torch.Tensor, value: torch.Tensor, kernel: BlockKernel) -> _Sizes:
    head, width = query.shape[-1], value.shape[-1]
    padded = max(head, width)
    return _Sizes(head, width, padded + -padded % kernel.head_multiple)


def _pad(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Pad heads with zeros, which changes no score and no result."""
    width = tensor.shape[-1]
    return tensor if width == size else functional.pad(tensor, [0, size - width])


def _sum_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the data type in which results of blocks are summed."""
    return torch.float32 if tensor.element_size() < 4 else tensor.dtype


def merge(
    merged: torch.Tensor, merged_lse: torch.Tensor, output: torch.Tensor, lse: torch.Tensor
) -> None:
    """Add the attention of queries to some keys to their attention to other keys, in place."""
    total = torch.logaddexp(merged_lse, lse.to(merged_lse.dtype))
    merged.mul_((merged_lse - total).exp().unsqueeze(-1))
    merged.add_(output * (lse - total).exp().unsqueeze(-1))
    merged_lse.copy_(total)


def _received(
    ring: Ring, key: torch.Tensor, value: torch.Tensor, sizes: _Sizes
) -> Iterator[tuple[RingStep, torch.Tensor, torch.Tensor, int]]:
    """Yield each step with its padded keys and values, and their number. The keys and
    values of the next step are requested before."""
    own = torch.cat((key, value), dim=-1)
    current, following = own, _request(ring, own, 1)
    for number, step in enumerate(ring.steps):
        if number > 0:
            received = following.wait()
            current = own[:0] if received is None else received
            following = _request(ring, own, number + 1)
        keys, values = current.split((sizes.head, sizes.value), dim=-1)
        padded = sizes.padded
        yield step, _pad(keys, padded), _pad(values, padded), current.shape[0]


def _request(ring: Ring, own: torch.Tensor, number: int) -> PeerMessages:
    """Start the exchange of keys and values for a step, if there is such a step."""
    if number >= len(ring.steps):
        return PeerMessages(ring.group)
    step = ring.steps[number]
    return send_and_receive(
        ring.group,
        take(own, step.sent).contiguous() if step.sent else None,
        step.target,
        own.new_empty(step.num_received, *own.shape[1:]) if step.received else None,
        step.source,
    )


class _Returning:
    """Sends the gradients of received keys and values back, and adds those that return.

    Args:
        own_grad: sum of the gradients of this rank's keys and values.
    """

    def __init__(self, ring: Ring, own_grad: torch.Tensor) -> None:
        self.ring, self.own_grad = ring, own_grad
        self._step: RingStep | None = None
        self._messages = PeerMessages(ring.group)

    def start(self, step: RingStep, grad: torch.Tensor) -> None:
        """Send the gradients of a step, after the gradients of the step before have returned."""
        self.finish()
        received = None
        if step.sent:
            received = grad.new_empty(step.num_sent, *grad.shape[1:])
        self._step = step
        self._messages = send_and_receive(
            self.ring.group, grad if step.received else None, step.source, received, step.target
        )

    def finish(self) -> None:
        """Wait for the gradients that return, and add them."""
        received = self._messages.wait()
        if received is None or self._step is None:
            return
        for tokens, (grad,) in split_runs(self._step.sent, received):
            self.own_grad[tokens] += grad
        self._messages = PeerMessages(self.ring.group)
