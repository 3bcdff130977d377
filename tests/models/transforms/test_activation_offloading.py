"""Activation offloading: the same bits, and activations in host memory between forward and
backward."""

import weakref

import pytest
import torch
from raised import raises_error
from test_activation_checkpointing import (
    LENGTHS,
    WIDTHS,
    make_config,
    make_model,
    run_forward,
)
from torch import nn

from paceline.config.schema.parallel import Parallel
from paceline.core.errors import ConfigError
from paceline.models.shape.activations import language_activations
from paceline.models.shape.dims import dims_of
from paceline.models.transforms import activation_offloading
from paceline.models.transforms.activation_checkpointing import checkpoint_activations
from paceline.models.transforms.activation_offloading import (
    ActivationOffloader,
    offload_activations,
)

ON = Parallel(cpu_offload="activations")
#: Micro-batches of a step.
ACCUMULATION = 2


def step(
    lora: bool, setting: str | int, settings: Parallel
) -> tuple[list[torch.Tensor], ActivationOffloader | None]:
    """Return losses and gradients of a step, and what has offloaded its activations."""
    model = make_model(lora)
    checkpoint_activations(model, setting)
    offloader = offload_activations(model, settings)
    results = []
    for _ in range(ACCUMULATION):
        loss = run_forward(model)
        loss.backward()
        results.append(loss.detach())
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    return [*results, *gradients], offloader


@pytest.mark.parametrize("setting", ["none", "full", 3])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_gives_the_same_bits_and_offloads_the_predicted_bytes(
    lora: bool, setting: str | int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activation_offloading, "MIN_STORAGE_BYTES", 256)
    plain, nothing = step(lora, setting, Parallel())
    offloaded, offloader = step(lora, setting, ON)
    assert nothing is None
    assert len(plain) == len(offloaded)
    assert all(map(torch.equal, plain, offloaded))
    dims = dims_of(WIDTHS)
    assert dims is not None
    tokens = sum(LENGTHS)
    config = make_config(lora, setting)
    predicted = language_activations(dims, config, tokens, tokens, mask_bytes=4).on_host
    assert offloader is not None
    # With LoRA, the first block's input has no gradient, so less of the block is saved.
    tolerance = 0.1 if lora else 0.001
    assert offloader.offloaded_bytes == pytest.approx(ACCUMULATION * predicted, rel=tolerance)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            rows = block(rows)
        return rows


@pytest.mark.parametrize("settings", [Parallel(), ON], ids=["kept", "offloaded"])
def test_frees_the_activations_of_all_blocks_but_the_last(settings: Parallel) -> None:
    model = Layers()
    offload_activations(model, settings)
    inputs: list[weakref.ref[torch.UntypedStorage]] = []
    for block in model.blocks:
        block.register_forward_pre_hook(
            lambda _, args: inputs.append(weakref.ref(args[0].untyped_storage()))
        )
    out = model(torch.ones(64, 32))
    exists = [reference() is not None for reference in inputs]
    assert exists == ([True, True, True] if settings != ON else [False, False, True])
    out.sum().backward()
    assert [reference() is not None for reference in inputs] == [False, False, False]


def test_second_forward_before_backward() -> None:
    model, plain = Layers(), Layers()
    plain.load_state_dict(model.state_dict())
    offload_activations(model, ON)
    rows = torch.ones(64, 32)
    for each in (model, plain):
        (each(rows).square().sum() + each(2 * rows).sum()).backward()
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(param.grad, expected.grad)  # type: ignore[arg-type]


def test_model_without_blocks_is_refused() -> None:
    with raises_error(ConfigError, code="no-blocks-to-offload"):
        offload_activations(nn.Linear(2, 2), ON)
