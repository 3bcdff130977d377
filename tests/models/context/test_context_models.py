"""Models whose rows are divided among ranks have the loss and gradients of one rank."""

from typing import Any

import pytest
import torch
from families import build_model
from ranks import run_ranks
from torch.nn import functional

from paceline.data.collate import segment_inputs
from paceline.data.context.rows import divide_row
from paceline.models.context.attention import install_context
from paceline.models.context.choice import GATHER, METHODS
from paceline.models.context.place import ContextPlace

#: Five documents, longer and shorter than the windows of the families, and one of a single token.
DOCUMENTS = (7, 41, 1, 22, 13)
SHORT_ROW = (2, 1)
FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma3_text", "phi3", "olmo2", "granite", "smollm3",
    "glm4", "cohere2", "deepseek_v3", "gpt2",
)  # fmt: skip
#: Families with soft-capped scores or sinks.
OWN_ATTENTION = ("gemma2", "gpt_oss")


def documents(lengths: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 8192, (1, length), generator=generator) for length in lengths]


def backward(logits: torch.Tensor, targets: torch.Tensor) -> float:
    """Add the gradients of the summed loss, and return it. A target of -100 has no loss."""
    loss = functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
    )
    loss.backward()
    return loss.item()


def following(ids: torch.Tensor) -> torch.Tensor:
    return torch.cat((ids[:, 1:], torch.full((1, 1), -100)), dim=1)


def double_model(name: str) -> Any:
    """Return a model that computes in float64, except for some norms and routers."""
    model = build_model(name).eval()
    model.set_experts_implementation("eager")  # the default has no kernel for float64
    return model.double()


def one_rank(name: str, lengths: tuple[int, ...]) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss and gradients with each document in a row of its own."""
    model = double_model(name)
    loss = sum(
        backward(model(input_ids=ids, use_cache=False).logits, following(ids))
        for ids in documents(lengths)
    )
    return loss, gradients(model)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {
        key: parameter.grad
        for key, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def share(
    place: ContextPlace, name: str, method: str, lengths: tuple[int, ...], recompute: bool = False
) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss and gradients of one rank's tokens."""
    model = double_model(name)
    install_context(model, place, method, "sdpa")
    if recompute:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = documents(lengths)
    row = torch.cat(ids, dim=1)
    targets = torch.cat([following(each) for each in ids], dim=1)
    positions = torch.cat([torch.arange(length) for length in lengths])
    index = torch.from_numpy(divide_row(lengths, place.group.size).positions(place.group.rank))
    is_filler = len(index) == 0
    if is_filler:
        index = torch.zeros(1, dtype=torch.int64)
    targets = targets[:, index]
    if is_filler:
        targets = torch.full_like(targets, -100)
    logits = model(
        input_ids=row[:, index],
        position_ids=positions[index].unsqueeze(0),
        use_cache=False,
        **segment_inputs(lengths),
    ).logits
    return backward(logits, targets), gradients(model)


def shares(world, names, methods, rows, recompute=False):
    place = ContextPlace(world)
    return {
        (name, method, lengths): share(place, name, method, lengths, recompute)
        for name in names
        for method in methods
        for lengths in rows
    }


def check(names, methods, size, rows=(DOCUMENTS, SHORT_ROW), recompute=False) -> None:
    results = run_ranks(shares, size, names, methods, rows, recompute)
    for key in results[0]:
        name, _, lengths = key
        loss, expected = one_rank(name, lengths)
        parts = [result[key] for result in results]
        assert sum(part[0] for part in parts) == pytest.approx(loss, rel=1e-9), key
        for parameter, gradient in expected.items():
            total = sum(
                part[1].get(parameter, torch.zeros_like(gradient)) for _, part in enumerate(parts)
            )
            scale = gradient.abs().max().clamp(min=1e-3)  # some norms compute in float32
            assert (total - gradient).abs().max() <= 1e-6 * scale, (key, parameter)


def test_window_and_grouped_heads_by_ring() -> None:
    check(["mistral"], ["ring"], 2)


@pytest.mark.soak
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_has_gradients_of_one_rank(name: str, size: int) -> None:
    check([name], METHODS, size)


@pytest.mark.soak
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", OWN_ATTENTION)
def test_soft_caps_and_sinks_by_gather(name: str, size: int) -> None:
    check([name], [GATHER], size)
