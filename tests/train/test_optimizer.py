"""Optimizers and learning rate schedules: schedules match transformers at every step, and weight
decay applies to matrices only."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers.optimization import get_scheduler

from paceline.config.derive import derive, optimizer_bytes_per_element
from paceline.config.schema import Config
from paceline.config.schema.train_args import TrainArgs
from paceline.train.optimizer import Schedule, build_optimizer, check_schedule, matrices_of

KINDS = ["adamw", "adam", "sgd", "rmsprop", "adagrad", "adafactor"]
SCHEDULES: list[tuple[str, dict[str, Any]]] = [
    ("linear", {}), ("cosine", {}), ("cosine", {"num_cycles": 1.5}),
    ("cosine_with_restarts", {"num_cycles": 3}),
    ("cosine_with_min_lr", {"min_lr": 1e-4}), ("cosine_with_min_lr", {"min_lr_rate": 0.2}),
    ("polynomial", {"power": 2.0}),
    ("constant", {}), ("constant_with_warmup", {}), ("inverse_sqrt", {}),
    ("warmup_stable_decay", {"num_decay_steps": 6}),
]  # fmt: skip


class SmallModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.linear = nn.Linear(4, 3)
        self.norm = nn.LayerNorm(3)
        self.conv = nn.Conv1d(3, 2, 2)


def make_optimizer(args: TrainArgs, rate: float = 1e-3) -> tuple[SmallModel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = SmallModel()
    return model, build_optimizer(args, rate, list(model.named_parameters()), matrices_of(model))


def make_schedule(kind: str, kwargs: dict[str, Any], steps: int = 20) -> Schedule:
    args = {
        "lr_scheduler_type": kind,
        "lr_scheduler_kwargs": kwargs,
        "max_steps": steps,
        "warmup_steps": 4,
    }
    config = Config(model="m", dataset="d", train_args={**args, "learning_rate": 1e-3})
    derived = derive(config, world_size=1, num_train=8, num_eval=0, default_learning_rate=1.0)
    return Schedule(make_optimizer(config.train_args)[1], config.train_args, derived)


@pytest.mark.parametrize(("kind", "kwargs"), SCHEDULES)
def test_learning_rate_matches_transformers_at_every_step(
    kind: str, kwargs: dict[str, Any]
) -> None:
    _, optimizer = make_optimizer(TrainArgs())
    reference = get_scheduler(
        kind,
        optimizer,
        num_warmup_steps=4,
        num_training_steps=20,
        scheduler_specific_kwargs=dict(kwargs),
    )
    expected = []
    for _ in range(20):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        reference.step()
    actual = make_schedule(kind, kwargs)
    assert [actual.set_step(step) for step in range(20)] == pytest.approx(
        expected, rel=1e-12, abs=1e-18
    )
    for step in (17, 3, 11):  # steps can be set in any order
        assert actual.set_step(step) == pytest.approx(expected[step], rel=1e-12, abs=1e-18)
        assert {group["lr"] for group in actual.optimizer.param_groups} == {actual.set_step(step)}


@pytest.mark.parametrize("kind", ["cosine_with_min_lr", "warmup_stable_decay"])
def test_schedules_have_defaults_for_required_arguments(kind: str) -> None:
    actual = make_schedule(kind, {})
    rates = [actual.set_step(step) for step in range(20)]
    assert max(rates) == pytest.approx(1e-3)
    assert 0 <= rates[-1] < 1e-3


def test_rejects_unknown_schedule_arguments() -> None:
    assert check_schedule(TrainArgs()) is None
    assert (
        check_schedule(TrainArgs(lr_scheduler_type="cosine", lr_scheduler_kwargs={"num_cycles": 1}))
        is None
    )
    message = check_schedule(
        TrainArgs(lr_scheduler_type="cosine", lr_scheduler_kwargs={"min_lr": 1})
    )
    assert message == "unknown keys min_lr: `cosine` accepts num_cycles"
    assert "no arguments" in str(
        check_schedule(TrainArgs(lr_scheduler_type="linear", lr_scheduler_kwargs={"power": 1}))
    )


@pytest.mark.parametrize("kind", KINDS)
def test_weight_decay_applies_to_matrices_only(kind: str) -> None:
    model, optimizer = make_optimizer(TrainArgs(optim=kind, weight_decay=0.1))
    decay = {
        id(param): group["weight_decay"]
        for group in optimizer.param_groups
        for param in group["params"]
    }
    assert {name: decay[id(param)] for name, param in model.named_parameters()} == {
        "embed.weight": 0.1, "linear.weight": 0.1, "linear.bias": 0.0, "norm.weight": 0.0,
        "norm.bias": 0.0, "conv.weight": 0.1, "conv.bias": 0.0,
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["adamw", "adafactor"])
def test_weight_decay_is_decoupled(kind: str) -> None:
    # With zero gradients, decoupled decay shrinks the weights by learning rate × decay. An L2
    # penalty in the gradient would not.
    model, optimizer = make_optimizer(TrainArgs(optim=kind, weight_decay=0.1), rate=0.5)
    initial = {name: param.detach().clone() for name, param in model.named_parameters()}
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    torch.testing.assert_close(model.linear.weight, initial["linear.weight"] * (1 - 0.5 * 0.1))
    torch.testing.assert_close(model.norm.weight, initial["norm.weight"])


@pytest.mark.parametrize("kind", KINDS)
def test_settings_are_passed_to_optimizer_and_loss_decreases(kind: str) -> None:
    args = TrainArgs(optim=kind, adam_beta1=0.8, adam_beta2=0.95, adam_epsilon=1e-6, momentum=0.5)
    model, optimizer = make_optimizer(args, rate=1e-2)
    settings = optimizer.param_groups[0]
    assert settings["lr"] == 1e-2
    if kind in ("adamw", "adam"):
        assert (settings["betas"], settings["eps"]) == ((0.8, 0.95), 1e-6)
    if kind in ("sgd", "rmsprop"):
        assert settings["momentum"] == 0.5
    losses = []
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    for _ in range(5):
        loss = (model.norm(model.linear(x)) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("kind", KINDS[:-1])
def test_optimizer_state_size_matches_estimate(kind: str) -> None:
    args = TrainArgs(optim=kind)
    model, optimizer = make_optimizer(args)
    model.linear(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    state = optimizer.state[model.linear.weight]
    state_bytes = sum(
        value.numel() * value.element_size()
        for value in state.values()
        if torch.is_tensor(value) and value.dim()
    )
    assert state_bytes == optimizer_bytes_per_element(args) * model.linear.weight.numel()


def test_single_parameter_group_without_vectors() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    assert (
        len(
            build_optimizer(
                TrainArgs(weight_decay=0.1), 1e-3, [("w", weight)], frozenset({"w"})
            ).param_groups
        )
        == 1
    )
