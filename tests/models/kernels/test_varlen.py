"""Packed rows in one call of torch's varlen_attn: with a reference of its kernel on the CPU, and by
shapes on a simulated GPU."""

from functools import partial
from typing import Any

import pytest
import torch
from families import FAMILIES, PADDED_FAMILIES, TOKENS
from ranks import run_ranks
from torch.nn.attention import varlen
from transformers import AutoConfig, AutoModelForCausalLM

from paceline.data.collate import segment_inputs
from paceline.models import attention
from paceline.models.kernels import fused_attention, mixers
from paceline.models.kernels.attention_choice import VARLEN

LENGTHS = (9, 1, 14, 5, 9)


def segments(query, key, value, ends, window, scale):
    """Yield (slice, weights, keys, values) of each sample, as documented for flash-attn: each group
    of query heads shares a key head, and a token attends to itself and at most ``window[0]`` tokens
    before it."""
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    left, right = window
    assert right == 0
    for start, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        part = slice(start, end)
        scores = torch.einsum("qhd,khd->hqk", query[part], key[part]) * scale
        distance = torch.arange(end - start).unsqueeze(1) - torch.arange(end - start)
        allowed = (distance >= 0) & ((left < 0) | (distance <= left))
        yield part, scores.masked_fill(~allowed, -torch.inf).softmax(-1), key[part], value[part]


def forward(query, key, value, cu_q, cu_k, max_q, max_k, causal, scale, window, enable_gqa=False):
    """Compute what ``torch_attn::_varlen_attn`` computes on a GPU."""
    assert cu_q.dtype == torch.int32
    assert max_q == max_k == cu_q.diff().max()
    assert enable_gqa == (query.shape[1] != key.shape[1])
    result = torch.cat(
        [
            torch.einsum("hqk,khd->qhd", weights, values)
            for _, weights, _, values in segments(query, key, value, cu_q, window, scale)
        ]
    )
    lse = torch.zeros(query.shape[1], query.shape[0])  # only backward uses it
    return result, lse, torch.zeros(2, dtype=torch.uint64)


def backward(
    grad, query, key, value, out, lse, cu_q, cu_k, max_q, max_k, causal, rng, scale, window
):
    """Compute what ``torch_attn::_varlen_attn_backward`` computes on a GPU."""
    grads = []
    for part, weights, keys, values in segments(query, key, value, cu_q, window, scale):
        inner = torch.einsum("qhd,khd->hqk", grad[part], values)
        inner = weights * (inner - (inner * weights).sum(-1, keepdim=True)) * scale
        grads.append(
            (
                torch.einsum("hqk,khd->qhd", inner, keys),
                torch.einsum("hqk,qhd->khd", inner, query[part]),
                torch.einsum("hqk,qhd->khd", weights, grad[part]),
            )
        )
    query_grad, *shared = (torch.cat(parts) for parts in zip(*grads, strict=True))
    key_grad, value_grad = (tensor.unflatten(1, (key.shape[1], -1)).sum(2) for tensor in shared)
    return query_grad, key_grad, value_grad


@pytest.fixture
def reference_kernels():
    """Give the operators behind varlen_attn a kernel for the CPU, which torch does not have."""
    varlen._varlen_attn.register_kernel("cpu")(forward)
    varlen._varlen_attn_backward.register_kernel("cpu")(backward)


class Heads(torch.nn.Module):
    def __init__(self, groups: int) -> None:
        super().__init__()
        self.num_key_value_groups = groups


@pytest.mark.usefixtures("reference_kernels")
@pytest.mark.parametrize(
    ("heads", "key_heads", "size", "value_size", "window"),
    [
        pytest.param(4, 4, 8, 8, None, id="plain"),
        pytest.param(4, 2, 8, 8, None, id="grouped heads"),
        pytest.param(4, 2, 8, 8, 4, id="window"),
        pytest.param(4, 4, 8, 8, 14, id="window of the longest sample"),
        pytest.param(4, 1, 12, 12, 1, id="padded head size"),
        pytest.param(2, 2, 24, 16, None, id="narrower values"),
    ],
)
def test_one_call_equals_a_call_per_sample(heads, key_heads, size, value_size, window) -> None:
    torch.manual_seed(0)
    tokens = sum(LENGTHS)
    states = [
        torch.randn(1, count, tokens, width, requires_grad=True)
        for count, width in ((heads, size), (key_heads, size), (key_heads, value_size))
    ]
    weights = torch.randn(1, tokens, heads, value_size)
    compute = partial(
        fused_attention._varlen,
        cu_seqlens=segment_inputs(LENGTHS)["cu_seqlens"],
        max_seqlen=max(LENGTHS),
        scale=0.3,
        window=window,
    )
    results = []
    for call in (
        lambda: fused_attention._with_equal_heads(compute, *states),
        lambda: attention.packed_attention(
            Heads(heads // key_heads),
            *states,
            None,
            scaling=0.3,
            segment_lengths=LENGTHS,
            sliding_window=window,
        )[0],
    ):
        result = call()
        results.append((result, *torch.autograd.grad(result, states, weights)))
    for fused, per_sample in zip(*results, strict=True):
        torch.testing.assert_close(fused, per_sample, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("reference_kernels")
@pytest.mark.parametrize(
    "family",
    [
        "mistral",
        "gemma3_text",
        "deepseek_v3",
        *(
            pytest.param(family, marks=pytest.mark.soak)
            for family in sorted(
                FAMILIES.keys() - PADDED_FAMILIES - {"mistral", "gemma3_text", "deepseek_v3"}
            )
        ),
    ],
)
def test_families_compute_the_same_with_one_call(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, numbers = FAMILIES[family]
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **TOKENS, **numbers))
    model.eval()
    if attention.install(model, VARLEN) is None:
        pytest.skip("the family does not use scaled_dot_product_attention")
    mixers.install(model)
    lengths = (20, 3, 33, 20)  # longer and shorter than the windows of the families
    row = {
        "input_ids": torch.randint(3, 8192, (1, sum(lengths))),
        "position_ids": torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0),
        **segment_inputs(lengths),
    }
    calls = []
    monkeypatch.setattr(fused_attention, "_varlen", count_calls(fused_attention._varlen, calls))
    results = []
    for device, dtypes in (("cuda", ()), ("cpu", (torch.float32,))):
        monkeypatch.setattr(fused_attention, "_FUSED_DEVICE", device)
        monkeypatch.setattr(fused_attention, "_FUSED_DTYPES", dtypes)
        try:
            logits = model(**row, use_cache=False).logits
        except NotImplementedError:
            pytest.skip("the family has soft-capped logits or sinks")
        model.zero_grad()
        logits.square().mean().backward()
        gradients = [param.grad for param in model.parameters() if param.grad is not None]
        results.append((logits.detach(), [gradient.clone() for gradient in gradients]))
    assert calls
    (expected, expected_gradients), (logits, gradients) = results
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    for gradient, other in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-3, atol=1e-5)


def count_calls(function, calls):
    def counted(*args, **kwargs):
        calls.append(kwargs)
        return function(*args, **kwargs)

    return counted


def trace_calls(window: int | None) -> list[dict[str, Any]]:
    """Return the arguments of the calls of the kernel in forward and backward of a model on a
    simulated GPU, under autocast."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode
    from transformers import MistralConfig, MistralForCausalLM

    from paceline.planner.devices import find_device
    from paceline.simulation.cuda import simulate_cuda

    simulate_cuda(find_device("H100-SXM")[0], 1)
    calls = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func.name()
            if "varlen_attn" in name or "scaled_dot_product" in name:
                calls.append((name, args))
            return func(*args, **(kwargs or {}))

    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"):
        model = MistralForCausalLM(
            MistralConfig(
                hidden_size=64, intermediate_size=96, num_hidden_layers=2, vocab_size=97,
                num_attention_heads=4, num_key_value_heads=2, sliding_window=window,
            )
        )  # fmt: skip
        assert attention.install(model, VARLEN) == "sdpa"
        ids = torch.zeros((1, sum(LENGTHS)), dtype=torch.int64)
        segments = segment_inputs(LENGTHS, "cuda")
        with torch.autocast("cuda", torch.bfloat16), Recorder():
            logits = model(input_ids=ids, position_ids=ids, use_cache=False, **segments).logits
            logits.float().sum().backward()
    return [
        {
            "name": name,
            "shapes": [tuple(tensor.shape) for tensor in args[:3]],
            "dtypes": {tensor.dtype for tensor in args[:3]},
            "devices": {tensor.device.type for tensor in args if isinstance(tensor, torch.Tensor)},
            "numbers": [value for value in args if not isinstance(value, torch.Tensor)],
        }
        for name, args in calls
    ]


def in_new_process(_env, *args):
    return trace_calls(*args)


@pytest.mark.soak
@pytest.mark.usefixtures("compiled_shim")
def test_model_on_a_gpu_makes_one_call_per_layer() -> None:
    calls = run_ranks(in_new_process, 1, 4, init_process_group=False)[0]
    names = [call["name"].partition("::")[2] for call in calls]
    assert names == ["_varlen_attn"] * 2 + ["_varlen_attn_backward"] * 2
    tokens = sum(LENGTHS)
    for call in calls[:2]:
        assert call["shapes"] == [(tokens, 4, 16), (tokens, 2, 16), (tokens, 2, 16)]
        assert call["dtypes"] == {torch.bfloat16}
        assert call["devices"] == {"cuda"}
        longest, _, is_causal, scale, window, grouped = call["numbers"][:6]
        assert (longest, is_causal, scale, window, grouped) == (14, False, 0.25, [3, 0], True)
