"""Model FLOPs per second and device, and their share of the peak rate."""

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from paceline.config.schema import Config
from paceline.core.report import PeakRate
from paceline.observe.throughput import mean_peak, model_flops
from paceline.planner.devices import peak_rate

A10: PeakRate = {"device": "A10", "flops_s": 1e9, "source": "datasheet"}


def _config(**settings: object) -> Config:
    return Config.model_validate({"model": "builtin:qwen2-micro", "dataset": "x", **settings})


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    from paceline.models.language import load_language_model

    return load_language_model(_config())


def test_flops_are_those_that_torch_counts(model: torch.nn.Module) -> None:
    lengths = np.array([48, 48])
    flops = model_flops(model, _config(), lengths, num_devices=2, peak=None)
    assert flops is not None
    ids = torch.randint(0, 100, (2, 48))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    # Paceline counts half of the causal attention, which the kernel may or may not compute.
    assert flops.per_device(96, 96) == pytest.approx(counter.get_total_flops() / 2, rel=0.03)


def test_recomputation_is_not_counted(model: torch.nn.Module) -> None:
    args = (np.array([10]), 1, None)
    plain = model_flops(model, _config(), *args)
    again = model_flops(model, _config(train_args={"gradient_checkpointing": True}), *args)
    assert plain is not None
    assert again is not None
    assert plain.per_device(10, 10) == again.per_device(10, 10)


def test_utilization_is_share_of_peak(model: torch.nn.Module) -> None:
    flops = model_flops(model, _config(), np.array([10]), 1, A10)
    assert flops is not None
    assert flops.utilization(2.5e8) == 0.25
    unknown = model_flops(model, _config(), np.array([10]), 1, None)
    assert unknown is not None
    assert unknown.utilization(2.5e8) is None


def test_flops_are_unknown_for_other_models() -> None:
    assert model_flops(torch.nn.Linear(2, 2), _config(), np.array([10]), 1, None) is None


def test_peak_is_mean_over_devices() -> None:
    fast: PeakRate = {"device": "H100", "flops_s": 3e9, "source": "datasheet"}
    assert mean_peak([A10, A10]) == A10
    assert mean_peak([A10, fast]) == {"device": "A10, H100", "flops_s": 2e9, "source": "datasheet"}
    assert mean_peak([A10, None]) is None


def test_peak_is_that_of_the_precision() -> None:
    half = peak_rate("NVIDIA A100-SXM4-80GB", 85_000_000_000, "bfloat16")
    full = peak_rate("NVIDIA A100-SXM4-80GB", 85_000_000_000, None)
    assert half is not None
    assert half["flops_s"] == 312e12
    assert "datasheet" in half["source"]
    assert full is not None
    assert full["flops_s"] == 19.5e12
    assert peak_rate("NVIDIA Unknown 9000", 10**10, None) is None
