"""Blockwise quantization of optimizer state to 8 bits (Dettmers et al., "8-bit Optimizers via
Block-wise Quantization", 2021).

In memory a moment is one byte per element, which selects a value of a table, and a float32 scale
per block of 256 elements. Where blocks begin depends on how a strategy divides a tensor. So a
checkpoint contains the moments in float32, as with `adamw`, and the scales of each part: a run
with the same parts continues with the same bits, any other one quantizes the moments again.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from paceline.models.shape.record import QUANTIZED_BLOCK

#: Elements that are converted at a time, so that intermediate results need little memory beside the
#: tensor, which may be an embedding of a billion elements on a device that is almost full.
_CHUNK = 65536 * QUANTIZED_BLOCK


def dequantize(codes: Tensor, table: Tensor, scales: Tensor) -> Tensor:
    """Return the float32 values of ``codes``, in their shape and on their device: paged codes of a
    GPU are host tensors, whereas ``table`` and ``scales`` are on the GPU."""
    table, scales = table.to(codes.device), scales.to(codes.device)
    values = torch.empty(codes.shape, dtype=table.dtype, device=codes.device)
    flat_codes, flat = codes.reshape(-1), values.view(-1)
    for elements, blocks in _chunks(flat.numel()):
        fractions = table[flat_codes[elements].int()]
        torch.mul(fractions, _per_element(scales[blocks], len(fractions)), out=flat[elements])
    return values


def quantize(values: Tensor, table: Tensor, scales: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the codes of float32 values, and the scales of the blocks, on the device of the
    values.

    Args:
        table: the 256 values of the codes, in ascending order.
        scales: the scales with which ``values`` were computed, so that the codes are the same as
            before; None to compute them.
    """
    table = table.to(values.device)
    scales = None if scales is None else scales.to(values.device)
    flat = values.reshape(-1)
    codes = torch.empty(flat.shape, dtype=torch.uint8, device=flat.device)
    limits = (table[1:] + table[:-1]) / 2
    if scales is None:
        scales = flat.new_empty(-(-flat.numel() // QUANTIZED_BLOCK))
        for elements, blocks in _chunks(flat.numel()):
            padded = torch.nn.functional.pad(
                flat[elements], (0, -len(flat[elements]) % QUANTIZED_BLOCK)
            )
            scales[blocks] = padded.view(-1, QUANTIZED_BLOCK).abs().amax(1)
    for elements, blocks in _chunks(flat.numel()):
        part = flat[elements]
        per_element = _per_element(scales[blocks], len(part))
        fractions = torch.where(per_element > 0, part / per_element, 0.0)
        codes[elements] = torch.bucketize(fractions, limits, out_int32=True).to(torch.uint8)
    return codes.view(values.shape), scales


def _chunks(numel: int) -> Iterator[tuple[slice, slice]]:
    """Yield the elements of each chunk and their blocks."""
    for start in range(0, numel, _CHUNK):
        stop = min(start + _CHUNK, numel)
        yield slice(start, stop), slice(start // QUANTIZED_BLOCK, -(-stop // QUANTIZED_BLOCK))


def _per_element(scales: Tensor, numel: int) -> Tensor:
    return scales.repeat_interleave(QUANTIZED_BLOCK)[:numel]
