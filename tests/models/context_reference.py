"""Attention and gradients of a divided row, against the whole row on one rank."""

from dataclasses import dataclass
from typing import Any

import torch

from paceline.data.collate import segment_inputs
from paceline.data.context.rows import divide_row
from paceline.models.attention import packed_attention
from paceline.models.context.attention import context_attention
from paceline.models.context.blocks import ring_steps
from paceline.models.context.gather import grouped_heads
from paceline.models.context.kernels import BlockKernel, MergedOutput, split_runs, take
from paceline.models.context.place import ContextPlace
from paceline.models.context.ring import merge


@dataclass(frozen=True)
class Case:
    """A layer's attention over one row."""

    lengths: tuple[int, ...]
    heads: int = 4
    key_heads: int = 4
    head_size: int = 8
    value_size: int = 8
    window: int | None = None
    scaling: float | None = None
    dtype: torch.dtype = torch.float32


def states_of(case: Case) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(case.lengths))
    tokens = sum(case.lengths)
    shapes = (
        (case.heads, case.head_size),
        (case.key_heads, case.head_size),
        (case.key_heads, case.value_size),
        (case.heads, case.value_size),  # the gradient of the output
    )
    return [
        torch.randn(1, heads, tokens, size, generator=generator).to(case.dtype)
        for heads, size in shapes
    ]


def whole_row(case: Case) -> list[torch.Tensor]:
    """Return the output [1, heads, tokens, size] and the gradients of queries, keys and values."""
    *states, grad = states_of(case)
    states = [state.requires_grad_() for state in states]
    output, _ = packed_attention(
        grouped_heads(case.heads, case.key_heads),
        *states,
        None,
        scaling=case.scaling,
        sliding_window=case.window,
        **segment_inputs(case.lengths),
    )
    output = output.transpose(1, 2)
    return [output.detach(), *torch.autograd.grad(output, states, grad)]


def share(case: Case, place: ContextPlace, method: str, **inputs: Any) -> list[torch.Tensor]:
    """Return what :func:`whole_row` returns, for the tokens of one rank."""
    positions = torch.from_numpy(
        divide_row(case.lengths, place.group.size).positions(place.group.rank)
    )
    count = len(positions)
    index = positions if count else torch.zeros(1, dtype=torch.int64)  # a filler
    *states, grad = [state[:, :, index] for state in states_of(case)]
    states = [state.requires_grad_() for state in states]
    inputs = {
        "kernel": "sdpa",
        "scaling": case.scaling,
        "sliding_window": case.window,
        **inputs,
    }
    segments = segment_inputs(case.lengths)
    output, _ = context_attention(
        torch.nn.Module(), *states, None, place=place, method=method, **segments, **inputs,
    )  # fmt: skip
    output = output.transpose(1, 2)
    results = [output.detach(), *torch.autograd.grad(output, states, grad)]
    if count == 0:
        assert not any(result.any() for result in results)
    return [result[:, :, :count] for result in results]


def difference(
    case: Case, expected: list[torch.Tensor], results: list[list[torch.Tensor]]
) -> float:
    """Return the largest difference between the results of all ranks and the results of the whole
    row, in units of the largest element if that is above 1."""
    division = divide_row(case.lengths, len(results))
    largest = 0.0
    for rank, parts in enumerate(results):
        positions = torch.from_numpy(division.positions(rank))
        for whole, part in zip(expected, parts, strict=True):
            assert part.dtype == whole.dtype
            if len(positions):
                error = (whole[:, :, positions] - part).abs().max() / whole.abs().max().clamp(min=1)
                largest = max(largest, float(error))
    return largest


def rank_by_rank(
    case: Case, size: int, kernel: BlockKernel, device: str = "cpu"
) -> list[list[torch.Tensor]]:
    """Return what :func:`share` returns on each rank by ring attention, computed by one process."""
    query, key, value, grad = (
        state.to(device).squeeze(0).transpose(0, 1) for state in states_of(case)
    )
    scale = case.head_size**-0.5 if case.scaling is None else case.scaling
    division = divide_row(case.lengths, size)
    own = [torch.from_numpy(division.positions(rank)).to(device) for rank in range(size)]
    key_grad, value_grad = (torch.zeros_like(each, dtype=torch.float32) for each in (key, value))
    outputs, query_grads = [], []
    for rank in range(size):
        queries = query[own[rank]]
        merged = torch.zeros_like(grad[own[rank]], dtype=torch.float32)
        lse = torch.full(merged.shape[:2], -torch.inf, device=device)
        steps = ring_steps(case.lengths, size, rank, case.window)
        received = [take(own[step.source], step.received or [(0, 0)]) for step in steps]
        for step, index in zip(steps, received, strict=True):
            states = queries, key[index], value[index]
            for part in kernel.forward(states, step.blocks, scale):
                for tokens, (output, each) in split_runs(part.queries, part.output, part.lse):
                    merge(merged[tokens], lse[tokens], output, each)
        outputs.append(merged.to(query.dtype))
        whole = MergedOutput(outputs[-1], lse, grad[own[rank]])
        query_grad = torch.zeros_like(queries, dtype=torch.float32)
        for step, index in zip(steps, received, strict=True):
            states = queries, key[index], value[index]
            for grads in kernel.backward(states, step.blocks, scale, whole):
                for tokens, (each,) in split_runs(grads.queries, grads.query_grad):
                    query_grad[tokens] += each
                pair = grads.key_grad, grads.value_grad
                for tokens, (of_keys, of_values) in split_runs(grads.keys, *pair):
                    key_grad[index[tokens]] += of_keys
                    value_grad[index[tokens]] += of_values
        query_grads.append(query_grad.to(query.dtype))
    results = []
    for rank in range(size):
        grads = (each[own[rank]].to(query.dtype) for each in (key_grad, value_grad))
        parts = [outputs[rank], query_grads[rank], *grads]
        results.append([part.transpose(0, 1).unsqueeze(0).cpu() for part in parts])
    return results
