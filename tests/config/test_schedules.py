"""Test that arguments of learning rate schedules and rates that cannot be used are rejected when a
config is loaded."""

import json
from collections.abc import Callable

import pytest

from paceline.config.load import Loaded
from paceline.core.errors import ConfigError

BASE = "model: m\ndataset: d\n"
Load = Callable[..., Loaded]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cosine_with_min_lr, lr_scheduler_kwargs: {min_lr: '1e-6'}", {"min_lr": 1e-6}),
        ("cosine_with_min_lr, lr_scheduler_kwargs: {min_lr_rate: '0.1'}", {"min_lr_rate": 0.1}),
        (
            "cosine_with_min_lr, lr_scheduler_kwargs: {min_lr: null, min_lr_rate: 1}",
            {"min_lr_rate": 1},
        ),
        ("cosine_with_restarts, lr_scheduler_kwargs: {num_cycles: '3'}", {"num_cycles": 3}),
        ("polynomial, lr_scheduler_kwargs: {lr_end: 0, power: 2}", {"lr_end": 0, "power": 2}),
        ("polynomial, learning_rate: 1e-5, lr_scheduler_kwargs: {lr_end: 9e-6}", {"lr_end": 9e-6}),
        (
            "warmup_stable_decay, lr_scheduler_kwargs: {num_decay_steps: 5, decay_type: 1-sqrt}",
            {"num_decay_steps": 5, "decay_type": "1-sqrt"},
        ),
    ],
)
def test_accepts_arguments(load: Load, text: str, expected: dict[str, float | str]) -> None:
    loaded = load(f"{BASE}train_args: {{lr_scheduler_type: {text}}}")
    assert loaded.config.train_args.lr_scheduler_kwargs == expected


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("cosine, lr_scheduler_kwargs: {min_lr: 1e-6}", "`cosine_with_min_lr` has a lowest"),
        ("linear, lr_scheduler_kwargs: {power: 1}", "`linear` accepts num_training_steps"),
        ("cosine_with_min_lr, lr_scheduler_kwargs: {min_lr: 1e-6, min_lr_rate: 0.1}", "keep one"),
        ("cosine_with_min_lr, lr_scheduler_kwargs: {min_lr: low}", "min_lr: low is not a number"),
        ("cosine_with_min_lr, lr_scheduler_kwargs: {min_lr: -1}", "of at least 0"),
        ("cosine_with_min_lr, lr_scheduler_kwargs: {min_lr_rate: 2}", "at most 1"),
        (
            "cosine_with_min_lr, learning_rate: 1e-5, lr_scheduler_kwargs: {min_lr: 1e-4}",
            "min_lr: 0.0001 is above the learning rate of 1e-05",
        ),
        (
            "polynomial, learning_rate: 1e-5, lr_scheduler_kwargs: {lr_end: 1e-5}",
            "lr_end: 1e-05 must be below the learning rate of 1e-05",
        ),
        ("polynomial, learning_rate: 1e-8", "lr_end: 1e-07 must be below"),
        ("cosine_with_restarts, lr_scheduler_kwargs: {num_cycles: 1.5}", "a whole number"),
        ("warmup_stable_decay, lr_scheduler_kwargs: {decay_type: steep}", "linear, cosine, 1-sqrt"),
        ("cosine, lr_scheduler_kwargs: {num_cycles: .inf}", "not a finite number"),
    ],
)
def test_rejects_arguments(load: Load, text: str, fragment: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(f"{BASE}train_args: {{lr_scheduler_type: {text}}}")
    assert "lr_scheduler_kwargs" in caught.value.paragraph()
    assert fragment in caught.value.paragraph()


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", ".inf", "Infinity", "1e999"])
@pytest.mark.parametrize("key", ["learning_rate", "weight_decay", "lora.alpha", "max_grad_norm"])
def test_rejects_infinite_values_also_as_text(load: Load, key: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(BASE, [f"{key}={value}"])
    assert f"`{key}={value}`" in caught.value.paragraph()
    with pytest.raises(ConfigError, match=r"finite number|unsupported value"):
        load(f"{BASE}parameter_groups: [{{params: [a], learning_rate: '{value}'}}]")


@pytest.mark.parametrize("kind", ["WarmupDecayLR", "WarmupCosineLR", "WarmupLR"])
def test_schedule_of_a_deepspeed_json_has_its_own_length(load: Load, kind: str) -> None:
    params = {"warmup_num_steps": 10, "total_num_steps": 50}
    scheduler = {"type": kind, "params": params}
    text = (
        BASE
        + "deepspeed: "
        + json.dumps(json.dumps({"zero_optimization": {"stage": 2}, "scheduler": scheduler}))
    )
    loaded = load(text)
    notices = "\n".join(text for _, text in loaded.notices)
    args = loaded.config.train_args
    assert args.warmup_steps == 10
    if kind == "WarmupLR":
        assert args.lr_scheduler_kwargs == {}
        assert "scheduler.params.total_num_steps" in notices
        return
    assert args.lr_scheduler_kwargs == {"num_training_steps": 50}
    kept = load(text + "\nlr_scheduler_kwargs: {num_training_steps: 30}").config.train_args
    assert kept.lr_scheduler_kwargs == {"num_training_steps": 30}
    other = load(text + "\nlr_scheduler_type: constant")
    assert other.config.train_args.lr_scheduler_kwargs == {}
    warnings = [text for level, text in other.notices if level == "warning"]
    assert any("total_num_steps: 50` (" in text and "no effect" in text for text in warnings)
