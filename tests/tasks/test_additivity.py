"""A user's loss must be a sum over samples. A mean, or a loss that compares samples, is detected
before the first step."""

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from raised import raises_error
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import paceline
from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.tasks.additivity import check_additive

NUM_SAMPLES = 40


class Regression(paceline.Task):
    def build_datasets(self) -> tuple[Any, Any]:
        x = torch.linspace(-3, 3, NUM_SAMPLES).unsqueeze(1)
        return TensorDataset(x, x.sin()), None

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(1, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 1)
        )

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return functional.mse_loss(model(batch[0]), batch[1], reduction="sum")


class MeanLoss(Regression):
    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return functional.mse_loss(model(batch[0]), batch[1])


class MeanOverTokens(Regression):
    """Returns the mean over the count, which is not the number of samples."""

    def count(self, batch: Any) -> int:
        return int((batch[0] > -1).sum())

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        errors = (model(batch[0]) - batch[1]).square() * (batch[0] > -1)
        return errors.sum() / self.count(batch)


class MeanOfNoisyErrors(Regression):
    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        noise = torch.randn_like(batch[0])
        return functional.mse_loss(model(batch[0] + noise), noise)


class SumOfNoisyErrors(Regression):
    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        noise = torch.randn_like(batch[0])
        return functional.mse_loss(model(batch[0] + noise), noise, reduction="sum")


class MeanInEvaluation(Regression):
    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        return {"loss": self.loss(model, batch), "error": (model(batch[0]) - batch[1]).abs().mean()}


class Contrastive(Regression):
    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        output = model(batch[0])
        return functional.cross_entropy(
            output @ output.T, torch.arange(len(output)), reduction="sum"
        )


class DeclaredContrastive(Contrastive):
    additive = False


class WithPenalty(Regression):
    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return super().loss(model, batch) + sum(
            param.square().sum() for param in model.parameters()
        )


class NoLossInEvalMode(Regression):
    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        if not model.training:
            raise ValueError("this model has a loss in training mode only")
        return super().loss(model, batch)


class SideEffects(Regression):
    """Modifies its batch, draws from every random generator, computes gradients, and counts its
    calls."""

    calls = 0

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.calls += 1
        _ = random.random() + np.random.rand() + torch.rand(())
        x = batch[0].requires_grad_()
        slope = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
        batch[1].mul_(2)
        return slope.square().sum() + (model(x) - batch[1]).square().sum()


def check(kind: type[paceline.Task], num_samples: int = NUM_SAMPLES) -> list[tuple[str, str]]:
    task = kind(
        Config.model_validate(
            {"model": "custom", "dataset": "custom", "task": "./custom.py:Custom"}
        )
    )
    torch.manual_seed(0)
    dataset = torch.utils.data.Subset(task.build_datasets()[0], range(num_samples))
    return check_additive(task, task.build_model(), dataset, seed=42)


@pytest.mark.parametrize("kind", [MeanLoss, MeanOverTokens, MeanOfNoisyErrors])
@pytest.mark.parametrize("num_samples", [2, 3, NUM_SAMPLES])
def test_rejects_mean_with_fix(kind: type[paceline.Task], num_samples: int) -> None:
    if kind is MeanOverTokens:
        num_samples = NUM_SAMPLES  # the first three samples have a count of zero
    with raises_error(ConfigError, code="mean-instead-of-sum") as caught:
        check(kind, num_samples)
    assert caught.value.fix is not None
    assert 'reduction="sum"' in caught.value.fix


def test_rejects_mean_for_single_sample_dataset() -> None:
    with raises_error(ConfigError, code="mean-instead-of-sum"):
        check(MeanLoss, 1)


def test_rejects_mean_in_evaluate() -> None:
    with raises_error(ConfigError, code="mean-instead-of-sum"):
        check(MeanInEvaluation)


@pytest.mark.parametrize("kind", [Contrastive, WithPenalty])
def test_rejects_other_losses_that_are_not_additive(kind: type[paceline.Task]) -> None:
    with raises_error(ConfigError, code="not-additive") as caught:
        check(kind)
    assert "additive = False" in str(caught.value)


@pytest.mark.parametrize("num_samples", [1, 2, 3, NUM_SAMPLES])
@pytest.mark.parametrize("kind", [Regression, DeclaredContrastive, SideEffects])
def test_sum_passes_without_notice(kind: type[paceline.Task], num_samples: int) -> None:
    assert check(kind, num_samples) == []


def test_sum_with_random_numbers_passes_with_notice() -> None:
    ((level, text),) = check(SumOfNoisyErrors)
    assert (level, "random numbers" in text) == ("info", True)


def test_loss_that_fails_in_eval_mode_is_reported() -> None:
    ((level, text),) = check(NoLossInEvalMode)
    assert level == "warning"
    assert "this model has a loss in training mode only" in text


def test_check_has_no_side_effects() -> None:
    task = SideEffects(
        Config.model_validate(
            {"model": "custom", "dataset": "custom", "task": "./custom.py:Custom"}
        )
    )
    model, dataset = task.build_model(), task.build_datasets()[0]
    model[2].eval()  # a mode that the user has set
    weights_before = copy.deepcopy(model.state_dict())
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    targets = dataset.tensors[1].clone()
    assert check_additive(task, model, dataset, seed=42) == []
    assert [module.training for module in model] == [True, True, False, True]
    assert all(
        torch.equal(value, weights_before[name]) for name, value in model.state_dict().items()
    )
    assert task.calls == 0
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])
    assert torch.equal(dataset.tensors[1], targets)
    assert all(param.grad is None for param in model.parameters())
