"""Check before the first step that a user's loss is a sum over samples, as the trainer assumes.

The trainer adds the losses of all micro-batches and divides them by the global count. A loss that
is already a mean would be divided twice: the loss curve looks plausible, but training uses a
fraction of the gradient.
"""

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.core.errors import ConfigError
from paceline.core.texts import UserText
from paceline.core.user_code import error_summary
from paceline.data.collate import map_tensors
from paceline.distributed.seeds import seed_everything
from paceline.tasks.base import Notice, Task

_MAX_SAMPLES = 6
#: Number of draws over which a loss that uses random numbers is averaged, and how far such an
#: average may deviate from its expectation.
_NUM_DRAWS = 8
_STOCHASTIC_TOLERANCE = 0.2


@dataclass(frozen=True)
class _Split:
    """The value of a quantity on a batch and on two parts of it, with the counts of the parts."""

    total: float
    parts: tuple[float, float]
    counts: tuple[float, float]

    @property
    def is_zero(self) -> bool:
        return max(abs(self.total), *map(abs, self.parts)) < 1e-12

    @property
    def text(self) -> str:
        """The values of the batch and its parts as text."""
        left, right = self.parts
        size = " + ".join(map(str, self.counts))
        return (
            f"{self.total:.6g} on a batch (count {size}), {left:.6g} and {right:.6g} on its parts"
        )

    def is_sum(self, tolerance: float) -> bool:
        return _is_close(self.total, sum(self.parts), tolerance)

    def is_mean(self, tolerance: float) -> bool:
        weighted = sum(part * count for part, count in zip(self.parts, self.counts, strict=True))
        return _is_close(self.total, weighted / max(1, sum(self.counts)), tolerance)


def check_additive(task: Task, model: nn.Module, dataset: Any, seed: int) -> list[Notice]:
    """Compare the task's loss on a few real samples with its losses on two parts of them.

    The model is in eval mode during the check. Its buffers and modes, attributes that the loss
    assigns to the task, and all random states are restored. Every rank calls this, because a loss
    may call collectives.

    Args:
        model: the model, before the strategy sets it up.
        dataset: the training dataset, with at least one sample.
        seed: the run's seed.

    Returns:
        (level, text) notices, if the loss could not be checked.

    Raises:
        ConfigError: the loss is a mean or is not additive for another reason, or ``evaluate``
            returns a mean.
    """
    if not task.additive or len(dataset) == 0 or any(param.is_meta for param in model.parameters()):
        return []
    # A copy, so that attributes that the loss assigns, such as a count of its calls, do not change.
    task = copy.copy(task)
    with _unchanged(model):
        samples = _draw_samples(dataset, seed)
        try:
            notices = _check_quantity(
                task, model, samples, seed, "loss", lambda batch: {"loss": task.loss(model, batch)}
            )
            if type(task).evaluate is not Task.evaluate:
                notices += _check_quantity(
                    task,
                    model,
                    samples,
                    seed,
                    "evaluate",
                    lambda batch: _sums(task, task.evaluate(model, batch)),
                )
        except ConfigError:
            raise
        except Exception as error:  # such as a detection model, which has no loss in eval mode
            text = UserText(
                "the loss was not checked to be a sum, because it failed in eval mode: {reason}",
                code="loss-not-checked",
                reason=error_summary(error),
            )
            return [("warning", text)]
    return notices


def evaluated_names(task: Task, model: nn.Module, dataset: Any, seed: int) -> list[str] | None:
    """Return the names of the results of the task's evaluation, from one of a few real samples;
    None if it fails on them. The arguments are as in :func:`check_additive`."""
    if len(dataset) == 0 or any(param.is_meta for param in model.parameters()):
        return None
    task = copy.copy(task)
    with _unchanged(model), torch.no_grad():
        try:
            results = task.evaluate(
                model, _collate(task, model, _draw_samples(dataset, seed), seed)
            )
            rows = {name: results[name] for name in task.gathers if name in results}
            gathered = {name: value.reshape(-1).cpu() for name, value in rows.items()}
            metrics = task.metrics(gathered) if task.gathers else {}
        except Exception:  # metrics of a few samples may be undefined
            return None
    return [*_sums(task, results), *metrics]


def _check_quantity(
    task: Task,
    model: nn.Module,
    samples: Sequence[Any],
    seed: int,
    method: str,
    compute: Callable[[Any], dict[str, torch.Tensor]],
) -> list[Notice]:
    # Parts of unequal size distinguish a weighted mean from an unweighted one.
    cut = len(samples) - max(1, len(samples) // 3)
    batches = [
        _collate(task, model, part, seed) for part in (samples, samples[:cut], samples[cut:])
    ]
    counts = (task.count(batches[1]), task.count(batches[2]))
    first, second = (_evaluate(compute, batches[0], seed, draw) for draw in (0, 1))
    has_16_bit = any(param.dtype in (torch.bfloat16, torch.float16) for param in model.parameters())
    tolerance = 3e-2 if has_16_bit else 1e-3
    notices: list[Notice] = []
    for name in first:
        is_stochastic = not _is_close(first[name], second[name], 1e-6)
        draws = range(_NUM_DRAWS) if is_stochastic else range(1)
        total, left, right = (
            float(np.mean([_evaluate(compute, batch, seed, draw)[name] for draw in draws]))
            for batch in batches
        )
        split = _Split(total, (left, right), counts)
        label = f"{type(task).__name__}.{method}"
        if method == "evaluate":
            label += f" ({name})"
        if split.is_zero or not np.isfinite([total, left, right]).all():
            text = UserText(
                "{label} was not checked to be a sum: it is {total} on the first samples",
                code="loss-not-finite-in-check",
                label=label,
                total=f"{total:g}",
            )
            notices.append(("info", text))
        elif is_stochastic:
            if split.is_mean(_STOCHASTIC_TOLERANCE) and not split.is_sum(_STOCHASTIC_TOLERANCE):
                raise _is_a_mean(label, method, split)
            text = UserText(
                "{label} draws random numbers, so it was only roughly checked to be a sum",
                code="loss-roughly-checked",
                label=label,
            )
            notices.append(("info", text))
        elif split.is_sum(tolerance):
            continue
        elif split.is_mean(tolerance):
            raise _is_a_mean(label, method, split)
        elif method == "loss":
            raise ConfigError(
                "{label} is not additive: {split}. The result of training would depend on the"
                " micro-batch size and on the number of ranks",
                code="not-additive",
                allowed="a loss whose value on a batch is the sum of its values on the parts of"
                " the batch",
                fix="multiply a term that does not depend on the samples (such as a weight"
                " penalty) by self.count(batch); if the loss compares samples of a micro-batch"
                " with each other (such as a contrastive loss), set `additive = False` in the"
                " class",
                label=label,
                split=split.text,
            )
    return notices


def _is_a_mean(name: str, method: str, split: _Split) -> ConfigError:
    remedy = (
        'reduction="sum"'
        if method == "loss"
        else "the sum over the batch, such as `(output - target).abs().sum()`"
    )
    effect = ", and the gradient would shrink with the batch size" if method == "loss" else ""
    return ConfigError(
        "{name} returns the mean over the batch: {split}. Paceline divides by the global count"
        " itself, so a mean would be divided twice{effect}",
        code="mean-instead-of-sum",
        allowed="the sum over the batch",
        fix="return {remedy} instead of the mean, or multiply the result by self.count(batch)",
        name=name,
        split=split.text,
        effect=effect,
        remedy=remedy,
    )


def _draw_samples(dataset: Any, seed: int) -> list[Any]:
    """Return up to six samples spread over the dataset. A single sample is returned twice, because
    neither part may be empty."""
    num_samples = min(len(dataset), _MAX_SAMPLES)
    seed_everything(seed, "additivity")
    samples = [dataset[position * len(dataset) // num_samples] for position in range(num_samples)]
    return samples if len(samples) > 1 else samples * 2


def _collate(task: Task, model: nn.Module, samples: Sequence[Any], seed: int) -> Any:
    seed_everything(seed, "additivity")
    device = next(model.parameters()).device
    return map_tensors(task.collate(samples), lambda tensor: tensor.to(device))


def _evaluate(
    compute: Callable[[Any], dict[str, torch.Tensor]], batch: Any, seed: int, draw: int
) -> dict[str, float]:
    seed_everything(seed, "additivity", draw)
    # A loss may change its batch in place.
    copied = map_tensors(batch, lambda tensor: tensor.clone())
    with torch.enable_grad():  # a loss may compute gradients itself
        return {name: float(value.detach()) for name, value in compute(copied).items()}


def _sums(task: Task, results: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in results.items() if name not in task.gathers}


def _is_close(value: float, expected: float, tolerance: float) -> bool:
    return abs(value - expected) <= tolerance * max(abs(value), abs(expected))


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Switch to eval mode within the block, then restore modes, buffers and all random states."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers() if not buffer.is_meta]
    states = _random_states()
    model.eval()
    try:
        yield
    finally:
        for module, is_training in modes:
            module.training = is_training
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for restore, state in states:
            restore(state)


def _random_states() -> list[tuple[Callable[[Any], object], Any]]:
    """Return the random states that :func:`seed_everything` sets, each with the function that
    restores it."""
    states: list[tuple[Callable[[Any], object], Any]] = [
        (random.setstate, random.getstate()),
        (np.random.set_state, np.random.get_state()),
        (torch.set_rng_state, torch.get_rng_state()),
    ]
    if torch.accelerator.is_available():
        device_module = torch.get_device_module(torch.accelerator.current_accelerator())
        states.append((device_module.set_rng_state, device_module.get_rng_state()))
    return states
