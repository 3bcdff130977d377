"""The blocks of ring attention on a GPU, merged on one device."""

import pytest
import torch
from context_reference import Case, difference, rank_by_rank, whole_row
from test_cuda import cuda

from paceline.models import attention
from paceline.models.context.kernels import VarlenBlocks

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
__all__ = ["cuda"]  # fixture

DOCUMENTS = (50, 210, 1, 340, 130, 80, 270)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("key_heads", "head_size", "window"),
    [(4, 64, None), (2, 64, None), (2, 128, 60), (1, 40, 300), (4, 64, 1)],
)
def test_merged_blocks_are_the_whole_row(
    size: int, key_heads: int, head_size: int, window: int | None
) -> None:
    if not attention.has_varlen():
        pytest.skip("this build of torch has no varlen_attn with windows")
    case = Case(DOCUMENTS, 4, key_heads, head_size, head_size, window)
    low = Case(DOCUMENTS, 4, key_heads, head_size, head_size, window, dtype=torch.bfloat16)
    ranks = rank_by_rank(low, size, VarlenBlocks(), "cuda")
    results = [[each.float() for each in parts] for parts in ranks]
    assert difference(case, whole_row(case), results) <= 2e-2
