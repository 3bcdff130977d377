"""Compare the predictions of the planner with published figures."""

import json
from pathlib import Path

import pytest

from paceline.config.schema import Config
from paceline.distributed.mesh import ParallelDims
from paceline.models.language import language_model_on_meta
from paceline.models.shape.record import ModelShape, TensorShape
from paceline.parallel.cost import Cost, Workload
from paceline.parallel.registry import estimate_cost
from paceline.planner.api import make_plan

GB = 1e9
LLAMA = {
    "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 32000,
    "tie_word_embeddings": False,
}  # fmt: skip
QWEN = {
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
    "tie_word_embeddings": False,
}  # fmt: skip


def write_config(tmp_path: Path, content: dict[str, object]) -> str:
    """Write a config.json and return its folder."""
    (tmp_path / "config.json").write_text(json.dumps(content))
    return str(tmp_path)


def estimate_zero_cost(mode: str, ranks: int, **parallel: object) -> Cost:
    """Return the cost of the model in the ZeRO paper: 7.5 billion parameters, mixed-precision
    Adam."""
    blocks = tuple(f"blocks.{number}" for number in range(10))
    weights = tuple(TensorShape(f"{name}.weight", (7500 * 1000, 100), 4, True) for name in blocks)
    shape = ModelShape(weights, low_bytes=2, blocks=blocks)
    config = Config(
        model="m",
        dataset="d",
        parallel={"mode": mode, "reduce_dtype": "auto", **parallel},
        train_args={"precision": "bf16-mixed"},
    )
    axes = ParallelDims(shard=ranks) if mode in ("zero2", "zero3") else ParallelDims(data=ranks)
    return estimate_cost(mode, shape, axes, Workload(), config)


def test_memory_matches_the_zero_paper() -> None:
    """Rajbhandari et al., "ZeRO", 2020, figure 1: 120 GB, and on 64 ranks 31.4, 16.6 and 1.9 GB."""
    assert estimate_zero_cost("ddp", 64).state / GB == pytest.approx(120, abs=0.05)
    first = estimate_zero_cost("zero1", 64)
    assert first.state / GB == pytest.approx(31.4, abs=0.05)
    assert (first.parameters + first.gradients / 64 + first.optimizer) / GB == pytest.approx(
        16.6, abs=0.05
    )
    # FSDP2 keeps its share of the gradients in float32, the paper in 16 bits: 2 + 16/N bytes a
    # parameter for 2 + 14/N.
    assert estimate_zero_cost("zero2", 64).state / GB == pytest.approx(
        7.5 * (2 + 16 / 64), abs=0.05
    )
    assert estimate_zero_cost("zero3", 64).state / GB == pytest.approx(1.9, abs=0.05)


def test_traffic_matches_the_zero_paper() -> None:
    """Section 7 of the same paper: 2Ψ, 2Ψ, 2Ψ and 3Ψ times (N-1)/N, where Ψ is in bytes."""
    share, elements = 63 / 64, 7.5e9
    # float32 gradients
    assert estimate_zero_cost("ddp", 64).traffic_per_step == pytest.approx(
        2 * 4 * elements * share, rel=1e-6
    )
    low, full = 2 * elements * share, 4 * elements * share
    for mode, times in (("zero1", 2), ("zero2", 2), ("zero3", 3)):
        assert (
            times * low * 0.999
            <= estimate_zero_cost(mode, 64).traffic_per_step
            <= times * full * 1.001
        )


def test_dp_traffic_concentrates_on_device_0() -> None:
    """DataParallel sends all weights from device 0 and all gradients to it, which is N times the
    traffic of a rank in an all-reduce."""
    ddp, dp = estimate_zero_cost("ddp", 8), estimate_zero_cost("dp", 8)
    assert dp.traffic_per_step == pytest.approx(8 * ddp.traffic_per_step, rel=1e-6)
    assert dp.state >= ddp.state


@pytest.mark.parametrize(
    ("content", "parameters"),
    [({**LLAMA, "vocab_size": 128256}, 70_553_706_496), (QWEN, 7_615_616_512)],
    ids=["llama-3-70b", "qwen2-7b"],
)
def test_parameter_counts_of_known_models(
    tmp_path: Path, content: dict[str, object], parameters: int
) -> None:
    model = language_model_on_meta(Config(model=write_config(tmp_path, content), dataset="none"))
    assert sum(tensor.numel() for tensor in model.parameters()) == parameters
    assert {tensor.device.type for tensor in model.parameters()} == {"meta"}


def test_plans_llama_2_70b_without_weights_or_data(tmp_path: Path) -> None:
    config = Config(
        model=write_config(tmp_path, LLAMA),
        dataset="none.jsonl",
        train_args={
            "precision": "bf16-mixed",
            "gradient_checkpointing": "full",
            "per_device_train_batch_size": 1,
        },
    )
    plan = make_plan(config, world_size=64, device="H100-SXM")
    report = plan.as_dict()
    parameters = 68_976_648_192
    assert report["parameters"] == parameters
    modes = {mode["mode"]: mode for mode in report["modes"]}
    # 16 bytes per parameter fit no device; ZeRO-3 divides them into 64 shards of 17.2 GB.
    ddp, zero3 = modes["ddp"]["memory_bytes"], modes["zero3"]["memory_bytes"]
    assert ddp["parameters"] + ddp["gradients"] + ddp["optimizer"] == pytest.approx(
        16 * parameters, rel=1e-3
    )
    assert zero3["parameters"] + zero3["gradients"] + zero3["optimizer"] == pytest.approx(
        16 * parameters / 64, rel=0.2
    )
    assert not modes["ddp"]["fits"]
    assert modes["zero3"]["fits"]
    assert report["chosen"] is not None
    # With 1,024 tokens per rank, a step takes longer to gather the weights twice and to scatter the
    # gradients, which cross the network of the host, than to compute.
    device = plan.machine.device
    assert device is not None
    least_s = (2 * 2 + 4) * parameters * 7 / 8 / (8 * device.network_bytes_s)
    step_s = modes["zero3"]["step_time_s"]
    low_s, high_s = modes["zero3"]["step_time_range_s"]
    assert least_s < step_s < 3 * least_s
    assert low_s < step_s < high_s
