"""What torch's kernel behind ``varlen_attn`` computes on a GPU, as documented, for the CPU."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.attention import varlen


def samples(
    query: torch.Tensor,
    key: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    window: list[int],
    scale: float,
) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Yield (queries, keys, scores) of each sample. The last query is aligned with the last key."""
    groups = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(groups, dim=1)
    left, right = window
    ends = zip(cu_q.tolist(), cu_q.tolist()[1:], cu_k.tolist(), cu_k.tolist()[1:], strict=False)
    for q_start, q_end, k_start, k_end in ends:
        queries, keys = slice(q_start, q_end), slice(k_start, k_end)
        scores = torch.einsum("qhd,khd->qhk", query[queries], key[keys]) * scale
        num_queries, num_keys = q_end - q_start, k_end - k_start
        own = torch.arange(num_queries).unsqueeze(1) + num_keys - num_queries
        distance = torch.arange(num_keys) - own
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if left >= 0:
            hidden |= distance < -left
        if right >= 0:
            hidden |= distance > right
        yield queries, keys, scores.masked_fill(hidden.unsqueeze(1), -torch.inf)


def forward(
    query, key, value, cu_q, cu_k, max_q, max_k, causal, scale, window, enable_gqa=False, *_: Any
):
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert (max_q, max_k) == (cu_q.diff().max(), cu_k.diff().max())
    assert enable_gqa == (query.shape[1] != key.shape[1])
    assert causal == (tuple(window) == (-1, 0))
    assert query.shape[2] == key.shape[2] == value.shape[2]
    assert query.shape[2] % 8 == 0
    values = value.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    output = torch.empty_like(query)
    lse = torch.empty(query.shape[1], query.shape[0])
    for queries, keys, scores in samples(query, key, cu_q, cu_k, window, scale):
        lse[:, queries] = scores.logsumexp(-1).T
        output[queries] = torch.einsum("qhk,khd->qhd", scores.softmax(-1), values[keys])
    return output, lse, torch.zeros(2, dtype=torch.uint64)


def backward(
    grad, query, key, value, out, lse, cu_q, cu_k, max_q, max_k, causal, rng, scale, window
):
    assert rng.dtype == torch.uint64
    assert lse.shape == (query.shape[1], query.shape[0])
    assert lse.is_contiguous()
    groups = query.shape[1] // key.shape[1]
    values, all_keys = (each.repeat_interleave(groups, dim=1) for each in (value, key))
    inner = (grad * out).sum(-1, keepdim=True)
    grads = [torch.zeros_like(each) for each in (query, all_keys, values)]
    for queries, keys, scores in samples(query, key, cu_q, cu_k, window, scale):
        weights = (scores - lse[:, queries].T.unsqueeze(-1)).exp()
        of_scores = torch.einsum("qhd,khd->qhk", grad[queries], values[keys]) - inner[queries]
        of_scores = of_scores * weights * scale
        grads[0][queries] += torch.einsum("qhk,khd->qhd", of_scores, all_keys[keys])
        grads[1][keys] += torch.einsum("qhk,qhd->khd", of_scores, query[queries])
        grads[2][keys] += torch.einsum("qhk,qhd->khd", weights, grad[queries])
    shared = (each.unflatten(1, (key.shape[1], -1)).sum(2) for each in grads[1:])
    return grads[0], *shared


def register() -> None:
    """Give the operators behind varlen_attn a kernel for the CPU, which torch does not have."""
    varlen._varlen_attn.register_kernel("cpu")(forward)
    varlen._varlen_attn_backward.register_kernel("cpu")(backward)
