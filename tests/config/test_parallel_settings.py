"""Test settings of DeepSpeed, FSDP and Accelerate that agree with each other or were dropped."""

from collections.abc import Callable
from typing import Any

import pytest
from raised import raises_error

from paceline.config.load import Loaded
from paceline.core.errors import ConfigError

Load = Callable[..., Loaded]
BASE = "model: m\ndataset: d\n"


def parallel_settings(loaded: Loaded) -> dict[str, Any]:
    return loaded.config.parallel.model_dump(exclude_defaults=True)


@pytest.mark.parametrize("value", ["true", "full", "unsloth"])
def test_both_ways_to_checkpoint_activations_agree(load: Load, value: str) -> None:
    text = f"{BASE}gradient_checkpointing: {value}\nfsdp_config: {{activation_checkpointing: true}}"
    assert load(text).config.train_args.gradient_checkpointing == "full"


def test_offloaded_activations_of_ms_swift(load: Load) -> None:
    expected = {"mode": "zero3", "cpu_offload": "activations"}
    text = "fsdp: full_shard\nfsdp_config: {activation_cpu_offload: true}"
    assert parallel_settings(load(BASE + text)) == expected
    text = "fsdp: full_shard\ncallbacks: [activation_cpu_offload]"
    assert parallel_settings(load(BASE + text)) == expected


def test_a_single_process_of_accelerate_ignores_their_number(load: Load) -> None:
    text = f"{BASE}distributed_type: NO\nnum_processes: 8\n"
    assert parallel_settings(load(text)) == {"mode": "single"}
    assert parallel_settings(load(f"{text}parallel: {{mode: ddp}}")) == {
        "mode": "ddp",
        "num_gpus": 8,
    }


@pytest.mark.parametrize("stage", [0, 2, None])
def test_global_batch_size_of_a_deepspeed_json(load: Load, stage: int | None) -> None:
    zero = "" if stage is None else f", zero_optimization: {{stage: {stage}}}"
    loaded = load(f"{BASE}deepspeed: {{train_batch_size: 64{zero}}}")
    assert loaded.config.train_args.global_batch_size == 64


@pytest.mark.parametrize(
    ("setting", "is_refused"),
    [
        ("bias_correction: false", True),
        ("bias_correction: true", False),
        ("fp32_optimizer_states: false", True),
        ("fp32_optimizer_states: auto", False),
        ("set_grad_none: true", False),
        ("amsgrad: false", False),
        ("amsgrad: true", True),
    ],
)
def test_optimizer_settings_of_a_deepspeed_json(load: Load, setting: str, is_refused: bool) -> None:
    text = f"{BASE}deepspeed: {{optimizer: {{type: AdamW, params: {{{setting}}}}}}}"
    if not is_refused:
        assert load(text).config.train_args.optim == "adamw"
        return
    with raises_error(ConfigError, code="unsupported-value", naming=setting.partition(":")[0]):
        load(text)
