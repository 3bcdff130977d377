"""The order of streamed rows has each row once per epoch and is a function of seed and epoch."""

import numpy as np
import pytest

from paceline.data.order.row_orders import RowOrder
from paceline.data.streaming.order import PermutedRows
from paceline.data.streaming.permutation import permute

BLOCKS = np.array([30, 1, 0, 44, 26])


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 100, 1000])
def test_permutation_has_each_value_once(size: int) -> None:
    values = permute(np.arange(size), size, 3, 0)
    assert sorted(values) == list(range(size))
    if size > 16:
        assert not np.array_equal(values, np.arange(size))
        assert not np.array_equal(values, permute(np.arange(size), size, 3, 1))


def test_permutation_is_stable_across_versions() -> None:
    # A run that a later version resumes must see the same rows in the same order.
    assert permute(np.arange(8), 8, 42, 0).tolist() == [4, 5, 2, 6, 0, 1, 7, 3]


def test_any_position_is_found_at_once() -> None:
    size = 10**12
    values = permute(np.array([size - 1, 5, 10**6]), size, 1)
    assert (values < size).all()
    assert len(set(values.tolist())) == 3


@pytest.mark.parametrize("blocks", [None, BLOCKS])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_epoch_has_each_row_once(blocks: np.ndarray | None, shuffle: bool, parts: int) -> None:
    rows = PermutedRows(101, seed=5, shuffle=shuffle, block_sizes=blocks, window=16)
    order = RowOrder(rows, 101, 8, seed=5)
    assert order.steps_per_epoch == 13
    for epoch in range(2):
        first = epoch * order.steps_per_epoch
        steps = range(first, first + order.steps_per_epoch)
        keys = np.concatenate([part for step in steps for part in order.micro_batches(step, parts)])
        assert (keys[:, 0] == epoch).all()
        assert sorted(keys[:, 1]) == list(range(101))
        assert np.array_equal(keys[:, 1], np.arange(101)) is not shuffle
    assert order.times_read(order.steps_per_epoch + 2).sum() == 101 + 16


def test_rows_of_window_are_from_neighboring_blocks() -> None:
    sizes = np.full(100, 10)
    order = RowOrder(PermutedRows(1000, seed=5, block_sizes=sizes, window=20), 1000, 20, seed=5)
    for step in range(50):
        assert len(np.unique(order.global_batch(step)[:, 1] // 10)) == 2
