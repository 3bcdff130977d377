"""Divide a packed batch among the ranks of a context group."""

from typing import cast

import numpy as np
import torch

from paceline.data.collate import TokenBatch
from paceline.data.context.rows import divide_row

#: Values of each token of the row, [1, tokens].
_OF_TOKENS = ("input_ids", "position_ids", "noise_keys", "noise_scales")
#: Values of each target, [labels].
_OF_TARGETS = ("targets", "target_weights", "target_sources", "is_answer")


def divide_batch(batch: TokenBatch, rank: int, size: int) -> TokenBatch:
    """Return the part of a batch of :func:`~paceline.data.collate.collate_packed` that one rank of
    a context group computes.

    A target stays with the token that predicts it. Each part has the lengths of all samples, which
    attention needs, and the counts of the row, which are added once. A rank without tokens gets the
    first token of the row as a filler without targets, so that it takes part in the collectives of
    a forward pass.
    """
    division = divide_row(batch["segment_lengths"], size)
    positions = division.positions(rank)
    local_index = np.full(division.num_tokens, -1, dtype=np.int64)
    local_index[positions] = np.arange(len(positions))
    part = dict(batch)
    of_rank = torch.from_numpy(positions if len(positions) else np.zeros(1, dtype=np.int64))
    for name in _OF_TOKENS:
        if name in batch:
            part[name] = _tensor(batch, name)[:, of_rank]
    kept = local_index[batch["keep"].numpy()]
    is_local = kept >= 0
    part["keep"] = torch.from_numpy(kept[is_local])
    for name in _OF_TARGETS:
        if name in batch:
            part[name] = _tensor(batch, name)[torch.from_numpy(is_local)]
    if "target_counts" in batch:
        counts = batch["target_counts"]
        sequences = np.repeat(np.arange(len(counts)), counts)[is_local]
        part["local_target_counts"] = tuple(np.bincount(sequences, minlength=len(counts)).tolist())
    part["is_filler"] = not len(positions)
    return cast(TokenBatch, part)


def _tensor(batch: TokenBatch, name: str) -> torch.Tensor:
    return cast(torch.Tensor, batch.get(name))
