"""Estimates of activation memory and FLOPs, compared with autograd and torch's FLOP counter."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from paceline.config.schema import Config
from paceline.models import attention
from paceline.models.adapters.lora import add_adapters
from paceline.models.shape.activations import language_activations
from paceline.models.shape.dims import dims_of
from paceline.models.shape.flops import language_flops
from paceline.models.transforms.activation_checkpointing import checkpoint_activations

WIDTHS = {
    "model_type": "qwen2", "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 4, "intermediate_size": 352, "vocab_size": 2048,
    "tie_word_embeddings": True,
}  # fmt: skip
LENGTHS, LABELS = (150, 106), 130


def build(config: Config) -> Any:
    dtype = (
        torch.bfloat16
        if config.train_args.precision == "bf16-mixed" and config.lora.enable
        else torch.float32
    )
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**WIDTHS), dtype=dtype)
    if config.lora.enable:
        model = add_adapters(model, config)
    checkpoint_activations(model, config.train_args.recomputation)
    attention.install(model.get_base_model() if config.lora.enable else model)
    return model.train()


def forward(model: Any, config: Config) -> torch.Tensor:
    tokens = sum(LENGTHS)
    ids = torch.arange(tokens).remainder(2048).unsqueeze(0)
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).unsqueeze(0)
    inputs = {
        "input_ids": ids,
        "position_ids": positions,
        "segment_lengths": LENGTHS,
        "use_cache": False,
    }
    with (
        torch.autocast("cpu", torch.bfloat16)
        if config.train_args.precision == "bf16-mixed"
        else nullcontext()
    ):
        logits = model(**inputs, logits_to_keep=torch.arange(LABELS)).logits
        return functional.cross_entropy(
            logits.flatten(0, 1).float(), torch.zeros(LABELS).long(), reduction="sum"
        )


def measure_saved_bytes(model: Any, config: Config) -> int:
    """Return the bytes of the distinct storages that autograd saves for backward, not counting
    weights and their low-precision copies."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    shapes = {tuple(parameter.shape) for parameter in model.parameters()} | {
        tuple(parameter.t().shape) for parameter in model.parameters() if parameter.dim() == 2
    }
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights and tuple(tensor.shape) not in shapes:
            # Keep a reference, so that no address is reused.
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward(model, config)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("recompute", ["none", "full", 2], ids=["saved", "recomputed", "second"])
def test_estimated_activations_match_autograd(lora: bool, bf16: bool, recompute: str | int) -> None:
    config = Config(
        model="m",
        dataset="d",
        lora={"enable": lora, "dropout": 0.05},
        train_args={
            "precision": "bf16-mixed" if bf16 else "32",
            "gradient_checkpointing": recompute,
        },
    )
    dims = dims_of(WIDTHS)
    assert dims is not None
    estimate = language_activations(dims, config, sum(LENGTHS), LABELS, mask_bytes=4)
    assert estimate.saved == pytest.approx(measure_saved_bytes(build(config), config), rel=0.08)
    assert estimate.peak() > estimate.saved


def test_liger_kernels_save_fewer_activations() -> None:
    dims = dims_of(WIDTHS)
    assert dims is not None
    plain, liger = (
        language_activations(
            dims,
            Config(
                model="m",
                dataset="d",
                train_args={"use_liger_kernel": use_liger, "precision": "bf16-mixed"},
            ),
            tokens=1,
            labels=0,
        ).blocks[0]
        for use_liger in (False, True)
    )
    # Two norms save one float32 copy less, and the MLP does not save the activation of its gate.
    assert plain - liger == 2 * 4 * 128 + 2 * 352


def test_loss_in_chunks_needs_less_memory() -> None:
    """The estimate for a large vocabulary: the logits of one chunk, and the gradient of the head,
    unless it is frozen."""
    dims = dims_of({**WIDTHS, "vocab_size": 150_000})
    assert dims is not None
    tokens, chunk = 4096, 832
    estimates = {}
    for lora in (False, True):
        for size in ("auto", 0):
            config = Config(
                model="m",
                dataset="d",
                lora={"enable": lora},
                train_args={"precision": "32", "loss_chunk_size": size},
            )
            estimates[lora, size] = language_activations(dims, config, tokens, tokens)
    assert estimates[False, 0].loss.peak == 3 * 4 * 150_000 * tokens
    kept = 4 * 128 * (150_000 + tokens)
    assert estimates[False, "auto"].loss.peak == 4 * 150_000 * chunk + kept
    assert estimates[False, "auto"].loss.saved == kept
    assert estimates[True, "auto"].loss.peak == 4 * 150_000 * chunk + 4 * 128 * tokens
    on_cpu = language_activations(
        dims,
        Config(model="m", dataset="d", lora={"enable": True}),
        tokens,
        tokens,
        device_type="cpu",
    )
    assert on_cpu.loss.peak == 4 * 150_000 * 384 + 4 * 128 * tokens
    saved = estimates[False, 0].peak() - estimates[False, "auto"].peak()
    assert saved == estimates[False, 0].loss.peak - estimates[False, "auto"].loss.peak


def test_estimated_flops_match_flop_counter() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    config = Config(model="m", dataset="d")
    model = build(config)
    with FlopCounterMode(display=False) as counter:
        forward(model, config).backward()
    measured_flops = counter.get_total_flops()
    dims = dims_of(WIDTHS)
    assert dims is not None
    squares = sum(length**2 for length in LENGTHS)
    estimate = language_flops(dims, config, sum(LENGTHS), LABELS, squares / sum(LENGTHS))
    # torch counts fused attention without the causal mask, or not at all: both are within 10% for
    # these lengths.
    assert estimate == pytest.approx(measured_flops, rel=0.1)


def test_dims_of_other_architectures() -> None:
    gpt2 = dims_of(
        {
            "model_type": "gpt2",
            "n_embd": 768,
            "n_layer": 12,
            "n_head": 12,
            "vocab_size": 50257,
            "n_positions": 1024,
        }
    )
    assert gpt2 is not None
    assert (gpt2.feed_forward, gpt2.gated, gpt2.tied) == (3072, False, True)
    assert gpt2.parameters_at_most == pytest.approx(124_439_808, rel=0.01)
    assert gpt2.parameters_at_most >= 124_439_808
    assert dims_of({"model_type": "resnet", "hidden_sizes": [256, 512]}) is None
