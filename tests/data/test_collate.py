"""Packed and padded batches have the same target tokens."""

import numpy as np
import pytest
import torch

from paceline.data.collate import add_sources, collate_packed, collate_padded, map_tensors


def sample(length, answer_start, first_token=1):
    return {
        "input_ids": np.arange(first_token, first_token + length, dtype=np.int32),
        "labels_mask": np.arange(length) >= answer_start,
    }


SAMPLES = [
    sample(5, 3),
    sample(3, 0, first_token=20),
    sample(1, 0, first_token=40),
    sample(7, 6, first_token=60),
]


def test_packed_positions_restart_at_each_sample():
    batch = collate_packed(SAMPLES)
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 0, 0, 1, 2, 3, 4, 5, 6]]
    assert batch["num_tokens"] == 16


def test_targets_are_next_tokens_of_selected_positions():
    batch = collate_packed(SAMPLES)
    ids = batch["input_ids"][0]
    assert torch.equal(ids[batch["keep"] + 1], batch["targets"])
    assert batch["targets"].tolist() == [4, 5, 21, 22, 66]  # never a sample's first token


def test_padded_batch_has_same_targets_as_packed():
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


def test_batch_without_labels_has_no_targets():
    batch = collate_packed([sample(4, 9)])
    assert batch["num_labels"] == 0
    assert batch["keep"].numel() == batch["targets"].numel() == 0


def test_tensors_in_an_output_of_transformers_are_replaced():
    from transformers.modeling_outputs import CausalLMOutputWithPast

    output = CausalLMOutputWithPast(logits=torch.ones(2), hidden_states=(torch.ones(1),))
    doubled = map_tensors(output, lambda tensor: tensor * 2)
    assert isinstance(doubled, CausalLMOutputWithPast)
    assert doubled.logits.tolist() == doubled["logits"].tolist() == [2.0, 2.0]
    assert doubled.hidden_states[0].tolist() == [2.0]
    assert output.logits.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("is_packed", [True, False])
def test_losses_of_a_mixture_are_summed_by_source(is_packed):
    samples = [sample(length, 2, 10 * length) for length in (5, 3, 7, 4)]
    for number, source in enumerate([2, 0, 2, 1]):
        samples[number]["source"] = source
    batch = collate_packed(samples) if is_packed else collate_padded(samples, pad_token_id=0)
    add_sources(batch, samples, num_sources=4)
    targets = batch["targets"].flatten()
    # The loss of each target is its token, so that the sums show which targets they have.
    record = batch["source_losses"]
    record.record(targets.float(), batch["target_sources"].flatten(), targets != -100)
    expected = [[0.0, 0.0] for _ in range(4)]
    for item in samples:
        labels = item["input_ids"][1:][item["labels_mask"][1:]]
        expected[item["source"]][0] += float(labels.sum())
        expected[item["source"]][1] += len(labels)
    assert record.sums.T.tolist() == expected
