"""The blocks of ring attention, merged, are the attention over the whole row; with a reference of
the kernel for GPUs."""

import pytest
import torch
import varlen_reference
from context_reference import Case, difference, rank_by_rank, share, whole_row
from ranks import run_ranks

from paceline.models.context import kernels
from paceline.models.context.kernels import CpuBlocks, VarlenBlocks
from paceline.models.context.place import ContextPlace
from paceline.models.kernels import fused_attention

DOCUMENTS = (5, 21, 1, 34, 13, 8, 27)
CASES = [
    Case(DOCUMENTS, key_heads=2),
    Case(DOCUMENTS, key_heads=2, window=6),
    Case((90,), window=14, scaling=0.3),
    Case((70, 20), window=60),
    Case((3, 4), window=2),
]


@pytest.mark.parametrize("kernel", [CpuBlocks(), VarlenBlocks()], ids=["cpu", "varlen"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_merged_blocks_are_the_whole_row(case: Case, kernel: kernels.BlockKernel) -> None:
    varlen_reference.register()
    expected = whole_row(case)
    for size in (2, 4):
        assert difference(case, expected, rank_by_rank(case, size, kernel)) <= 2e-6


def fused_shares(world, cases):
    varlen_reference.register()
    fused_attention._FUSED_DEVICE, fused_attention._FUSED_DTYPES = "cpu", (torch.float32,)
    kernels.has_varlen = lambda: True
    place = ContextPlace(world)
    return [
        share(case, place, method, kernel="varlen_attn")
        for case in cases
        for method in ("ring", "ulysses", "gather")
    ]


@pytest.mark.soak
@pytest.mark.parametrize("size", [2, 4])
def test_methods_with_a_fused_kernel(size: int) -> None:
    cases = [*CASES, Case(DOCUMENTS, head_size=12, value_size=6), Case((2, 1)), Case((1,))]
    results = run_ranks(fused_shares, size, cases)
    for number in range(3 * len(cases)):
        case = cases[number // 3]
        parts = [result[number] for result in results]
        assert difference(case, whole_row(case), parts) <= 2e-6, (case, number % 3)


def test_half_precision_sums_blocks_in_float32() -> None:
    case = Case(DOCUMENTS, key_heads=2)
    expected = whole_row(case)
    low = Case(DOCUMENTS, key_heads=2, dtype=torch.bfloat16)
    whole = difference(case, expected, [[each.float() for each in whole_row(low)]])
    results = [[each.float() for each in parts] for parts in rank_by_rank(low, 4, CpuBlocks())]
    assert difference(case, expected, results) <= 2 * whole
