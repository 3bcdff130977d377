"""Experts that two ranks divide compute what the whole experts compute, also for a rank without
tokens, and their gradients are the gradients of the whole."""

import pytest
import torch
from families import build_model
from raised import raises_error
from ranks import run_ranks
from torch import nn

from paceline.core.errors import ConfigError
from paceline.distributed.communicator import Communicator
from paceline.distributed.mesh import ParallelDims
from paceline.models.experts.layers import find_expert_layers
from paceline.strategies.expert.division import ExpertParallelizer, check_experts

#: Numbers of tokens of the two ranks, and the experts of each token.
CASES = {
    "uneven": ((7, 4), [[0, 3], [1, 2], [2, 3], [0, 1]]),
    "no tokens": ((5, 0), [[0, 3], [1, 2]]),
    "one expert": ((6, 3), [[3, 2]]),
}
Results = dict[str, list[float] | float]


def experts_of(name: str) -> nn.Module:
    return find_expert_layers(build_model(name))[0].module


def inputs(case: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    (first, second), choices = CASES[case]
    count = first + second
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(count, 32, generator=generator)
    indices = torch.tensor([choices[token % len(choices)] for token in range(count)])
    return hidden, indices, torch.rand(count, 2, generator=generator)


def compute_part(world: Communicator, name: str, case: str) -> Results:
    """Return this rank's outputs and gradients, and the differences from the whole."""
    world.axes = ParallelDims(data=2, expert=2)
    whole = experts_of(name)
    model = build_model(name)
    divided = ExpertParallelizer(model, world, world.split([[0], [1]]))
    module: nn.Module = find_expert_layers(model)[0].module
    first = CASES[case][0][0]
    own_rows = slice(0, first) if world.rank == 0 else slice(first, None)
    full = [tensor.clone().requires_grad_(tensor.is_floating_point()) for tensor in inputs(case)]
    part = [tensor[own_rows].clone().detach() for tensor in inputs(case)]
    for tensor in (full[0], full[2], part[0], part[2]):
        tensor.requires_grad_()
    expected = whole(*full)
    result = module(*part)
    expected.square().sum().backward()
    result.square().sum().backward()
    pairs = [(result, expected[own_rows]), (part[0].grad, full[0].grad[own_rows])]
    pairs.append((part[2].grad, full[2].grad[own_rows]))
    half = slice(0, 2) if world.rank == 0 else slice(2, 4)
    for key, parameter in module.named_parameters():
        pairs.append((parameter.grad, dict(whole.named_parameters())[key].grad[half]))
    distances = [float((left - right).norm() / (right.norm() + 1e-9)) for left, right in pairs]
    return {"distances": distances, "sent": divided.rows.sent, "passes": divided.rows.passes}


@pytest.mark.parametrize("case", CASES)
def test_parts_are_equal_to_the_whole(case: str) -> None:
    first, second = run_ranks(compute_part, 2, "mixtral", case)
    assert max(first["distances"] + second["distances"]) < 1e-6
    (counts, choices) = CASES[case]
    tokens = [choices[token % len(choices)] for token in range(sum(counts))]
    away = sum(expert >= 2 for chosen in tokens[: counts[0]] for expert in chosen)
    assert first["sent"] == away
    assert first["passes"] == second["passes"] == 1


@pytest.mark.soak
@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3", "qwen3_5_moe_text", "olmoe"])
def test_families_are_equal_to_the_whole(name: str) -> None:
    for results in run_ranks(compute_part, 2, name, "uneven"):
        assert max(results["distances"]) < 1e-6


@pytest.mark.parametrize(
    ("name", "size", "code"),
    [
        ("qwen2", 2, "expert-without-experts"),
        ("llama4_text", 2, "expert-without-plan"),
        ("mixtral", 3, "expert-does-not-divide-experts"),
    ],
)
def test_other_models_are_refused(name: str, size: int, code: str) -> None:
    with raises_error(ConfigError, code=code):
        check_experts(build_model(name), size)
    assert len(check_experts(build_model("mixtral"), 4)) == 2
