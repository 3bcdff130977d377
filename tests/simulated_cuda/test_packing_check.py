"""The check of packed rows runs the kernel that trains, also with strategies that keep the model on
the CPU until it is split."""

import sys
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from simulated import simulate_values
from torch.nn.attention import varlen
from transformers import Qwen2Config, Qwen2ForCausalLM

from paceline.config.schema import Config
from paceline.models import attention
from paceline.models.checks.packing import choose_packing
from paceline.models.kernels.attention_choice import SDPA, VARLEN

pytestmark = pytest.mark.slow

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
}


def attend_within_samples(query, key, value, ends, *_, **__):
    """Compute what ``torch_attn::_varlen_attn`` computes on a GPU, and return it with the two other
    results of the operator."""
    parts = []
    for start, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        states = (tensor[start:end].transpose(0, 1) for tensor in (query, key, value))
        part = torch.nn.functional.scaled_dot_product_attention(
            *states, is_causal=True, enable_gqa=True
        )
        parts.append(part.transpose(0, 1))
    lse = torch.zeros(query.shape[1], query.shape[0], device=query.device)
    return torch.cat(parts), lse, torch.zeros(2, dtype=torch.uint64, device=query.device)


def attend_to_the_row(query, key, value, ends, *numbers, **options):
    """Mix the samples of a row."""
    row = torch.tensor([0, len(query)], dtype=ends.dtype, device=ends.device)
    return attend_within_samples(query, key, value, row, *numbers, **options)


KERNELS = {"correct": attend_within_samples, "mixes samples": attend_to_the_row}


def check_model_on_cpu(_env, name):
    """Check a model on the CPU for a run on simulated GPUs whose fused kernel is the one of that
    name. Return the rows, the kernel that is installed, and the devices and dtypes that the fused
    kernel was called with."""
    simulate_values()
    calls = []

    def compute(query, *args, **options):
        calls.append((query.device.type, query.dtype))
        return KERNELS[name](query, *args, **options)

    varlen._varlen_attn.register_kernel("cuda")(compute)
    attention.has_varlen = lambda: True
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES))
    config = Config(model="m", dataset="d", train_args={"precision": "bf16-mixed"})
    rows = choose_packing(model, torch.device("cpu"), config, "cuda").rows
    return rows, attention.kernel_of(model), sorted(set(calls), key=str)


@pytest.mark.parametrize(("name", "kernel"), [("correct", VARLEN), ("mixes samples", SDPA)])
def test_kernel_of_the_device_is_checked_with_the_model_on_the_cpu(name, kernel):
    (result,) = run_ranks(check_model_on_cpu, 1, name, init_process_group=False)
    assert result == ("segments", kernel, [("cuda", torch.bfloat16)])


def check_recurrent_model_on_cpu(_env, references):
    """Check a model on the CPU for a run on simulated GPUs, with a reference of the kernel of its
    convolutions. Return the rows, whether that kernel computes them, and the devices and dtypes
    that it was called with."""
    sys.path.insert(0, references)
    import causal_conv1d
    from families import build_model

    simulate_values()
    calls, convolve = [], causal_conv1d.convolve

    def record(x, *args):
        calls.append((x.device.type, x.dtype))
        return convolve(x, *args)

    causal_conv1d.convolve = record
    model = build_model("lfm2")
    config = Config(model="m", dataset="d", train_args={"precision": "bf16-mixed"})
    choice = choose_packing(model, torch.device("cpu"), config, "cuda")
    return choice.rows, choice.in_kernels, sorted(set(calls), key=str)


def test_kernels_of_recurrent_layers_are_checked_with_the_model_on_the_cpu():
    references = Path(__file__).parents[1] / "models" / "kernels" / "reference_kernels"
    (result,) = run_ranks(
        check_recurrent_model_on_cpu, 1, str(references), init_process_group=False
    )
    assert result == ("segments", True, [("cuda", torch.bfloat16)])
