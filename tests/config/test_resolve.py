"""Test the values derived from the config and the data."""

import math
from typing import Any

import pytest

from paceline.config.derive import ResolvedValues, derive
from paceline.config.schema import Config
from paceline.observe.console import derived_lines


def resolve(
    num_train: int = 100,
    world_size: int = 2,
    num_eval: int = 0,
    tokens: int | None = None,
    **args: Any,
) -> ResolvedValues:
    config = Config(model="m", dataset="d", train_args={"per_device_train_batch_size": 4, **args})
    return derive(
        config,
        world_size=world_size,
        rows_per_epoch=lambda _: num_train,
        num_eval=num_eval,
        default_learning_rate=1e-4,
        tokens_per_row=None if tokens is None else tokens / num_train,
    )


@pytest.mark.parametrize(
    ("samples", "world", "accumulation", "batch", "per_epoch"),
    [(100, 2, 1, 8, 13), (96, 2, 1, 8, 12), (97, 2, 4, 32, 4), (8, 2, 1, 8, 1), (9, 1, 2, 8, 2)],
)
def test_epoch_includes_every_sample(
    samples: int, world: int, accumulation: int, batch: int, per_epoch: int
) -> None:
    resolved = resolve(samples, world, gradient_accumulation_steps=accumulation)
    assert (resolved.global_batch_size, resolved.steps_per_epoch) == (batch, per_epoch)
    assert (per_epoch - 1) * batch < samples <= per_epoch * batch


@pytest.mark.parametrize(
    ("args", "steps"),
    [
        ({}, 39),
        ({"num_train_epochs": 1}, 13),
        ({"num_train_epochs": 0.5}, 7),
        ({"num_train_epochs": 0.001}, 1),
        ({"max_steps": 5}, 5),
        ({"max_steps": 5, "num_train_epochs": 9}, 5),
        ({"max_steps": -1}, 39),
        ({"max_steps": 1000}, 1000),
    ],
)
def test_resolves_number_of_steps(args: dict[str, Any], steps: int) -> None:
    resolved = resolve(**args)
    assert resolved.steps == steps
    assert resolved.epochs == pytest.approx(steps / 13)


@pytest.mark.parametrize(
    ("args", "warmup"),
    [
        ({}, 0),
        ({"warmup_ratio": 0.1}, 4),
        ({"warmup_steps": 3}, 3),
        ({"warmup_steps": 3, "warmup_ratio": 0.9}, 3),
        ({"warmup_steps": 0, "warmup_ratio": 0.9}, 0),
        ({"warmup_steps": 100}, 100),
        ({"warmup_ratio": 1.0}, 39),
    ],
)
def test_resolves_warmup_steps(args: dict[str, Any], warmup: int) -> None:
    assert resolve(**args).warmup_steps == warmup


@pytest.mark.parametrize(
    ("replicas", "batch", "accumulation", "text"),
    [
        (4, 8, 1, "8 samples = 2 per micro-batch × 1 accumulation × 4 ranks"),
        (2, 8, 1, "8 samples = 4 per micro-batch × 1 accumulation × 2 ranks"),
        (3, 8, 1, "8 samples = 3+3+2 on 3 ranks: at most 3 per micro-batch × 1 accumulation"),
        (1, 8, 2, "8 samples = 4 per micro-batch × 2 accumulation × 1 rank"),
        (3, 32, 3, "32 samples = 11+11+10 on 3 ranks: at most 4 per micro-batch × 3 accumulation"),
        (8, 8, 1, "8 samples = 1 per micro-batch × 1 accumulation × 8 ranks"),
        (
            9,
            80,
            3,
            "80 samples = 8 × 9 + 1 × 8 on 9 ranks: at most 3 per micro-batch × 3 accumulation",
        ),
    ],
)
def test_fixed_global_batch_size_is_split_over_ranks(
    replicas: int, batch: int, accumulation: int, text: str
) -> None:
    config = Config(model="m", dataset="d", train_args={"per_device_train_batch_size": 4})
    resolved = derive(
        config,
        world_size=replicas,
        rows_per_epoch=lambda _: 100,
        num_eval=0,
        default_learning_rate=1e-4,
        global_batch_size=batch,
    )
    assert resolved.global_batch_size == batch
    assert resolved.gradient_accumulation_steps == accumulation
    assert resolved.steps_per_epoch == math.ceil(100 / batch)
    assert resolved.samples_per_micro_batch <= 4
    assert text in dict(derived_lines(resolved.as_dict()))["batch"]


def test_resolves_learning_rate_and_evaluation_interval() -> None:
    assert resolve().learning_rate == 1e-4
    assert resolve(learning_rate=0.0).learning_rate == 0.0
    assert resolve().eval_every_steps == 0
    assert resolve(num_eval=1).eval_every_steps == 13
    assert resolve(num_eval=1, eval_steps=5).eval_every_steps == 5
    assert resolve(eval_steps=5).eval_every_steps == 0


def test_tokens_per_step_is_the_mean_of_a_batch() -> None:
    assert resolve(tokens=5000).tokens_per_step == 400
    assert (
        resolve(num_train=6, tokens=60).tokens_per_step == 60
    )  # at most the tokens of the dataset
    assert resolve().tokens_per_step is None


def test_describes_derived_values() -> None:
    values = resolve(tokens=5000, num_eval=3, warmup_ratio=0.1, gradient_accumulation_steps=2)
    assert dict(derived_lines(values.as_dict())) == {
        "batch": (
            "16 samples = 4 per micro-batch × 2 accumulation × 2 ranks, about 800 tokens per step"
        ),
        "steps": "21 (7 per epoch, 3 epochs)",
        "rate": "1e-4, after 3 steps of warm-up",
        "evaluation": "every 7 steps",
    }
    single_rank = resolve(world_size=1)
    assert dict(derived_lines(single_rank.as_dict()))["batch"].endswith("× 1 rank")
    assert ResolvedValues(**single_rank.as_dict()) == single_rank


def test_intervals_may_be_fractions_of_all_steps() -> None:
    resolved = resolve(
        num_train=80,
        num_eval=4,
        save_steps=0.25,
        eval_steps=0.1,
        logging_steps=0.5,
        num_train_epochs=3,
    )
    assert resolved.steps == 30
    assert resolved.save_every_steps == 8
    assert resolved.eval_every_steps == 3
    assert resolved.log_every_steps == 15
    for epochs in range(2, 40):
        resolved = resolve(num_train=80, save_steps=1 / epochs, num_train_epochs=epochs)
        assert resolved.save_every_steps == resolved.steps_per_epoch
    assert resolve(save_steps=0).save_every_steps == 0
    assert resolve(save_steps=7).save_every_steps == 7


@pytest.mark.parametrize(("every", "expected"), [("never", 0), (0, 13), (5, 5), (0.5, 20)])
def test_resolves_interval_of_evaluations(every: float | str, expected: int) -> None:
    assert resolve(num_eval=9, eval_steps=every).eval_every_steps == expected
    assert resolve(num_eval=0, eval_steps=every).eval_every_steps == 0
