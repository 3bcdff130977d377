"""The reference model: the model as it was before training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from paceline.parallel.strategy import Strategy


class ReferenceWeights:
    """A copy of the initial values of the trained weights, which are put in the place of the
    current ones while the reference model computes. With LoRA these are the initial adapters, which
    change nothing, so the reference is the base model. Built before a checkpoint is loaded.

    Each rank copies what it holds, so with sharded weights the copy is sharded too.
    """

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self._pairs = [
            (shard.tensor.detach(), shard.tensor.detach().clone())
            for shard in strategy.tensor_shards()
        ]

    @property
    def size_bytes(self) -> int:
        return sum(stored.numel() * stored.itemsize for _, stored in self._pairs)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Return a context in which the model is the reference model. A collective."""
        self._swap()
        yield
        self._swap()

    def _swap(self) -> None:
        with torch.no_grad():
            for live, stored in self._pairs:
                current = live.clone()
                live.copy_(stored)
                stored.copy_(current)
        self.strategy.after_load()
