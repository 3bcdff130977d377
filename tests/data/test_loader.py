"""The loader gives the same micro-batches from any step on, with or without loader processes."""

import numpy as np
import pytest
import torch

from paceline.data.loader import LoaderOptions, eval_batches, train_steps
from paceline.data.order import SampleOrder


class Noisy(torch.utils.data.Dataset):
    """Every look at a sample draws from the global generators, as augmentation does."""

    def __len__(self):
        return 21

    def __getitem__(self, index):
        return torch.tensor([index, torch.rand(()).item(), np.random.rand()], dtype=torch.float64)


def stack(samples):
    return torch.stack(list(samples))


def run(first=0, last=6, rank=0, world=2, accumulation=2, workers=0, shares=None):
    order = SampleOrder(21, 8, seed=9)
    steps = train_steps(
        Noisy(), order, stack, rank=rank, world_size=world, accumulation=accumulation,
        first_step=first, last_step=last, options=LoaderOptions(num_workers=workers), shares=shares,
    )  # fmt: skip
    return [[(batch.data, batch.weight, batch.samples) for batch in step] for step in steps]


def same(left, right):
    return all(
        torch.equal(a[0], b[0]) and a[1:] == b[1:]
        for first, second in zip(left, right, strict=True)
        for a, b in zip(first, second, strict=True)
    )


def test_going_on_in_the_middle_gives_the_same_batches():
    assert same(run()[4:], run(first=4))


def test_loader_processes_change_nothing():
    assert same(run(), run(workers=2))


@pytest.mark.parametrize(("world", "accumulation"), [(1, 4), (2, 2), (4, 1)])
def test_the_same_micro_batches_for_every_world(world, accumulation):
    reference = [batch for step in run(world=1, accumulation=4) for batch in step]
    results = [run(rank=rank, world=world, accumulation=accumulation) for rank in range(world)]
    flat = [batch for step in range(6) for rank in range(world) for batch in results[rank][step]]
    assert same([reference], [flat])


def test_a_short_last_batch_is_filled_with_weight_zero():
    order = SampleOrder(9, 8, seed=9)  # the second step has one sample for four micro-batches
    data = Noisy()
    results = []
    for rank in range(4):
        steps = train_steps(
            data,
            order,
            stack,
            rank=rank,
            world_size=4,
            accumulation=1,
            first_step=1,
            last_step=2,
            options=LoaderOptions(),
        )
        results += [(batch.weight, batch.samples) for step in steps for batch in step]
    assert sorted(results) == [(0.0, 0), (0.0, 0), (0.0, 0), (1.0, 1)]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_evaluation_sees_every_row_once(world):
    seen = []
    counts = set()
    for rank in range(world):
        batches = list(
            eval_batches(
                Noisy(),
                stack,
                batch_size=4,
                rank=rank,
                world_size=world,
                seed=1,
                options=LoaderOptions(),
            )
        )
        counts.add(len(batches))
        seen += [int(row[0]) for batch in batches if batch.weight for row in batch.data]
    assert sorted(seen) == list(range(21))
    # the same number on every rank: no rank waits for one that has none left
    assert len(counts) == 1


@pytest.mark.parametrize("shares", [(3, 1), (1, 3), (2, 1, 1)])
def test_unequal_shares_are_the_same_micro_batches(shares):
    reference = [batch for step in run(world=1, accumulation=4) for batch in step]
    results = [
        run(rank=rank, world=len(shares), accumulation=4, shares=shares)
        for rank in range(len(shares))
    ]
    assert [len(steps[0]) for steps in results] == list(shares)
    flat = [
        batch for step in range(6) for rank in range(len(shares)) for batch in results[rank][step]
    ]
    assert same([reference], [flat])
