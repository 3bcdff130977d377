"""The optimizer's state in host memory: the same bits, a few parameters at a time."""

import pytest
import torch
from torch import nn

from paceline.config.schema.train_args import TrainArgs
from paceline.parallel.optimizer_state import PlacesState, optimizer_tensors
from paceline.parallel.state import full_shards
from paceline.train.optimizers import host_state
from paceline.train.optimizers.averaging import average_weights
from paceline.train.optimizers.build import build_optimizer, matrices_of
from paceline.train.optimizers.host_state import keep_state_on_host
from paceline.train.optimizers.rounding import add_rounding

HIDDEN = frozenset(["1.weight", "2.weight"])
NUM_STEPS = 3


def train(optim: str, bfloat16: bool, on_host: bool, decay: float | None) -> list[torch.Tensor]:
    """Return weights and state after some steps."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(50, 40), nn.Linear(40, 80), nn.Linear(80, 80), nn.Linear(80, 50)
    )
    if bfloat16:
        model.bfloat16()
    named = list(model.named_parameters())
    hidden = HIDDEN if optim == "muon" else frozenset()
    args = TrainArgs(optim=optim, weight_decay=0.1)
    optimizer = build_optimizer(args, 1e-2, named, matrices_of(model), hidden)
    if decay is not None:
        average_weights(optimizer, decay)
    if bfloat16:
        add_rounding(optimizer, 1, list(full_shards(dict(named), model)))
    if on_host:
        keep_state_on_host(optimizer)
        assert isinstance(optimizer, PlacesState)
    params = [group["params"] for group in optimizer.param_groups]
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        model(torch.arange(50)).float().square().sum().backward()
        optimizer.step()
    assert [group["params"] for group in optimizer.param_groups] == params
    return [*(param.detach() for param in model.parameters()), *optimizer_tensors(optimizer)]


@pytest.mark.parametrize(
    ("optim", "bfloat16", "decay"),
    [
        *((name, False, None) for name in ("adamw", "sgd", "adagrad", "adafactor", "lion", "muon")),
        ("adamw", True, None),
        ("muon", False, 0.9),
        ("adamw", True, 0.9),
    ],
)
def test_gives_the_same_bits(
    optim: str, bfloat16: bool, decay: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_state, "OFFLOADED_AT_ONCE", 5000)
    plain, on_host = (train(optim, bfloat16, value, decay) for value in (False, True))
    assert len(plain) == len(on_host)
    assert all(map(torch.equal, plain, on_host))
