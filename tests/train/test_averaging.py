"""The average of the weights, compared with its definition."""

import pytest
import torch
from torch import nn

from paceline.config.derive import average_bytes_per_element, optimizer_bytes_per_element
from paceline.config.schema.train_args import TrainArgs
from paceline.parallel.optimizer_state import AveragesWeights, optimizer_tensors
from paceline.parallel.state import full_shards
from paceline.train.optimizers.averaging import average_weights
from paceline.train.optimizers.build import build_optimizer, matrices_of
from paceline.train.optimizers.rounding import add_rounding

DECAY, STEPS = 0.8, 5


def make(optim: str = "adamw", momentum: float = 0.9):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20))
    args = TrainArgs(optim=optim, momentum=momentum)
    named = list(model.named_parameters())
    hidden = frozenset(["1.weight"]) if optim == "muon" else frozenset()
    optimizer = build_optimizer(args, 1e-2, named, matrices_of(model), hidden)
    average_weights(optimizer, DECAY)
    assert isinstance(optimizer, AveragesWeights)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.arange(20)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("optim", "momentum"),
    [
        ("adamw", 0.9),
        ("sgd", 0.0),
        ("adagrad", 0.9),
        ("adafactor", 0.9),
        ("lion", 0.9),
        ("muon", 0),
    ],
)
def test_average_and_training_weights(optim: str, momentum: float) -> None:
    model, optimizer = make(optim, momentum)
    plain, reference = make(optim, momentum)
    reference.__class__ = reference.__class__.__mro__[2]  # without the average
    averages = [param.detach().clone() for param in plain.parameters()]
    for _ in range(STEPS):
        step(model, optimizer)
        step(plain, reference)
        for average, param in zip(averages, plain.parameters(), strict=True):
            average.lerp_(param.detach(), 1 - DECAY)
        optimizer.eval()  # evaluation must not change training
        torch.testing.assert_close([*model.parameters()], averages, rtol=1e-6, atol=1e-7)
        optimizer.train()
        assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_skipped_step_of_a_fused_optimizer_leaves_the_average() -> None:
    model, optimizer = make()
    step(model, optimizer)
    before = [tensor.clone() for tensor in optimizer_tensors(optimizer)]
    optimizer.found_inf = torch.tensor(1.0)
    step(model, optimizer)
    assert all(map(torch.equal, before, optimizer_tensors(optimizer)))


def test_average_in_bfloat16_follows_the_weights() -> None:
    model, optimizer = make()
    model.bfloat16()
    add_rounding(optimizer, 1, list(full_shards(dict(model.named_parameters()), model)))
    expected = [param.detach().double() for param in model.parameters()]
    for number in range(60):
        optimizer.rounding.step = number
        step(model, optimizer)
        for average, param in zip(expected, model.parameters(), strict=True):
            average.lerp_(param.detach().double(), 1 - DECAY)
    averages = [optimizer.state[param]["average"] for param in model.parameters()]
    assert {average.dtype for average in averages} == {torch.bfloat16}
    for average, exact in zip(averages, expected, strict=True):
        assert float((average.double() - exact).abs().mean()) < 0.01 * float(exact.abs().mean())


def test_planned_bytes_are_those_of_the_state() -> None:
    model, optimizer = make()
    step(model, optimizer)
    args = TrainArgs(ema_decay=DECAY)
    elements = sum(param.numel() for param in model.parameters())
    each = optimizer_bytes_per_element(args) + average_bytes_per_element(args)
    measured = sum(each.nbytes for each in optimizer_tensors(optimizer) if each.dim() > 0)
    assert measured == each * elements
