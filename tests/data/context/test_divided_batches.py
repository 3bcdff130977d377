"""The parts of a batch on the ranks of a context group have its tokens and targets."""

import numpy as np
import pytest
import torch

from paceline.data.collate import add_sources, add_weights, collate_packed
from paceline.data.context.batch import divide_batch

LENGTHS = (9, 2, 14, 1, 6)


def sample(number: int, length: int) -> dict:
    return {
        "input_ids": np.arange(100 * number, 100 * number + length, dtype=np.int32),
        "labels_mask": np.arange(length) >= 1,
        "seed": number,
        "source": number % 2,
        "weight": 0.5 + number,
    }


def whole(lengths: tuple[int, ...]) -> dict:
    samples = [sample(number, length) for number, length in enumerate(lengths)]
    batch = collate_packed(samples)
    add_sources(batch, samples, 2)
    add_weights(batch, samples)
    return batch


@pytest.mark.parametrize("size", [2, 3, 4])
def test_parts_have_each_token_and_target_once(size: int) -> None:
    batch = whole(LENGTHS)
    parts = [divide_batch(batch, rank, size) for rank in range(size)]
    tokens = torch.cat([part["input_ids"] for part in parts], dim=1)
    assert sorted(tokens[0].tolist()) == sorted(batch["input_ids"][0].tolist())
    for name in ("targets", "target_weights", "target_sources"):
        values = torch.cat([part[name] for part in parts])
        assert sorted(values.tolist()) == sorted(batch[name].tolist())
    for part in parts:
        assert part["count"] == batch["count"]
        assert part["segment_lengths"] == LENGTHS
        for name in ("position_ids", "noise_keys", "noise_scales"):
            assert part[name].shape == part["input_ids"].shape


@pytest.mark.parametrize("size", [2, 4])
def test_a_target_is_on_the_rank_that_predicts_it(size: int) -> None:
    batch = whole(LENGTHS)
    for rank in range(size):
        part = divide_batch(batch, rank, size)
        predicting = part["input_ids"][0, part["keep"]]
        assert torch.equal(predicting + 1, part["targets"])


def test_a_rank_without_tokens_gets_a_filler_without_targets() -> None:
    batch = whole((2, 1))
    parts = [divide_batch(batch, rank, 4) for rank in range(4)]
    fillers = [part for part in parts if part["is_filler"]]
    assert fillers
    for part in fillers:
        assert part["input_ids"].tolist() == [[0]]
        assert len(part["keep"]) == len(part["targets"]) == 0
    kept = [part for part in parts if not part["is_filler"]]
    assert sum(part["input_ids"].numel() for part in kept) == 3
