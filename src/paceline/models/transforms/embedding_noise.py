"""Add uniform noise to the embeddings of tokens (Jain et al., "NEFTune: Noisy Embeddings Improve
Instruction Finetuning", 2023).

The noise of an element is a hash of its sample's seed, its position in the sample and its
dimension. So it depends on neither the device, the ranks nor the other samples of a row, and a
resumed run adds the same noise.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

#: Odd constants of the hash (Wang's and Murmur's), as signed 32-bit numbers.
_MULTIPLIERS = (0x9E3779B1 - (1 << 32), 0x85EBCA6B - (1 << 32), 0xC2B2AE35 - (1 << 32))

_current: ContextVar[tuple[torch.Tensor, torch.Tensor] | None] = ContextVar("noise", default=None)


@contextmanager
def noisy_embeddings(keys: torch.Tensor | None, scales: torch.Tensor | None) -> Iterator[None]:
    """Within the block, a model of :func:`add_embedding_noise` adds noise to the embeddings of a
    batch.

    Args:
        keys, scales: results of :func:`paceline.data.collate.noise_inputs`, in the shape of the
            token ids; None for no noise.
    """
    token = _current.set(None if keys is None or scales is None else (keys, scales))
    try:
        yield
    finally:
        _current.reset(token)


def add_embedding_noise(embedding: nn.Module, alpha: float) -> None:
    """Make an embedding add noise to its output in :func:`noisy_embeddings`, in training."""

    def add(module: nn.Module, _: Any, output: torch.Tensor) -> torch.Tensor:
        inputs = _current.get()
        if inputs is None or not module.training:
            return output
        keys, scales = inputs
        width = int(output.shape[-1])
        magnitude = scales.unsqueeze(-1) * (alpha / math.sqrt(width))
        return output + (_uniform(keys, width) * magnitude).to(output.dtype)

    embedding.register_forward_hook(add)


def _uniform(keys: torch.Tensor, width: int) -> torch.Tensor:
    """Return numbers in [-1, 1), float32 [..., width], that depend on the key and the index."""
    dims = torch.arange(width, dtype=torch.int32, device=keys.device) * _MULTIPLIERS[1]
    bits = keys.unsqueeze(-1) * _MULTIPLIERS[0] + dims
    for shift, multiplier in ((15, _MULTIPLIERS[1]), (13, _MULTIPLIERS[2])):
        bits ^= bits >> shift
        bits *= multiplier
    return (bits >> 8).float() / (1 << 23)
