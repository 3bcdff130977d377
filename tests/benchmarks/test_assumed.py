"""Test the estimates of set-ups that Paceline may not train: `benchmarks/planner_assume.py`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmark_modules import BENCHMARKS, import_benchmark
from raised import raises_error

from paceline.core.errors import ConfigError
from paceline.models.shape.dims import LanguageDims
from paceline.planner.setup import TrainingSetup

keys, parts = import_benchmark("assumed.keys"), import_benchmark("assumed.memory_parts")
assume, parse_assumptions, memory_parts = keys.assume, keys.parse_assumptions, parts.memory_parts
DIMS = LanguageDims(
    hidden=1024, layers=8, heads=8, key_heads=8, queries=1024, keys=1024, feed_forward=4096,
    vocabulary=32000, experts=8, experts_per_token=2,
)  # fmt: skip
SETUP = TrainingSetup(DIMS, samples=2, length=1024)


def test_values_are_parsed_by_the_type_of_their_field() -> None:
    texts = ["tensor=2", "software=fused", "offload=optimizer,weights", "async_tensor=TRUE"]
    assert parse_assumptions(texts) == {
        "tensor": 2, "software": "fused", "offload": ("optimizer", "weights"), "async_tensor": True,
    }  # fmt: skip
    assert assume(SETUP, parse_assumptions(["link_gb_s=25"])).link_bytes_s == 25e9


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("tensor", "missing-value"),
        ("tensr=2", "unknown-key"),
        ("tensor=two", "wrong-type"),
        ("tensor=-1", "wrong-type"),
        ("software=fast", "wrong-type"),
        ("offload=disk", "wrong-type"),
        ("tensor=0", "out-of-range"),
        ("zero_stage=4", "unknown-value"),
        ("pipeline=16", "too-many-stages"),
    ],
)
def test_wrong_assumptions_are_errors(text: str, code: str) -> None:
    with raises_error(ConfigError, code=code):
        assume(SETUP, parse_assumptions([text]))


def test_an_assumed_axis_replaces_the_layout() -> None:
    base = assume(SETUP, {"shard": 8})
    assert (base.shard, assume(base, {"tensor": 2}).shard) == (8, 1)
    assert assume(base, {"software": "fused"}).shard == 8


def test_state_is_divided_as_zero_and_the_axes_say() -> None:
    """Bytes a parameter: 16-bit weights 2, gradients 2, and 12 of the optimizer."""
    mixed = assume(SETUP, {"low_copy": True, "gradient_bytes": 2})
    parameters = mixed.trained_parameters
    alone = memory_parts(mixed)
    assert alone.weights + alone.gradients + alone.optimizer == pytest.approx(16 * parameters)
    first = memory_parts(assume(mixed, {"shard": 4, "zero_stage": 1}))
    assert (first.weights, first.gradients) == (2 * parameters, 2 * parameters)
    assert first.optimizer == pytest.approx(3 * parameters)
    third = memory_parts(assume(mixed, {"shard": 4, "zero_stage": 3}))
    assert third.weights == pytest.approx(parameters / 2)
    assert third.gathered > 0
    experts = assume(mixed, {"data": 8, "expert": 8})
    assert experts.stage_expert_parameters == mixed.stage_expert_parameters / 8


def test_activations_shrink_with_recomputation_and_sequence_parallelism() -> None:
    def activations(**values: str | int | bool) -> float:
        return memory_parts(assume(SETUP, values)).activations

    assert activations(recompute="full") < activations(recompute="selective") < activations()
    split = activations(tensor=4)
    assert activations() / 4 < split < activations()
    assert activations(tensor=4, sequence_parallel=True) == pytest.approx(activations() / 4)
    assert activations(context=4) == pytest.approx(activations() / 4)
    assert activations(software="fused") < activations(software="eager")


def test_script_prints_the_estimate(tmp_path: Path) -> None:
    widths = {
        "model_type": "llama", "hidden_size": 1024, "intermediate_size": 4096,
        "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8,
        "vocab_size": 32000,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(widths))
    config = tmp_path / "config.yaml"
    config.write_text(f"model: {tmp_path}\ndataset: none.jsonl\nparallel: {{mode: ddp}}\n")
    command = [
        sys.executable, str(BENCHMARKS / "planner_assume.py"), str(config), "--device", "H100",
        "--world-size", "16", "--assume", "tensor=2", "--assume", "zero_stage=1",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("fits: ")
    assert "tokens per second" in done.stdout


def test_axes_have_to_fit_the_number_of_devices() -> None:
    values = {"tensor": 2, "shard": 3}
    on_all_devices = import_benchmark("planner_assume")._on_all_devices
    with raises_error(ConfigError, code="wrong-number-of-devices"):
        on_all_devices(assume(SETUP, values), values, 16)
    assert on_all_devices(assume(SETUP, {"tensor": 2}), {"tensor": 2}, 16).data == 8


def test_every_key_is_documented() -> None:
    page = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    assert [key for key in keys.KEYS if f"`{key}`" not in page] == []
