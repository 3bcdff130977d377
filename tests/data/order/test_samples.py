"""The order of samples depends only on the seed, the epoch and the position."""

import numpy as np
import pytest

from paceline.data.order.base import split_by_length
from paceline.data.order.rows import epoch_permutation
from paceline.data.order.samples import SampleOrder


@pytest.mark.parametrize("epoch", [0, 1, 7])
def test_epoch_contains_each_sample_once(epoch):
    assert sorted(epoch_permutation(101, seed=3, epoch=epoch)) == list(range(101))


def test_permutation_differs_by_epoch_and_seed():
    first = epoch_permutation(50, 1, 0)
    assert not np.array_equal(first, epoch_permutation(50, 1, 1))
    assert not np.array_equal(first, epoch_permutation(50, 2, 0))
    assert np.array_equal(first, epoch_permutation(50, 1, 0))


def test_permutation_is_stable_across_versions():
    # A run that a later version resumes must see the same samples in the same order.
    assert epoch_permutation(8, seed=42, epoch=0).tolist() == [6, 5, 3, 7, 1, 0, 4, 2]


@pytest.mark.parametrize("lengths", [None, np.arange(1, 24)])
@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_micro_batches_of_epoch_contain_each_sample_once(lengths, parts):
    order = SampleOrder(23, 8, seed=5, lengths=lengths)
    assert order.steps_per_epoch == 3
    indices = [
        index for step in range(3) for part in order.micro_batches(step, parts) for _, index in part
    ]
    assert sorted(indices) == list(range(23))
    assert len(order.global_batch(2)) == 7


@pytest.mark.parametrize("lengths", [None, np.arange(1, 101)])
@pytest.mark.parametrize("batch", [1, 5, 8, 16, 31])
@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_global_batch_is_divided_evenly_over_replicas(replicas, batch, micro_batch, lengths):
    """With the accumulation that an elastic run chooses, no micro-batch grows and no replica gets
    much more work than the others."""
    accumulation = -(-batch // (micro_batch * replicas))
    order = SampleOrder(100, batch, seed=5, lengths=lengths)
    for step in (0, 3, order.steps_per_epoch - 1):  # the last step is short
        parts = [keys[:, 1] for keys in order.micro_batches(step, replicas * accumulation)]
        batch = order.global_batch(step)[:, 1]
        assert sorted(np.concatenate(parts)) == sorted(batch)
        if lengths is None:
            assert max(map(len, parts)) <= micro_batch
            shares = [
                sum(map(len, parts[r * accumulation : (r + 1) * accumulation]))
                for r in range(replicas)
            ]
            assert max(shares) - min(shares) <= 1
        else:
            tokens = [int(lengths[part].sum()) for part in parts]
            assert max(tokens) <= 4 / 3 * max(sum(tokens) / len(tokens), lengths[batch].max())


def test_micro_batches_depend_only_on_number_of_parts():
    order = SampleOrder(64, 8, seed=5, lengths=np.random.default_rng(0).integers(1, 100, 64))
    other_order = SampleOrder(64, 8, seed=5, lengths=order.lengths)
    for step in (0, 3, 9):
        for part, other in zip(
            order.micro_batches(step, 4), other_order.micro_batches(step, 4), strict=True
        ):
            assert np.array_equal(part, other)


def test_split_by_length_balances_tokens():
    lengths = np.random.default_rng(1).integers(10, 500, 512)
    indices = np.arange(32)
    loads = [int(lengths[part].sum()) for part in split_by_length(indices, lengths[indices], 4)]
    mean = lengths[indices].sum() / 4
    assert max(loads) <= 4 / 3 * mean
    assert max(loads) - min(loads) < lengths[indices].max()


@pytest.mark.parametrize("lengths", [None, np.random.default_rng(1).integers(1, 50, 23)])
def test_without_shuffle_every_epoch_follows_dataset_order(lengths):
    order = SampleOrder(23, 8, seed=5, lengths=lengths, shuffle=False)
    for epoch in (0, 1):
        batches = [order.global_batch(3 * epoch + step) for step in range(3)]
        assert [batch[:, 1].tolist() for batch in batches] == [
            list(range(8)),
            list(range(8, 16)),
            list(range(16, 23)),
        ]
        assert all((batch[:, 0] == epoch).all() for batch in batches)
        assert order.epoch_order(epoch).tolist() == list(range(23))
    for parts in (1, 3, 12):
        keys = np.concatenate(order.micro_batches(2, parts))
        assert sorted(keys[:, 1].tolist()) == list(range(16, 23))


@pytest.mark.parametrize("shuffle", [True, False])
def test_times_read_counts_keys_of_earlier_steps(shuffle):
    order = SampleOrder(23, 8, seed=5, shuffle=shuffle)
    for step in (0, 1, 3, 5):
        keys = [order.global_batch(earlier)[:, 1] for earlier in range(step)]
        counts = np.bincount(np.concatenate([np.empty(0, int), *keys]), minlength=23)
        assert np.array_equal(order.times_read(step), counts)
    assert order.position(5) == (1, 16)
