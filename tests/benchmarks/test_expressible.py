"""Test that assumptions have a key for each way to train, and that it changes memory and time
as that way does."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from benchmark_modules import import_benchmark

from paceline.models.shape.dims import LanguageDims, dims_of
from paceline.planner.devices import find_device
from paceline.planner.setup import TrainingSetup
from paceline.planner.time.constants import coefficients_of, constants
from paceline.planner.time.rates import rates_of
from paceline.planner.time.step import EstimatedStepTime, step_time
from paceline.planner.time.work import count_work

keys, parts = import_benchmark("assumed.keys"), import_benchmark("assumed.memory_parts")
H100, _ = find_device("H100-SXM")
DENSE = LanguageDims(
    hidden=4096, layers=32, heads=32, key_heads=8, queries=4096, keys=1024, feed_forward=14336,
    vocabulary=128256,
)  # fmt: skip


@dataclass(frozen=True)
class Estimate:
    setup: TrainingSetup
    memory: Any
    time: EstimatedStepTime

    @property
    def state(self) -> float:
        return self.memory.weights + self.memory.gradients + self.memory.optimizer

    @property
    def state_per_parameter(self) -> float:
        return self.state / self.setup.trained_parameters


def estimate(*flags: str, dims: LanguageDims = DENSE) -> Estimate:
    """Estimate 8 samples of 2,048 tokens with assumptions."""
    setup = keys.assume(TrainingSetup(dims, samples=8, length=2048), keys.parse_assumptions(flags))
    reached = coefficients_of(setup, H100, constants())
    time = step_time(count_work(setup, rates_of(setup, H100)), reached)
    return Estimate(setup, parts.memory_parts(setup), time)


Check = Callable[[Estimate, Estimate], bool]
CASES: dict[str, tuple[list[str], list[str], Check]] = {
    "weights and moments in bf16: 8 bytes a parameter": (
        [],
        ["weight_bytes=2", "gradient_bytes=2", "optimizer=adamw-bf16"],
        lambda before, after: (before.state_per_parameter, after.state_per_parameter) == (16, 8),
    ),
    "ZeRO-1 beside tensor parallelism: 4 + 12 / ranks": (
        ["tensor=4", "data=8", "low_copy=true", "gradient_bytes=2"],
        ["tensor=4", "shard=8", "zero_stage=1", "low_copy=true", "gradient_bytes=2"],
        lambda before, after: (
            before.state_per_parameter == 16 and after.state_per_parameter == 4 + 12 / 8
        ),
    ),
    "ZeRO-1 beside a pipeline": (
        ["pipeline=4", "data=8", "micro_batches=16"],
        ["pipeline=4", "shard=8", "zero_stage=1", "micro_batches=16"],
        lambda before, after: (
            after.memory.optimizer == before.memory.optimizer / 8
            and after.memory.weights == before.memory.weights
        ),
    ),
    "selective recomputation": (
        [],
        ["recompute=selective"],
        lambda before, after: (
            after.memory.activations < before.memory.activations
            and after.time.products_s == before.time.products_s
        ),
    ),
    "recomputation of half of the layers": (
        [],
        ["recompute=full", "recompute_share=0.5"],
        lambda before, after: before.time.products_s < after.time.products_s,
    ),
    "embedding and head divided by tensor ranks": (
        ["tensor=8"],
        ["tensor=8", "splits_head=true"],
        lambda before, after: (
            after.state < before.state and after.memory.temporary == before.memory.temporary / 8
        ),
    ),
    "sequence parallelism": (
        ["tensor=8"],
        ["tensor=8", "sequence_parallel=true"],
        lambda before, after: after.memory.activations < before.memory.activations,
    ),
    "context parallelism": (
        [],
        ["context=4"],
        lambda before, after: (
            after.memory.activations == before.memory.activations / 4
            and after.time.exposed_s > 1e-6 > before.time.exposed_s
        ),
    ),
    "fused cross entropy": (
        [],
        ["cross_entropy=fused"],
        lambda before, after: after.memory.temporary == before.memory.temporary / 2,
    ),
    "cross entropy in chunks": (
        [],
        ["cross_entropy=chunked"],
        lambda before, after: after.memory.temporary < before.memory.temporary / 8,
    ),
    "float8": (
        [],
        ["precision=fp8", "fp8_scaling=fused"],
        lambda before, after: after.time.products_s < before.time.products_s,
    ),
    "QLoRA": (
        ["lora_rank=16"],
        ["lora_rank=16", "frozen_bits=4"],
        lambda before, after: (
            after.memory.weights < 0.45 * before.memory.weights
            and after.time.memory_s > before.time.memory_s
        ),
    ),
    "torch.compile": (
        [],
        ["software=compiled"],
        lambda before, after: (
            after.time.memory_s < before.time.memory_s
            and after.memory.activations < before.memory.activations
        ),
    ),
    "optimizer on the host": (
        [],
        ["offload=optimizer"],
        lambda before, after: (
            after.memory.optimizer == 0 and after.time.host_s > before.time.host_s == 0
        ),
    ),
    "weights on the host": (
        [],
        ["offload=weights"],
        lambda before, after: (
            after.memory.weights < before.memory.weights / 8
            and after.time.host_s > before.time.host_s
        ),
    ),
    "activations on the host": (
        [],
        ["offload=activations"],
        lambda before, after: (
            after.memory.activations < before.memory.activations / 8
            and after.time.host_s > before.time.host_s
        ),
    ),
    "float32": (
        [],
        ["precision=float32"],
        lambda before, after: after.memory.activations > 1.5 * before.memory.activations,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_flag_changes_the_estimate(name: str) -> None:
    before, after, is_expected = CASES[name]
    assert is_expected(estimate(*before), estimate(*after))


def test_experts_of_a_config_are_divided_by_ranks() -> None:
    mixtral = dims_of(
        {
            "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336,
            "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
            "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2,
        }
    )  # fmt: skip
    assert mixtral is not None
    assert (mixtral.experts, mixtral.experts_per_token) == (8, 2)
    alone = estimate("data=8", dims=mixtral)
    parameters = alone.setup.stage_parameters + alone.setup.stage_expert_parameters
    assert parameters == pytest.approx(46.7e9, rel=0.01)
    divided = estimate("data=8", "expert=8", dims=mixtral)
    assert divided.setup.stage_expert_parameters == alone.setup.stage_expert_parameters / 8
    assert divided.time.exposed_s > 1e-6 > alone.time.exposed_s
