"""The order of streamed rows has each row once per epoch and is a function of seed and epoch."""

import numpy as np
import pytest

from paceline.data.order.row_orders import RowOrder
from paceline.data.streaming.order import PositionRows, StreamShuffle, permute

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
    shuffled = StreamShuffle(5, shuffle, window=16)
    order = RowOrder(PositionRows(101), 0, 8, seed=5)
    assert order.steps_per_epoch == 13
    seen: list[list[int]] = []
    for epoch in range(2):
        steps = range(epoch * 13, (epoch + 1) * 13)
        keys = np.concatenate([part for step in steps for part in order.micro_batches(step, parts)])
        assert (keys[:, 0] == epoch).all()
        assert keys[:, 1].tolist() == list(range(epoch * 101, (epoch + 1) * 101))
        indices = shuffled.rows(epoch, 101, keys[:, 1] - epoch * 101, blocks)
        assert sorted(indices) == list(range(101))
        assert np.array_equal(indices, np.arange(101)) is not shuffle
        seen.append(indices.tolist())
    assert (seen[0] == seen[1]) is not shuffle
    assert len(order.global_batch(12)) == 101 - 12 * 8


def test_rows_of_window_are_from_neighboring_blocks() -> None:
    shuffle, blocks = StreamShuffle(5, True, window=20), np.full(100, 10)
    for start in range(0, 1000, 20):
        rows = shuffle.rows(0, 1000, np.arange(start, start + 20), blocks)
        assert len(np.unique(rows // 10)) == 2
