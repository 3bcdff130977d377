"""Compare the kernels for packed rows and for the loss with float32 on the same CUDA device."""

import pytest
import torch
from test_cuda import cuda
from torch import nn
from torch.nn import functional

from paceline.config.schema.train_args import TrainArgs
from paceline.data.collate import segment_inputs
from paceline.models import attention
from paceline.models.head.chunked_loss import ChunkedLoss, chunked_loss
from paceline.models.head.softmax import LogitTransform
from paceline.models.kernels.attention_choice import VARLEN
from paceline.models.shape.loss_chunks import choose_loss_chunks

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
__all__ = ["cuda"]  # fixture

LENGTHS = (97, 1, 300, 64, 64, 13)
DEVICE = torch.device("cuda", 0)


class Heads(torch.nn.Module):
    def __init__(self, groups: int) -> None:
        super().__init__()
        self.num_key_value_groups = groups


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("heads", "key_heads", "size", "value_size", "window"),
    [
        pytest.param(8, 8, 64, 64, None, id="plain"),
        pytest.param(8, 2, 128, 128, None, id="grouped heads"),
        pytest.param(8, 2, 64, 64, 32, id="window"),
        pytest.param(4, 1, 12, 12, 5, id="padded head size"),
        pytest.param(4, 4, 192, 128, None, id="narrower values"),
        pytest.param(4, 2, 256, 256, None, id="largest head size"),
    ],
)
def test_varlen_equals_attention_in_float32(
    dtype: torch.dtype,
    heads: int,
    key_heads: int,
    size: int,
    value_size: int,
    window: int | None,
) -> None:
    if not attention.has_varlen():
        pytest.skip("this build of torch has no varlen_attn with windows")
    torch.manual_seed(0)
    tokens = sum(LENGTHS)
    states = [
        torch.randn(1, count, tokens, width, device=DEVICE, dtype=dtype, requires_grad=True)
        for count, width in ((heads, size), (key_heads, size), (key_heads, value_size))
    ]
    exact = [state.detach().float().requires_grad_() for state in states]
    weights = torch.randn(1, tokens, heads, value_size, device=DEVICE)
    for inputs, kernel in ((states, VARLEN), (exact, "sdpa")):
        result, _ = attention.packed_attention(
            Heads(heads // key_heads),
            *inputs,
            None,
            scaling=size**-0.5,
            sliding_window=window,
            kernel=kernel,
            **segment_inputs(LENGTHS, DEVICE),
        )
        assert result.dtype == inputs[0].dtype
        (result.float() * weights).sum().backward()
        if kernel == VARLEN:
            output = result.detach()
    assert error_of(output, result) < 1e-2
    for low, full in zip(states, exact, strict=True):
        assert error_of(low.grad, full.grad) < 1e-2


def error_of(tensor: torch.Tensor, expected: torch.Tensor) -> float:
    return float((tensor.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("is_trained", [False, True], ids=["frozen", "trained"])
def test_chunked_loss_uses_a_fraction_of_the_memory(is_trained: bool) -> None:
    """A head of 152,000 × 896 weights with 4,096 tokens, under autocast to bfloat16."""
    torch.manual_seed(0)
    tokens, vocabulary, width = 4096, 152_000, 896
    head = nn.Linear(width, vocabulary, bias=False, device=DEVICE).requires_grad_(is_trained)
    if is_trained:
        head.weight.grad = torch.zeros_like(head.weight)
    hidden = torch.randn(1, tokens, width, device=DEVICE, requires_grad=True)
    targets = torch.randint(0, vocabulary, (1, tokens), device=DEVICE)
    results = []
    for is_chunked in (True, False):
        hidden.grad = None
        torch.cuda.reset_peak_memory_stats(DEVICE)
        before = torch.cuda.memory_allocated(DEVICE)
        with torch.autocast("cuda", torch.bfloat16):
            if is_chunked:
                size = choose_loss_chunks(TrainArgs(), vocabulary, "cuda").tokens
                chunks = ChunkedLoss(head, LogitTransform(), targets, None, size)
                with chunked_loss(chunks):
                    loss = chunks.result(head(hidden))
            else:
                logits = head(hidden).flatten(0, 1).float()
                loss = functional.cross_entropy(logits, targets.flatten(), reduction="sum")
                del logits
        loss.backward()
        peak = torch.cuda.max_memory_allocated(DEVICE) - before
        results.append((loss.item() / tokens, hidden.grad, peak))
    (loss_of_chunks, grad_of_chunks, peak_of_chunks), (full_loss, full_grad, full_peak) = results
    assert loss_of_chunks == pytest.approx(full_loss, rel=1e-4)
    assert error_of(grad_of_chunks, full_grad) < 1e-2
    assert peak_of_chunks < full_peak / 4
