"""The loader produces the same micro-batches from any first step, with any number of loader
processes and any world size."""

import numpy as np
import pytest
import torch

from paceline.data.loader import eval_batches, train_steps
from paceline.data.loader_process import LoaderOptions
from paceline.data.order.samples import SampleOrder


class RandomizedDataset(torch.utils.data.Dataset):
    """A dataset that draws random numbers for each sample it returns, as augmentation does."""

    def __len__(self):
        return 21

    def __getitem__(self, index):
        return torch.tensor([index, torch.rand(()).item(), np.random.rand()], dtype=torch.float64)


def stack(samples):
    return torch.stack(list(samples))


def load_steps(
    first=0, last=6, rank=0, world=2, accumulation=2, workers=0, shares=None, start_method="fork"
):
    order = SampleOrder(21, 8, seed=9)
    steps = train_steps(
        RandomizedDataset(), order, stack, rank=rank, world_size=world, accumulation=accumulation,
        first_step=first, last_step=last, shares=shares,
        options=LoaderOptions(num_workers=workers, start_method=start_method),
    )  # fmt: skip
    return [[(batch.data, batch.weight, batch.samples) for batch in step] for step in steps]


def are_equal(left, right):
    return all(
        torch.equal(a[0], b[0]) and a[1:] == b[1:]
        for left_step, right_step in zip(left, right, strict=True)
        for a, b in zip(left_step, right_step, strict=True)
    )


def test_resume_in_the_middle_gives_same_batches():
    assert are_equal(load_steps()[4:], load_steps(first=4))


def test_loader_processes_do_not_change_batches():
    assert are_equal(load_steps(), load_steps(workers=2))


@pytest.mark.parametrize(("world", "accumulation"), [(1, 4), (2, 2), (4, 1)])
def test_micro_batches_do_not_depend_on_world_size(world, accumulation):
    reference = [batch for step in load_steps(world=1, accumulation=4) for batch in step]
    results = [
        load_steps(rank=rank, world=world, accumulation=accumulation) for rank in range(world)
    ]
    flat = [batch for step in range(6) for rank in range(world) for batch in results[rank][step]]
    assert are_equal([reference], [flat])


def test_short_last_batch_is_filled_with_zero_weight_micro_batches():
    order = SampleOrder(9, 8, seed=9)  # the second step has one sample for four micro-batches
    data = RandomizedDataset()
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
def test_evaluation_covers_every_row_once(world):
    rows = []
    counts = set()
    for rank in range(world):
        batches = list(
            eval_batches(
                RandomizedDataset(),
                stack,
                batch_size=4,
                rank=rank,
                world_size=world,
                seed=1,
                options=LoaderOptions(),
            )
        )
        counts.add(len(batches))
        rows += [int(row[0]) for batch in batches if batch.weight for row in batch.data]
    assert sorted(rows) == list(range(21))
    # Every rank has the same number of batches, so no rank waits for another.
    assert len(counts) == 1


@pytest.mark.parametrize("shares", [(3, 1), (1, 3), (2, 1, 1)])
def test_unequal_shares_do_not_change_micro_batches(shares):
    reference = [batch for step in load_steps(world=1, accumulation=4) for batch in step]
    results = [
        load_steps(rank=rank, world=len(shares), accumulation=4, shares=shares)
        for rank in range(len(shares))
    ]
    assert [len(steps[0]) for steps in results] == list(shares)
    flat = [
        batch for step in range(6) for rank in range(len(shares)) for batch in results[rank][step]
    ]
    assert are_equal([reference], [flat])
