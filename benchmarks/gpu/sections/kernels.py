"""Kernels: their results against float32 on the same device, and their speed."""

from typing import Any

from cases import Case, Section
from context import Context

#: Size of the head and number of tokens of the loss; lengths of packed samples.
VOCABULARY, WIDTH, NUM_TOKENS = 152_000, 1536, 4096
SMALL_VOCABULARY, SMALL_WIDTH, NUM_FEW_TOKENS = 5_000, 64, 256
LENGTHS = (97, 1, 300, 64, 64, 13)


def section(is_simulated: bool) -> Section:
    """Return the section."""
    why = "needs a GPU: speed is not measured on simulated devices" if is_simulated else ""
    name = "sections.kernels:"
    return Section("kernels", 45, [
        Case("values: loss in chunks", f"{name}check_loss"),
        Case("values: stochastic rounding", f"{name}check_rounding"),
        Case("values: attention of packed rows", f"{name}check_attention"),
        Case("values: nf4", f"{name}check_nf4"),
        Case("values: float8 product", f"{name}check_float8"),
        Case("speed: loss in chunks", f"{name}time_loss", is_timing=True, why_skipped=why),
        Case("speed: stochastic rounding", f"{name}time_rounding", is_timing=True, why_skipped=why),
        Case("speed: attention of packed rows", f"{name}time_attention", is_timing=True,
             why_skipped=why),
    ])  # fmt: skip


def relative_error(tensor: Any, expected: Any) -> float:
    """Return the norm of the difference, relative to the norm of the expected tensor."""
    return float((tensor.float() - expected.float()).norm() / expected.float().norm())


def _check(errors: dict[str, float], limit: float) -> dict[str, Any]:
    too_large = {name: error for name, error in errors.items() if not error <= limit}
    if too_large:
        raise AssertionError(f"relative errors above {limit:g}: {too_large}")
    return errors | {"limit": limit}


def _loss_inputs(vocabulary: int, width: int, tokens: int, dtype: Any) -> tuple[Any, Any, Any]:
    import torch

    torch.manual_seed(0)
    head = torch.nn.Linear(width, vocabulary, bias=False, device="cuda", dtype=dtype)
    head.weight.grad = torch.zeros_like(head.weight)
    hidden = torch.randn(1, tokens, width, device="cuda", dtype=dtype, requires_grad=True)
    return head, hidden, torch.randint(0, vocabulary, (1, tokens), device="cuda")


def _loss_in_chunks(head: Any, hidden: Any, targets: Any, size: int) -> Any:
    from paceline.models.head.chunked_loss import ChunkedLoss, chunked_loss
    from paceline.models.head.softmax import LogitTransform

    chunks = ChunkedLoss(head, LogitTransform(), targets, None, size)
    with chunked_loss(chunks):
        return chunks.result(head(hidden))


def _plain_loss(head: Any, hidden: Any, targets: Any) -> Any:
    from torch.nn import functional

    logits = head(hidden).flatten(0, 1).float()
    return functional.cross_entropy(logits, targets.flatten(), reduction="sum")


def check_loss(context: Context) -> dict[str, Any]:
    """Compare the loss in chunks and its gradients with all logits at once, in float32."""
    import torch

    results = []
    for is_chunked in (True, False):
        head, hidden, targets = _loss_inputs(
            SMALL_VOCABULARY, SMALL_WIDTH, NUM_FEW_TOKENS, torch.float32
        )
        loss = (
            _loss_in_chunks(head, hidden, targets, 64)
            if is_chunked
            else _plain_loss(head, hidden, targets)
        )
        loss.backward()
        results.append((loss.detach(), hidden.grad, head.weight.grad))
    names = ("loss", "gradient of inputs", "gradient of weights")
    return _check(
        {name: relative_error(*pair) for name, *pair in zip(names, *results, strict=True)}, 1e-4
    )


def check_rounding(context: Context) -> dict[str, Any]:
    """Rounded values are neighbors in bfloat16, and their mean is the value."""
    import torch

    from paceline.train.optimizers.rounding import round_stochastically

    value = 1.0 + 2**-7 * 0.25  # a quarter of the way from 1 to its next value in bfloat16
    values = torch.full((1 << 20,), value, device="cuda")
    positions = torch.arange(values.numel(), device="cuda", dtype=torch.int32)
    rounded = round_stochastically(values, positions, "benchmark")
    distinct = sorted({float(each) for each in rounded.float().unique().cpu()})
    if distinct != [1.0, 1.0 + 2**-7]:
        raise AssertionError(f"the values were rounded to {distinct[:4]}")
    share = float((rounded.float() > 1.0).double().mean())
    # The standard error of the share is 0.0004.
    if abs(share - 0.25) > 0.003:
        raise AssertionError(f"{share:.4f} of the values were rounded up, expected 0.25")
    return {"rounded_up": share}


def check_attention(context: Context) -> dict[str, Any]:
    """Compare the fused kernel for packed rows in bfloat16 with attention in float32."""
    from paceline.models import attention

    context.needs_gpu("the fused kernel for packed rows runs on GPUs only")
    context.needs_capability(8, 0, "varlen_attn")
    if not attention._has_varlen():
        from cases import Skipped

        raise Skipped("this build of torch has no varlen_attn with windows")
    low, exact = (_attend(LENGTHS, 8, 2, 128, kernel) for kernel in ("varlen_attn", "sdpa"))
    names = ("output", "gradient of queries", "gradient of keys", "gradient of values")
    errors = {name: relative_error(*pair) for name, *pair in zip(names, low, exact, strict=True)}
    return _check(errors, 2e-2)


def _attend(lengths: Any, heads: int, key_heads: int, size: int, kernel: str) -> list[Any]:
    """Return the output and the gradients of attention; with `sdpa`, in float32."""
    import torch

    from paceline.data.collate import segment_inputs
    from paceline.models.attention import packed_attention

    torch.manual_seed(0)
    module = torch.nn.Module()
    module.num_key_value_groups = heads // key_heads
    states = [
        torch.randn(1, count, sum(lengths), size, device="cuda", dtype=torch.bfloat16)
        for count in (heads, key_heads, key_heads)
    ]
    if kernel == "sdpa":
        states = [state.float() for state in states]
    for state in states:
        state.requires_grad_()
    result, _ = packed_attention(
        module, *states, None, scaling=size**-0.5, kernel=kernel,
        **segment_inputs(lengths, torch.device("cuda", 0)),
    )  # fmt: skip
    weights = torch.randn(result.shape, device="cuda")
    (result.float() * weights).sum().backward()
    return [result.detach(), *(state.grad for state in states)]


def check_nf4(context: Context) -> dict[str, Any]:
    """Dequantized weights of a normal distribution are close to the weights."""
    import torch

    context.needs_gpu("bitsandbytes computes nf4 on GPUs")
    context.needs_packages(["bitsandbytes"])
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    torch.manual_seed(0)
    weights = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)
    packed, state = quantize_4bit(weights, quant_type="nf4")
    # 16 quantiles of a normal distribution, in blocks of 64: about 9 % (Dettmers et al., 2023).
    return _check({"error": relative_error(dequantize_4bit(packed, state), weights)}, 0.15)


def check_float8(context: Context) -> dict[str, Any]:
    """Compare a product in float8 with the product in float32."""
    import torch

    context.needs_gpu("products in float8 run on GPUs only")
    context.needs_capability(8, 9, "float8")
    torch.manual_seed(0)
    left, right = (torch.randn(512, 512, device="cuda") for _ in range(2))
    limit = torch.finfo(torch.float8_e4m3fn).max
    scales = [each.abs().max() / limit for each in (left, right)]
    low = [
        (each / scale).to(torch.float8_e4m3fn)
        for each, scale in zip((left, right), scales, strict=True)
    ]
    product = torch._scaled_mm(
        low[0], low[1].t().contiguous().t(), scale_a=scales[0], scale_b=scales[1],
        out_dtype=torch.bfloat16,
    )  # fmt: skip
    return _check({"error": relative_error(product, left @ right)}, 6e-2)


def time_loss(context: Context) -> dict[str, Any]:
    """Return the seconds and the peak memory of forward and backward, in chunks and at once."""
    import torch

    from paceline.config.schema.train_args import TrainArgs
    from paceline.models.shape.loss_chunks import choose_loss_chunks
    from sections.ceilings import seconds_of

    size = choose_loss_chunks(TrainArgs(), VOCABULARY, "cuda").tokens
    figures: dict[str, Any] = {"tokens_per_chunk": size}
    for name in ("chunks", "at_once"):
        head, hidden, targets = _loss_inputs(VOCABULARY, WIDTH, NUM_TOKENS, torch.bfloat16)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()

        def step(name: str = name, inputs: Any = (head, hidden, targets)) -> None:
            loss = _loss_in_chunks(*inputs, size) if name == "chunks" else _plain_loss(*inputs)
            loss.backward()

        figures[f"{name}_s"] = seconds_of(step)
        figures[f"{name}_peak_bytes"] = torch.cuda.max_memory_allocated() - before
    return figures


def time_rounding(context: Context) -> dict[str, Any]:
    """Return the seconds and bytes per second of rounding 100 million values."""
    import torch

    from paceline.train.optimizers.rounding import round_stochastically
    from sections.ceilings import seconds_of

    values = torch.randn(100_000_000, device="cuda")
    positions = torch.arange(values.numel(), device="cuda", dtype=torch.int32)
    seconds = seconds_of(lambda: round_stochastically(values, positions, "benchmark"))
    return {"seconds": seconds, "values_s": values.numel() / seconds}


def time_attention(context: Context) -> dict[str, Any]:
    """Return the seconds of forward and backward of packed attention with the fused kernel."""
    from paceline.models import attention
    from sections.ceilings import seconds_of

    context.needs_capability(8, 0, "varlen_attn")
    if not attention._has_varlen():
        from cases import Skipped

        raise Skipped("this build of torch has no varlen_attn with windows")
    lengths = (2048,) * 4
    return {"seconds": seconds_of(lambda: _attend(lengths, 12, 2, 128, "varlen_attn"))}
