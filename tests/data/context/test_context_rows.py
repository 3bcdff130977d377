"""The division of packed rows among the ranks of a context group."""

import numpy as np
import pytest

from paceline.data.context.rows import RowDivision

ROWS = [(4096,), (7, 5, 1, 30, 2), (1,), (2, 1), (3,) * 9, (100, 1, 1, 1)]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("lengths", ROWS)
def test_each_token_is_on_one_rank(lengths, size):
    division = RowDivision(lengths, size)
    positions = np.concatenate([division.positions(rank) for rank in range(size)])
    assert sorted(positions) == list(range(sum(lengths)))
    assert [len(division.positions(rank)) for rank in range(size)] == [
        division.num_local(rank) for rank in range(size)
    ]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("lengths", ROWS)
def test_pieces_are_parts_of_one_sample(lengths, size):
    division = RowDivision(lengths, size)
    sample_of = np.repeat(np.cumsum((0, *lengths[:-1])), lengths)
    for rank in range(size):
        positions = division.positions(rank)
        for piece in division.pieces[rank]:
            local = positions[piece.offset : piece.offset + piece.length]
            assert list(local) == list(range(piece.start, piece.stop))
            assert set(sample_of[local]) == {piece.segment}
        assert sum(piece.length for piece in division.pieces[rank]) == len(positions)


@pytest.mark.parametrize("window", [None, 3, 16])
@pytest.mark.parametrize("lengths", ROWS[1:])
def test_pairs_are_those_of_the_mask(lengths, window):
    division = RowDivision(lengths, 2)
    sample = np.repeat(np.arange(len(lengths)), lengths)
    place = np.arange(len(sample))
    distance = place[:, None] - place
    mask = (distance >= 0) & (sample[:, None] == sample)
    if window is not None:
        mask &= distance < window
    for rank in range(2):
        assert division.num_pairs(rank, window) == mask[division.positions(rank)].sum()


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("window", [None, 512])
def test_ranks_share_a_long_document_evenly(size, window):
    division = RowDivision((4096,), size)
    pairs = [division.num_pairs(rank, window) for rank in range(size)]
    assert max(pairs) <= 1.1 * sum(pairs) / size
