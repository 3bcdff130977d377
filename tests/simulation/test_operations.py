"""The kernels and bytes that the ledger counts for operations."""

import math
from collections.abc import Callable

import pytest
import torch

from paceline.planner.devices import find_device
from paceline.simulation.ledger import BUILD, Ledger

ROWS, WIDTH = 8, 16
BYTES = 4 * ROWS * WIDTH


def count(operation: Callable[[torch.Tensor, torch.Tensor], object]) -> dict[str, tuple[int, int]]:
    """Return launches and bytes by operation, of an operation on two matrices [8, 16]."""
    left, right = torch.ones(ROWS, WIDTH), torch.ones(ROWS, WIDTH)
    with Ledger(find_device("H100-SXM")[0], 1.0, device_type="cpu") as ledger:
        operation(left, right)
    return {name: counts for (_, name), counts in ledger.work[BUILD].kernels.items()}


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        (lambda a, b: a + b, {"add": (1, 3 * BYTES)}),
        (lambda a, b: a.copy_(b), {"copy_": (1, 2 * BYTES)}),
        (lambda a, b: a.zero_(), {"zero_": (1, BYTES)}),
        (lambda a, b: torch.zeros_like(a), {"zeros_like": (1, BYTES)}),
        (lambda a, b: a.t().unsqueeze(0)[:, 1:].expand(3, -1, -1), {}),
        (lambda a, b: torch.add(a, b, out=a), {"add": (1, 3 * BYTES)}),
        (lambda a, b: torch._foreach_mul_([a, b], 2.0), {"_foreach_mul_": (1, 4 * BYTES)}),
        (
            lambda a, b: a.index_select(0, torch.ones(2, dtype=torch.int64)),
            {"ones": (1, 16), "index_select": (1, 16 + 2 * BYTES // 4)},
        ),
    ],
)
def test_counts_launches_and_bytes(
    operation: Callable[[torch.Tensor, torch.Tensor], object],
    expected: dict[str, tuple[int, int]],
) -> None:
    assert count(operation) == expected


def test_lists_of_many_tensors_need_several_kernels() -> None:
    def add(a: torch.Tensor, b: torch.Tensor) -> None:
        torch._foreach_add_([a] * 200, [b] * 200)

    # The arguments of a kernel hold 64 pairs of tensors.
    assert count(add)["_foreach_add_"][0] == math.ceil(200 / 64)


def test_lists_of_large_tensors_need_several_kernels() -> None:
    large = torch.ones(64 * 320 << 10)  # twice the elements of a kernel's blocks
    launches, _ = count(lambda a, b: torch._foreach_mul_([large, large], 2.0))["_foreach_mul_"]
    assert launches == 2 * large.numel() / (320 << 16)
