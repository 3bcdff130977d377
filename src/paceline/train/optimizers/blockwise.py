"""Blockwise quantization of optimizer state to 8 bits (Dettmers et al., "8-bit Optimizers via
Block-wise Quantization", 2021).

In memory a moment is one byte per element, which selects a value of a table, and a float32 scale
per block of 256 elements. Where blocks begin depends on how a strategy divides a tensor. So a
checkpoint contains the moments in float32, as those of `adamw`, and the scales of each part: a run
with the same parts continues with the same bits, any other one quantizes the moments again.
"""

import torch
from torch import Tensor

from paceline.models.shape.record import QUANTIZED_BLOCK


def dequantize(codes: Tensor, table: Tensor, scales: Tensor) -> Tensor:
    """Return the float32 values of ``codes``, in their shape."""
    values = table[codes.reshape(-1).int()]
    return (values * _per_element(scales, values.numel())).view(codes.shape)


def quantize(values: Tensor, table: Tensor, scales: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the codes of float32 values, and the scales of the blocks.

    Args:
        table: the 256 values of the codes, in ascending order.
        scales: the scales with which ``values`` were computed, so that the codes are the same as
            before; None to compute them.
    """
    flat = values.reshape(-1)
    if scales is None:
        blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % QUANTIZED_BLOCK))
        scales = blocks.view(-1, QUANTIZED_BLOCK).abs().amax(1)
    per_element = _per_element(scales, flat.numel())
    fractions = torch.where(per_element > 0, flat / per_element, 0.0)
    codes = torch.bucketize(fractions, (table[1:] + table[:-1]) / 2)
    return codes.to(torch.uint8).view(values.shape), scales


def _per_element(scales: Tensor, numel: int) -> Tensor:
    return scales.repeat_interleave(QUANTIZED_BLOCK)[:numel]
