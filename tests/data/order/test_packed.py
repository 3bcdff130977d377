"""Rows that several samples share: best-fit decreasing, and documents cut into rows."""

from itertools import pairwise

import numpy as np
import pytest

from paceline.data.order.packed import PackedRows, WrappedRows, best_fit_decreasing
from paceline.data.order.row_orders import RowOrder

LENGTHS = np.random.default_rng(0).integers(1, 101, 500)


def best_fit_by_definition(lengths, capacity):
    """Return the tokens of each row, by the definition: each sample goes to the fullest row with
    space for it."""
    rows = []
    for length in lengths:
        fitting = [row for row in rows if sum(row) + length <= capacity]
        if fitting:
            max(fitting, key=sum).append(int(length))
        else:
            rows.append([int(length)])
    return sorted(map(sum, rows))


@pytest.mark.parametrize("capacity", [100, 128, 333])
@pytest.mark.parametrize("seed", range(5))
def test_rows_are_those_of_best_fit_decreasing(capacity, seed):
    lengths = np.sort(np.random.default_rng(seed).integers(1, 101, 300))[::-1]
    row_of = best_fit_decreasing(lengths, capacity)
    fills = [int(lengths[row_of == row].sum()) for row in range(row_of.max() + 1)]
    assert sorted(fills) == best_fit_by_definition(lengths, capacity)


@pytest.mark.soak
def test_rows_are_those_of_trl():
    datasets = pytest.importorskip("datasets")
    data_utils = pytest.importorskip("trl.data_utils")
    data = datasets.Dataset.from_dict({"input_ids": [[1] * length for length in LENGTHS]})
    packed = data_utils.pack_dataset(data, 128, "bfd")
    rows = PackedRows(LENGTHS, 128, 0, 1, True)
    assert rows.num_rows == len(packed)
    fills = [int(LENGTHS[keys[:, 1]].sum()) for keys in rows.keys(0, np.arange(rows.num_rows))]
    assert sorted(fills) == sorted(len(row) for row in packed["input_ids"])


@pytest.mark.parametrize("shuffle", [True, False])
def test_each_epoch_of_packed_rows_has_each_sample_once(shuffle):
    rows = PackedRows(LENGTHS, 128, 0, 1, shuffle)
    order = RowOrder(rows, len(LENGTHS), 8, 1)
    steps = order.steps_per_epoch
    batches = []
    for epoch in (0, 1):
        keys = [order.global_batch(epoch * steps + step) for step in range(steps)]
        batches.append(np.concatenate(keys)[:, 1])
        assert sorted(batches[-1]) == list(range(500))
        assert np.array_equal(
            order.times_read(epoch * steps + 5)[batches[-1]] - epoch,
            np.arange(500) < sum(map(len, keys[:5])),
        )
    assert np.array_equal(*batches) != shuffle
    if not shuffle:
        firsts = [int(keys[:, 1].min()) for keys in rows.keys(0, np.arange(rows.num_rows))]
        assert firsts == sorted(firsts)


def test_micro_batches_of_packed_rows_are_within_their_capacity():
    order = RowOrder(PackedRows(LENGTHS, 128, 0, 1, True), len(LENGTHS), 16, 1)
    for step in range(order.steps_per_epoch):
        parts = order.micro_batches(step, 8)  # two rows each
        assert all(LENGTHS[part[:, 1]].sum() <= 256 for part in parts)
        assert len(np.concatenate(parts)) == len(order.global_batch(step))


@pytest.mark.parametrize("shuffle", [True, False])
def test_wrapped_rows_contain_each_token_once(shuffle):
    rows = WrappedRows(LENGTHS, 64, 0, 1, shuffle)
    total = int(LENGTHS.sum())
    assert rows.num_rows == -(-total // 64)
    for epoch in (0, 3):
        keys = rows.keys(epoch, np.arange(rows.num_rows))
        sizes = [int((row[:, 3] - row[:, 2]).sum()) for row in keys]
        assert sizes == [64] * (rows.num_rows - 1) + [total - 64 * (rows.num_rows - 1)]
        tokens = [
            (index, token)
            for _, index, start, stop in np.concatenate(keys).tolist()
            for token in range(start, stop)
        ]
        assert len(set(tokens)) == len(tokens) == total
        # The parts of a document follow each other.
        documents = [index for index, _ in tokens]
        assert sum(a != b for a, b in pairwise(documents)) == 499
    order = RowOrder(rows, len(LENGTHS), 4, 1)
    assert order.times_read(3) @ LENGTHS == pytest.approx(3 * 4 * 64)
    assert order.times_read(order.steps_per_epoch + 1) @ LENGTHS == pytest.approx(total + 4 * 64)


def test_many_samples_fill_rows_almost_completely():
    lengths = np.random.default_rng(0).integers(1, 2049, 100_000)
    rows = PackedRows(lengths, 2048, 0, 1, True)
    assert lengths.sum() / (rows.num_rows * 2048) > 0.99
