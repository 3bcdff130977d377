"""Optimizers and learning rate schedules: schedules match transformers at every step, and weight
decay applies to matrices only."""

import inspect
import sys
from typing import Any

import pytest
import torch
from raised import raises_error
from torch import nn
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION, get_scheduler
from transformers.trainer_utils import SchedulerType

from paceline.config.derive import derive, optimizer_bytes_per_element
from paceline.config.packages import check_optimizer_package
from paceline.config.schema import Config
from paceline.config.schema.schedules import ARGUMENTS, LENGTH, schedule_share
from paceline.config.schema.train_args import TrainArgs
from paceline.core.errors import ConfigError
from paceline.distributed.communicator import Communicator
from paceline.distributed.environment import RankEnv
from paceline.distributed.torch_compat import takes_found_inf
from paceline.models.blocks import hidden_matrices
from paceline.models.shape.record import OptimizerMemory
from paceline.parallel.optimizer_state import optimizer_tensors
from paceline.parallel.strategy import make_strategy
from paceline.train.optimizers import blockwise
from paceline.train.optimizers.build import Schedule, build_optimizer, matrices_of

KINDS = [
    "adamw", "adam", "sgd", "rmsprop", "adagrad", "lion", "muon", "schedule_free_adamw",
    "adamw_8bit", "adamw_torchao_8bit", "adafactor",
]  # fmt: skip
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
    derived = derive(
        config, world_size=1, rows_per_epoch=lambda _: 8, num_eval=0, default_learning_rate=1.0
    )
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


@pytest.mark.parametrize(("kind", "kwargs"), [*SCHEDULES, ("cosine", {"num_training_steps": 12})])
def test_shape_without_transformers_matches_the_schedule(kind: str, kwargs: dict[str, Any]) -> None:
    schedule = make_schedule(kind, kwargs)
    shares = [schedule_share(kind, kwargs, step, 20, 4, 1e-3) for step in range(20)]
    if None in shares:
        assert set(shares) == {None}
        assert kwargs or kind not in ("linear", "cosine", "constant", "constant_with_warmup")
        return
    expected = [schedule.set_step(step) / 1e-3 for step in range(20)]
    assert shares == pytest.approx(expected, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("kind", ["linear", "cosine", "cosine_with_restarts", "polynomial"])
def test_schedule_with_a_length_of_its_own(kind: str) -> None:
    """It ends before the run, or is not at its end after it; then the rate is constant."""
    shorter = make_schedule(kind, {}, steps=12)
    actual = make_schedule(kind, {"num_training_steps": 12})
    expected = [shorter.set_step(min(step, 12)) for step in range(20)]
    assert [actual.set_step(step) for step in range(20)] == expected
    assert expected[-1] == pytest.approx(1e-7 if kind == "polynomial" else 0)
    long = make_schedule(kind, {"num_training_steps": 40})
    expected = [make_schedule(kind, {}, steps=40).set_step(step) for step in range(20)]
    assert [long.set_step(step) for step in range(20)] == expected


def test_linear_schedule_with_a_length_is_that_of_deepspeed() -> None:
    lr_schedules = pytest.importorskip("deepspeed.runtime.lr_schedules")
    _, optimizer = make_optimizer(TrainArgs())
    reference = lr_schedules.WarmupDecayLR(
        optimizer, 12, warmup_max_lr=1e-3, warmup_num_steps=4, warmup_type="linear"
    )
    schedule = make_schedule("linear", {"num_training_steps": 12})
    for step in range(20):
        reference.step(step)
        assert schedule.set_step(step) == pytest.approx(reference.get_last_lr()[0], abs=1e-18)


@pytest.mark.parametrize("kind", ["cosine_with_min_lr", "warmup_stable_decay"])
def test_schedules_have_defaults_for_required_arguments(kind: str) -> None:
    actual = make_schedule(kind, {})
    rates = [actual.set_step(step) for step in range(20)]
    assert max(rates) == pytest.approx(1e-3)
    assert 0 <= rates[-1] < 1e-3


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_arguments_of_schedules_are_those_of_transformers(kind: str) -> None:
    schedule = TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(kind)]
    accepted = set(inspect.signature(schedule).parameters)
    accepted -= {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"}
    assert set(ARGUMENTS[kind]) - {LENGTH} == accepted


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
    assert settings["lr"] == pytest.approx(1e-2)
    # Others cannot skip a step on the device, so the host decides.
    assert takes_found_inf(optimizer) == (kind in ("adamw", "adam"))
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


def train_linear(
    optimizer: torch.optim.Optimizer, weight: nn.Parameter, steps: range
) -> torch.Tensor:
    for step in steps:
        weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(step))
        optimizer.step()
    return weight.detach().clone()


def make_wide(kind: str) -> tuple[nn.Parameter, Any]:
    weight = nn.Parameter(torch.linspace(-1, 1, 66 * 128).view(66, 128))
    return weight, build_optimizer(TrainArgs(optim=kind), 1e-2, [("weight", weight)], frozenset())


@pytest.mark.parametrize("kind", ["adamw_8bit", "adamw_torchao_8bit"])
def test_quantized_state_is_stored_and_loaded_exactly(kind: str) -> None:
    weight, optimizer = make_wide(kind)
    memory = OptimizerMemory(8, 4 * ("ao" in kind), True, False, 2048 * ("ao" in kind))
    train_linear(optimizer, weight, range(3))
    sizes = [tensor.numel() * tensor.element_size() for tensor in optimizer_tensors(optimizer)]
    tables = 0 if "ao" in kind else 2048  # bitsandbytes has them once per optimizer
    assert sum(sizes) == memory.bytes_of("weight", weight.numel()) + tables
    entries, scales = optimizer.stored_state(weight)
    assert entries["exp_avg"].dtype == torch.float32
    assert entries["exp_avg_sq"].shape == weight.shape
    resumed_weight, resumed = make_wide(kind)
    resumed_weight.data.copy_(weight.data)
    resumed.state[resumed_weight] = {key: value.clone() for key, value in entries.items()}
    resumed.load_stored(resumed_weight, scales)
    expected = train_linear(optimizer, weight, range(3, 6))
    assert torch.equal(train_linear(resumed, resumed_weight, range(3, 6)), expected)


def test_large_state_is_converted_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    table = torch.rand(256, generator=generator).sort().values
    values = torch.rand(3, 500, generator=generator)

    def convert() -> tuple[torch.Tensor, ...]:
        codes, scales = blockwise.quantize(values, table, None)
        again, _ = blockwise.quantize(values, table, scales)
        return codes, scales, again, blockwise.dequantize(codes, table, scales)

    expected_results = convert()
    monkeypatch.setattr(blockwise, "_CHUNK", 512)
    for in_chunks, expected in zip(convert(), expected_results, strict=True):
        assert torch.equal(in_chunks, expected)
    torch.testing.assert_close(expected_results[3], values, rtol=0, atol=0.05)


def test_adamw_8bit_follows_adamw() -> None:
    weights = {}
    for kind in ("adamw", "adamw_8bit", "adamw_torchao_8bit"):
        weight, optimizer = make_wide(kind)
        weights[kind] = train_linear(optimizer, weight, range(10))
    for kind in ("adamw_8bit", "adamw_torchao_8bit"):
        difference = (weights[kind] - weights["adamw"]).abs().max()
        assert 0 < difference < 0.02  # two of ten steps of the learning rate


def test_schedule_free_weights_are_restored_exactly() -> None:
    weight, optimizer = make_wide("schedule_free_adamw")
    trained = train_linear(optimizer, weight, range(3))
    optimizer.eval()
    state = optimizer.state[weight]
    average = weight.detach().clone()
    # y = (1 - beta 1) z + beta 1 x
    torch.testing.assert_close(trained, torch.lerp(state["z"], average, 0.9))
    stored = {key: value.clone() for key, value in state.items()}
    optimizer.train()
    assert torch.equal(weight, trained)
    assert state.keys() == {"z", "exp_avg_sq"}
    resumed_weight, resumed = make_wide("schedule_free_adamw")
    resumed_weight.data.copy_(average)
    resumed.state[resumed_weight] = stored
    resumed.train()
    expected = train_linear(optimizer, weight, range(3, 6))
    assert torch.equal(train_linear(resumed, resumed_weight, range(3, 6)), expected)


def fail_with_averaged_weights(
    optimizer: torch.optim.Optimizer, weight: torch.Tensor, trained: torch.Tensor
) -> None:
    world = Communicator(RankEnv(), torch.device("cpu"))
    strategy = make_strategy("single", Config(model="m", dataset="d"), world)
    strategy.optimizer = optimizer
    with strategy.averaged_weights():
        assert not torch.equal(weight, trained)
        raise OSError("the disk is full")


def test_schedule_free_weights_are_restored_after_an_exception() -> None:
    weight, optimizer = make_wide("schedule_free_adamw")
    trained = train_linear(optimizer, weight, range(3))
    with pytest.raises(OSError, match="disk"):
        fail_with_averaged_weights(optimizer, weight, trained)
    assert torch.equal(weight, trained)
    expected_weight, expected = make_wide("schedule_free_adamw")
    uninterrupted = train_linear(expected, expected_weight, range(6))
    assert torch.equal(train_linear(optimizer, weight, range(3, 6)), uninterrupted)


def test_schedule_free_warm_up_is_that_of_the_package() -> None:
    from schedulefree import AdamWScheduleFree

    args = TrainArgs(optim="schedule_free_adamw", warmup_steps=4, max_steps=8)
    config = Config(model="m", dataset="d", train_args=args)
    derived = derive(
        config, world_size=1, rows_per_epoch=lambda _: 8, num_eval=0, default_learning_rate=1e-2
    )
    weight, optimizer = make_wide("schedule_free_adamw")
    schedule = Schedule(optimizer, args, derived)
    for step in range(8):
        schedule.set_step(step)
        train_linear(optimizer, weight, range(step, step + 1))
    other = nn.Parameter(make_wide("adamw")[0].data)
    package = AdamWScheduleFree([other], 1e-2, warmup_steps=4)
    package.train()
    torch.testing.assert_close(weight.detach(), train_linear(package, other, range(8)))


def test_muon_updates_hidden_matrices_as_torch_does() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 16), nn.Linear(16, 4))
    hidden = hidden_matrices(model)
    assert hidden == {"1.weight"}
    args, named = TrainArgs(optim="muon"), list(model.named_parameters())
    optimizer = build_optimizer(args, 1e-2, named, matrices_of(model), hidden)
    weight = nn.Parameter(model[1].weight.detach().clone())
    muon = torch.optim.Muon([weight], 1e-2, 0.0, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for _ in range(2):
        model(torch.arange(5)).square().sum().backward()
        weight.grad = model[1].weight.grad.clone()
        optimizer.step()
        muon.step()
    assert torch.equal(model[1].weight, weight)
    assert optimizer.state[model[1].weight].keys() == {"momentum_buffer"}
    assert "exp_avg_sq" in optimizer.state[model[2].weight]


def test_missing_package_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with raises_error(ConfigError, code="missing-package"):
        check_optimizer_package("adamw_8bit")
    check_optimizer_package("adamw")
