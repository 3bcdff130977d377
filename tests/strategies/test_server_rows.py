"""Rows on a parameter server: updates as by torch's optimizers, sums in a fixed order, and even
ranges."""

import pytest
import torch
from torch import nn

from paceline.strategies.parameter_server.cost import row_ranges
from paceline.strategies.parameter_server.server import RowOptimizer, TableShard

ROWS, DIM, STEPS = 12, 3, 5


def batches():
    """Yield the rows of each step with their gradients. Rows 0 and 7 never occur, the others in
    some steps."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        rows = (
            torch.tensor([1, 2, 3, 4, 5, 6, 8, 9, 10, 11])[
                torch.randperm(10, generator=generator)[:4]
            ]
            .sort()
            .values
        )
        yield rows, torch.randn(4, DIM, generator=generator)


def train_rows(kind, start=0, end=ROWS, rates=(0.1,) * STEPS):
    values = torch.linspace(-1, 1, ROWS * DIM).view(ROWS, DIM)[start:end].clone()
    shard = TableShard("table", ROWS, start, nn.Parameter(values))
    optimizer = RowOptimizer([shard], kind, rates[0])
    for (rows, gradient), rate in zip(batches(), rates, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        local = (rows >= start) & (rows < end)
        if local.any():
            shard.pushed[(0, 0)] = (rows[local] - start, gradient[local])
        shard.merge()
        optimizer.step()
    return shard.values.detach()


def train_with_torch(make, sparse=False, rates=(0.1,) * STEPS):
    weight = nn.Parameter(torch.linspace(-1, 1, ROWS * DIM).view(ROWS, DIM).clone())
    optimizer = make([weight])
    for (rows, gradient), rate in zip(batches(), rates, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        sparse_gradient = torch.sparse_coo_tensor(
            rows[None], gradient, (ROWS, DIM), check_invariants=True
        )
        weight.grad = sparse_gradient.coalesce() if sparse else sparse_gradient.to_dense()
        optimizer.step()
    return weight.detach()


@pytest.mark.parametrize(
    ("kind", "make", "sparse"),
    [
        ("sgd", lambda p: torch.optim.SGD(p, lr=0.1), False),
        ("adagrad", lambda p: torch.optim.Adagrad(p, lr=0.1), False),
        ("adam", lambda p: torch.optim.SparseAdam(p, lr=0.1), True),
    ],
)
def test_row_updates_match_torch_optimizers(kind, make, sparse):
    rates = (0.1, 0.05, 0.2, 0.0, 0.1)
    expected = train_with_torch(make, sparse, rates)
    assert torch.allclose(train_rows(kind, rates=rates), expected, rtol=1e-6, atol=1e-7)
    divided = torch.cat(
        [
            train_rows(kind, 0, 5, rates),
            train_rows(kind, 5, 6, rates),
            train_rows(kind, 6, ROWS, rates),
        ]
    )
    # The result does not depend on how the table is divided.
    assert torch.equal(divided, train_rows(kind, rates=rates))


def test_row_wise_adagrad_has_one_mean_of_squares_per_row():
    weight = torch.linspace(-1, 1, ROWS * DIM, dtype=torch.float64).view(ROWS, DIM).clone()
    sums = torch.zeros(ROWS, dtype=torch.float64)
    for rows, gradient in batches():
        for row, values in zip(rows.tolist(), gradient.double(), strict=True):
            sums[row] += (values * values).sum() / DIM
            weight[row] -= 0.1 * values / (sums[row].sqrt() + 1e-10)
    assert torch.allclose(train_rows("row_wise_adagrad").double(), weight, rtol=1e-5, atol=1e-6)
    assert torch.equal(
        train_rows("row_wise_adagrad")[[0, 7]],
        torch.linspace(-1, 1, ROWS * DIM).view(ROWS, DIM)[[0, 7]],
    )


def test_sum_of_pushes_is_independent_of_arrival_order():
    generator = torch.Generator().manual_seed(1)
    pushes = {
        (worker, number): (
            torch.randperm(ROWS, generator=generator)[:5].sort().values,
            torch.randn(5, DIM, generator=generator),
        )
        for worker in range(3)
        for number in range(2)
    }
    sums = []
    for order in (sorted(pushes), sorted(pushes, reverse=True)):
        shard = TableShard("table", ROWS, 0, nn.Parameter(torch.zeros(ROWS, DIM)))
        for key in order:
            shard.pushed[key] = pushes[key]
        shard.merge()
        assert shard.pushed == {}
        total = torch.zeros(ROWS, DIM)
        total[shard.gradient[0]] = shard.gradient[1]
        sums.append(total)
    assert torch.equal(*sums)
    expected = torch.zeros(ROWS, DIM).double()
    for rows, gradient in pushes.values():
        expected.index_add_(0, rows, gradient.double())
    assert torch.allclose(sums[0].double(), expected, atol=1e-6)


@pytest.mark.parametrize(("rows", "servers"), [(10, 3), (3, 3), (2, 4), (1000, 1)])
def test_row_ranges_are_even_and_complete(rows, servers):
    ranges = row_ranges(rows, servers)
    assert len(ranges) == servers
    assert [row for start, end in ranges for row in range(start, end)] == list(range(rows))
    sizes = [end - start for start, end in ranges]
    assert max(sizes) - min(sizes) <= 1
