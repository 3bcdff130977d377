"""Activation checkpointing: the same numbers, less memory."""

from typing import Any

import pytest
import torch
from raised import raises_error
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.models import attention
from paceline.models.adapters.lora import add_adapters
from paceline.models.blocks import base_model
from paceline.models.shape.activations import language_activations
from paceline.models.shape.dims import dims_of
from paceline.models.transforms import activation_checkpointing
from paceline.models.transforms.activation_checkpointing import checkpoint_activations

WIDTHS = {
    "model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 160, "vocab_size": 256,
    "tie_word_embeddings": True,
}  # fmt: skip
LENGTHS = (30, 18)
SETTINGS = ("none", "full", "selective", 3)


def make_config(lora: bool, setting: str | int) -> Config:
    return Config(
        model="m",
        dataset="d",
        lora={"enable": lora, "dropout": 0.1, "rank": 2},
        train_args={"gradient_checkpointing": setting},
    )


def make_model(lora: bool) -> Any:
    torch.manual_seed(1)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**WIDTHS))
    attention.install(model)
    return (add_adapters(model, make_config(lora, "none")) if lora else model).train()


def run_forward(model: Any) -> torch.Tensor:
    torch.manual_seed(2)
    out = model(
        input_ids=torch.arange(sum(LENGTHS)).unsqueeze(0),
        position_ids=torch.cat([torch.arange(length) for length in LENGTHS]).unsqueeze(0),
        segment_lengths=LENGTHS,
        use_cache=False,
    )
    return out[0].logsumexp(-1).sum()


class ProductCounter(TorchDispatchMode):
    """Counts matrix products, and the bytes that the selective policy stores."""

    def __init__(self) -> None:
        super().__init__()
        self.products = self.stored_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.products += func in activation_checkpointing._MATRIX_PRODUCTS
        if activation_checkpointing._policy(None, func, *args).name == "MUST_SAVE":  # type: ignore[arg-type]
            self.stored_bytes += sum(
                leaf.nbytes for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)
            )
        return out


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_settings_give_the_same_bits_and_recompute_as_declared(lora: bool) -> None:
    results, products = {}, {}
    for setting in SETTINGS:
        model = make_model(lora)
        checkpoint_activations(model, setting)
        loss = run_forward(model)
        with ProductCounter() as counter:
            loss.backward()
        products[setting] = counter.products
        gradients = {
            name: each.grad for name, each in model.named_parameters() if each.grad is not None
        }
        results[setting] = {"loss": loss.detach(), **gradients}
    for setting in SETTINGS[1:]:
        assert results[setting].keys() == results["none"].keys()
        for name, value in results["none"].items():
            assert torch.equal(results[setting][name], value), (setting, name)
    assert products["none"] < products[3] < products["full"]
    # Of an adapter, the cheap product is repeated.
    assert products["selective"] < products["full"]
    assert lora or products["selective"] == products["none"]


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_predicted_bytes_of_selective_checkpointing(lora: bool) -> None:
    model = make_model(lora)
    with torch.no_grad(), ProductCounter() as counter:
        run_forward(base_model(model).model)  # without the head
    dims = dims_of(WIDTHS)
    assert dims is not None
    tokens = sum(LENGTHS)
    predicted = {
        setting: language_activations(dims, make_config(lora, setting), tokens, tokens)
        for setting in SETTINGS
    }
    inputs = sum(predicted["full"].blocks)
    stored = sum(predicted["selective"].blocks) - inputs
    assert stored == pytest.approx(counter.stored_bytes, rel=0.03)
    saved = [predicted[setting].saved for setting in ("full", "selective", "none")]
    assert saved == sorted(saved)
    assert predicted["full"].saved < predicted[3].saved < predicted["none"].saved


class Recomputing(nn.Module):
    """A model with its own method, which gets the arguments of torch's checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, object]
    ) -> None:
        self.arguments = gradient_checkpointing_kwargs


def test_models_of_other_kinds() -> None:
    model = Recomputing()
    checkpoint_activations(model, "selective")
    assert set(model.arguments) == {"use_reentrant", "context_fn"}
    with raises_error(ConfigError, code="no-blocks"):
        checkpoint_activations(model, 2)
    with raises_error(ConfigError, code="no-blocks"):
        checkpoint_activations(nn.Linear(2, 2), "full")


def test_true_and_false_are_full_and_none() -> None:
    values = {
        True: "full",
        False: "none",
        "true": "full",
        3: 3,
        "selective": "selective",
    }
    for value, setting in values.items():
        args = Config(
            model="m", dataset="d", train_args={"gradient_checkpointing": value}
        ).train_args
        assert args.gradient_checkpointing == setting
