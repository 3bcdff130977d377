"""Packed and padded batches name the same targets."""

import numpy as np
import torch

from paceline.data.collate import collate_packed, collate_padded


def sample(length, answer_from, start=1):
    return {
        "input_ids": np.arange(start, start + length, dtype=np.int32),
        "labels_mask": np.arange(length) >= answer_from,
    }


SAMPLES = [sample(5, 3), sample(3, 0, start=20), sample(1, 0, start=40), sample(7, 6, start=60)]


def test_packed_positions_start_anew_with_each_sample():
    batch = collate_packed(SAMPLES)
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 0, 0, 1, 2, 3, 4, 5, 6]]
    assert batch["num_tokens"] == 16


def test_targets_are_the_tokens_after_the_kept_positions():
    batch = collate_packed(SAMPLES)
    ids = batch["input_ids"][0]
    assert torch.equal(ids[batch["keep"] + 1], batch["targets"])
    assert batch["targets"].tolist() == [4, 5, 21, 22, 66]  # never a sample's first token


def test_padded_names_the_same_targets():
    batch = collate_padded(SAMPLES, pad_token_id=0)
    targets = batch["targets"][batch["targets"] != -100]
    assert sorted(targets.tolist()) == sorted(collate_packed(SAMPLES)["targets"].tolist())
    assert batch["num_labels"] == 5
    assert batch["num_tokens"] == 16
    for row, sample in enumerate(SAMPLES):
        for column, target in zip(
            batch["keep"].tolist(), batch["targets"][row].tolist(), strict=True
        ):
            if target != -100:
                assert sample["input_ids"][column + 1] == target


def test_a_batch_without_labels_has_no_targets():
    batch = collate_packed([sample(4, 9)])
    assert batch["num_labels"] == 0
    assert batch["keep"].numel() == batch["targets"].numel() == 0
