"""Test the time model: each part of a step against a hand calculation, or a change of a set-up
against the direction that physics gives."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.config.schema import Config
from paceline.models.shape.dims import LanguageDims
from paceline.parallel.registry import layout
from paceline.planner.devices import Device, devices, find_device
from paceline.planner.estimate import estimate
from paceline.planner.machine.hardware import named_machine
from paceline.planner.micro_batch import micro_batch
from paceline.planner.mode_time import setup_of_batch
from paceline.planner.model_profile import describe
from paceline.planner.setup import TrainingSetup
from paceline.planner.time.constants import coefficients_of, constants, factors_of, spread_of
from paceline.planner.time.rates import rates_of
from paceline.planner.time.step import EstimatedStepTime, step_time
from paceline.planner.time.work import RankWork, count_work

LLAMA_8B = LanguageDims(
    hidden=4096, layers=32, heads=32, key_heads=8, queries=4096, keys=1024, feed_forward=14336,
    vocabulary=128256,
)  # fmt: skip
A100, H100 = find_device("A100-80GB")[0], find_device("H100-SXM")[0]
SETUP = TrainingSetup(LLAMA_8B, samples=1, length=4096, software="fused", cross_entropy="fused")


def work(setup: TrainingSetup, device: Device = A100) -> RankWork:
    return count_work(setup, rates_of(setup, device))


def time(setup: TrainingSetup, device: Device = A100) -> EstimatedStepTime:
    return step_time(work(setup, device), coefficients_of(setup, device, constants()))


def test_operations_agree_with_six_per_parameter_and_token() -> None:
    counted = work(SETUP)
    block = LLAMA_8B.attention_weights + LLAMA_8B.expert_weights
    assert counted.products_s == pytest.approx(6 * 32 * block * 4096 / 312e12)
    assert counted.head_s == pytest.approx(6 * 4096 * 128256 * 4096 / 312e12)
    # Forward 1 and backward 2.5 times 2 × 4,096 × 4,096 / 2 per token and matrix, of two.
    attention = 4 * 4096 * 4096 / 2 * 4096 * 32 * 3.5
    assert counted.attention_s == pytest.approx(attention / 312e12)


def test_recomputation_repeats_the_forward_pass() -> None:
    none, full = work(SETUP), work(replace(SETUP, recompute="full"))
    assert full.products_s == pytest.approx(none.products_s * 4 / 3)
    # That of PyTorch stops before the last product, whose result is not saved.
    early = work(replace(SETUP, recompute="full", software="eager"))
    last = 4096 * 14336 / (LLAMA_8B.attention_weights + LLAMA_8B.expert_weights)
    assert early.products_s == pytest.approx(none.products_s * (4 - last) / 3)


def test_gathers_cross_the_network_of_the_whole_host_once() -> None:
    """16 ranks on two hosts: 2 gathers of 2 bytes and a scatter of 4 per parameter."""
    setup = replace(SETUP, shard=16, zero_stage=3)
    counted, sent = work(setup), 8 * setup.stage_parameters
    assert counted.shard_network_s == pytest.approx(sent / 2 / (8 * A100.network_bytes_s))
    assert counted.shard_link_s == pytest.approx(sent * 15 / 16 / A100.link_bytes_s)
    assert work(replace(setup, shard=8)).shard_network_s == 0


def test_traffic_that_computation_hides_costs_less_than_its_own_time() -> None:
    sharded = replace(SETUP, shard=8, zero_stage=3, samples=8)
    counted = work(sharded)
    assert 0 < time(sharded).traffic_s < counted.shard_link_s
    assert time(replace(sharded, shard=1)).traffic_s == pytest.approx(0, abs=1e-9)


def test_pipeline_idles_less_with_more_micro_batches_and_chunks() -> None:
    def idle_share(**changes: int) -> float:
        result = time(replace(SETUP, pipeline=4, **changes))
        return result.idle_s / result.total_s

    assert idle_share(micro_batches=4) > idle_share(micro_batches=32)
    assert idle_share(micro_batches=8) > idle_share(micro_batches=8, chunks=4)
    assert time(SETUP).idle_s == 0


def test_each_micro_batch_takes_the_time_of_the_stage_with_the_head() -> None:
    pipeline = replace(SETUP, pipeline=4, micro_batches=8)
    reached = coefficients_of(pipeline, A100, constants())
    counted = replace(work(pipeline), hop_s=0.0, hop_messages=0.0)
    result = step_time(counted, reached)
    busy = result.total_s - result.idle_s - result.optimizer_s
    without_head = replace(counted, head_s=0.0, head_per_row=0.0, head_per_width=0.0, logits_s=0.0)
    layers = step_time(without_head, reached)
    head = busy - (layers.total_s - layers.idle_s - layers.optimizer_s)  # a quarter of it
    last = (busy + 3 * head) / 8
    others = 3 * busy / 8 - 3 * head / 8
    expected = (8 * (last - busy / 8) + others) * reached.bubble
    assert result.idle_s == pytest.approx(expected)


def test_tied_embeddings_are_summed_between_the_ends_of_a_pipeline() -> None:
    tied = replace(SETUP, dims=replace(LLAMA_8B, tied=True), pipeline=4, micro_batches=8)
    sent = tied.gradient_bytes * 128256 * 4096
    assert work(tied).tied_link_s == pytest.approx(sent / A100.link_bytes_s)
    across = work(replace(tied, data=4))
    assert across.tied_link_s == 0
    assert across.tied_network_s == pytest.approx(sent / A100.network_bytes_s)
    assert time(tied).traffic_s > time(replace(tied, dims=LLAMA_8B)).traffic_s
    for other in (replace(tied, pipeline=1), replace(tied, dims=LLAMA_8B)):
        assert work(other).tied_link_s == work(other).tied_network_s == 0


def test_messages_between_stages_are_sent_during_computation() -> None:
    pipeline = replace(SETUP, pipeline=4, micro_batches=8)
    reached = coefficients_of(pipeline, A100, constants())
    counted = replace(work(pipeline), hop_messages=0.0)
    short = step_time(counted, reached)
    assert short.exposed_s == pytest.approx(3 * counted.hop_s * reached.hop)
    long = step_time(replace(counted, hop_s=100.0), reached)
    assert long.exposed_s > 8 * 99 * reached.hop


def test_tensor_parallelism_waits_for_its_exchanges() -> None:
    split = replace(SETUP, tensor=8, sequence_parallel=True)
    assert time(split).products_s < time(SETUP).products_s / 4
    assert time(split).exposed_s > 0
    assert time(replace(split, async_tensor=True)).exposed_s < time(split).exposed_s


@pytest.mark.parametrize(
    ("parallel", "recompute"),
    [({"data": 4}, False), ({"data": 4}, True), ({"shard": 4}, False), ({"data": 2}, False)],
)
def test_experts_wait_for_the_predicted_exchange(
    tmp_path: Path, parallel: dict[str, int], recompute: bool
) -> None:
    """The time counts the same bytes as the traffic, except for the numbers of tokens."""
    fields = {"model_type": "mixtral", "hidden_size": 256, "num_hidden_layers": 3}
    fields |= {"num_attention_heads": 4, "num_local_experts": 4, "intermediate_size": 128}
    fields["num_experts_per_tok"] = 2
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = Config(
        model=str(tmp_path),
        dataset="none.jsonl",
        parallel={**parallel, "expert": 2},
        train_args={
            "precision": "bf16-mixed",
            "max_length": 512,
            "gradient_checkpointing": recompute,
            "gradient_accumulation_steps": 2,
        },
    )
    world_size = math.prod(parallel.values())
    machine = named_machine(H100, None, world_size, "bfloat16")
    planned, batch = layout(config.parallel, world_size), micro_batch(config)
    profile = describe(config)
    mode = estimate(planned, config, profile, batch, machine)
    setup = setup_of_batch(config, profile, planned, batch)
    assert mode.cost is not None
    assert setup is not None
    counted = work(setup, H100).expert_link_s * H100.link_bytes_s
    sent = mode.cost.traffic["all_to_all"] / 2  # of a micro-batch
    assert counted == pytest.approx(sent, rel=0.001)
    assert mode.time is not None
    assert mode.time.parts is not None
    assert mode.time.parts.exposed_s > 2 * counted / H100.link_bytes_s


def test_experts_of_each_rank_are_gathered_from_the_ranks_with_the_same_experts() -> None:
    dims = replace(LLAMA_8B, experts=8, experts_per_token=2)
    sharded = replace(SETUP, dims=dims, shard=8, zero_stage=3)
    whole, alone = work(sharded), work(replace(sharded, expert=8))
    experts = sharded.stage_expert_parameters
    # Two gathers of 2 bytes and a scatter of 4.
    sent = 8 * experts * 7 / 8
    assert whole.shard_link_s - alone.shard_link_s == pytest.approx(sent / A100.link_bytes_s)


def test_small_models_wait_for_launches_unless_graphs_launch_them() -> None:
    dims = replace(LLAMA_8B, hidden=512, queries=512, keys=128, feed_forward=1024, vocabulary=1000)
    small = TrainingSetup(dims, samples=1, length=256, software="eager")
    assert time(small).launches_s > 0.5 * time(small).total_s
    assert time(replace(small, software="native")).launches_s == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    "changes",
    [
        {"expert": 8, "shard": 8, "zero_stage": 1},
        {"context": 4},
        {"lora_rank": 16, "frozen_bits": 4},
        {"precision": "fp8", "fp8_scaling": "row"},
        {"zero_stage": 1, "shard": 16, "data": 2},
        {"offload": ("optimizer", "activations")},
    ],
)
def test_every_kind_of_setup_has_a_time(changes: dict[str, object]) -> None:
    dims = replace(LLAMA_8B, experts=8, experts_per_token=2)
    setup = replace(SETUP, dims=dims, **changes)
    result = time(setup, H100)
    assert 0 < result.total_s < 1000
    assert all(value >= 0 for value in vars(result).values())


def test_every_device_has_constants() -> None:
    for device in devices():
        reached = coefficients_of(SETUP, device, constants())
        assert 0.2 < reached.product_share < 1.3
        assert 0 < spread_of(device) < 1
        for used in factors_of(SETUP, device).values():
            for name in used:
                assert name in constants() or name == f"products: {device.chip}"
