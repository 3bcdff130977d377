"""Gather all weights of a sharded model at once, for many forward passes without gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.tensor import DTensor

from paceline.strategies.fsdp.sharding import FSDPSharding


@contextmanager
def gathered(sharding: FSDPSharding) -> Iterator[None]:
    """Return a context in which each rank holds all weights, and forward passes are not
    collectives. Entering it is a collective."""
    for unit in sharding.units:
        unit.unshard()
        unit.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for unit, frees in zip(sharding.units, sharding.frees_after_forward, strict=True):
            unit.set_reshard_after_forward(frees, recurse=False)
        sharding.reshard()


def gathered_bytes(sharding: FSDPSharding) -> int:
    """Return the bytes of all weights that are sharded, gathered in the dtype of the forward."""
    parameters = [each for each in sharding.model.parameters() if isinstance(each, DTensor)]
    return sum(
        parameter.numel() * (sharding.low_dtype or parameter.dtype).itemsize
        for parameter in parameters
    )
