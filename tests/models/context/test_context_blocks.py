"""The blocks of ring attention contain each (query, key) pair of a row once, and no rank sends what
no query attends to."""

import pytest
import torch

from paceline.data.context.rows import divide_row
from paceline.models.context.blocks import FULL, num_tokens, ring_steps
from paceline.models.context.kernels import visible_keys

ROWS = ((90,), (5, 21, 1, 34, 13, 8, 27), (1,) * 13, (2, 1), (1,), (16, 48), (3, 60, 4))


def expected_pairs(lengths: tuple[int, ...], window: int | None) -> torch.Tensor:
    positions = torch.arange(sum(lengths))
    samples = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    distance = positions.unsqueeze(1) - positions
    pairs = (distance >= 0) & (samples.unsqueeze(1) == samples)
    return pairs if window is None else pairs & (distance < window)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("window", [None, 1, 2, 7, 15, 16, 40])
def test_blocks_contain_each_pair_once(size: int, window: int | None) -> None:
    for lengths in ROWS:
        division = divide_row(lengths, size)
        count = torch.zeros(sum(lengths), sum(lengths), dtype=torch.int64)
        for rank in range(size):
            own = torch.from_numpy(division.positions(rank))
            for step in ring_steps(lengths, size, rank, window):
                of_source = torch.from_numpy(division.positions(step.source))
                received = torch.cat(
                    [of_source[start:stop] for start, stop in step.received] or [of_source[:0]]
                )
                used = torch.zeros(len(received), dtype=torch.bool)
                for block in step.blocks:
                    queries, keys = own[slice(*block.queries)], received[slice(*block.keys)]
                    pairs = visible_keys(len(queries), len(keys), block.window, own)
                    assert pairs.any(1).all(), "a query of the block attends to no key"
                    assert block.window != FULL or pairs.all()
                    count[queries.unsqueeze(1), keys] += pairs
                    used[slice(*block.keys)] = True
                assert used.all(), "a key was sent for no query"
        assert torch.equal(count, expected_pairs(lengths, window).long())


@pytest.mark.parametrize("window", [None, 9])
def test_ranks_agree_on_what_is_sent(window: int | None) -> None:
    for lengths in ROWS:
        steps = [ring_steps(lengths, 4, rank, window) for rank in range(4)]
        for rank in range(4):
            for number, step in enumerate(steps[rank][1:], 1):
                assert step.sent == steps[step.target][number].received
                assert steps[step.target][number].source == rank


def test_ring_sends_three_quarters_of_what_every_rank_would_send() -> None:
    steps = [ring_steps((1024,), 4, rank) for rank in range(4)]
    sent = sum(step.num_sent for each in steps for step in each[1:])
    assert sent == 3 * 1024 * 3 // 4


def test_window_shorter_than_a_chunk_needs_its_neighbours_only() -> None:
    received = [
        num_tokens(step.received) for step in ring_steps((1024,), 4, 1, 33)[1:] if step.received
    ]
    # 32 tokens before each of the rank's two chunks, from one rank each.
    assert received == [32, 32]
