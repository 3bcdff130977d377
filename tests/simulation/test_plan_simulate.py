"""Test `paceline plan --simulate`: memory, messages and FLOPs of simulated ranks, and what cannot
be simulated. The simulated ranks are in processes of their own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from adapter_families import write_config
from raised import raises_error

from paceline.cli import main
from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.parallel.registry import layout
from paceline.planner.devices import find_device
from paceline.planner.machine.hardware import named_machine
from paceline.planner.micro_batch import micro_batch
from paceline.simulation import run
from paceline.simulation.records import RankReport, verdict_of

MICRO = "builtin:qwen2-micro"
H100 = find_device("H100-SXM")[0]


def job(world_size: int, rank: int = 0, **keys: Any) -> run.RankJob:
    train_args = {"precision": "bf16-mixed", "max_length": 128}
    keys = {"model": MICRO, "train_args": train_args} | keys
    config = Config(dataset="none.jsonl", **keys)
    machine = named_machine(H100, None, world_size, "bfloat16")
    return run.job_of(
        config, layout(config.parallel, world_size), micro_batch(config), machine, rank
    )


def sent(report: RankReport) -> dict[str, int]:
    return {message["collective"]: message["bytes"] for message in report["messages"]}


def plan(capsys: pytest.CaptureFixture[str], *args: str, world_size: int = 4) -> dict[str, Any]:
    keys = [f"model={MICRO}", "dataset=none.jsonl", "max_length=128", *args]
    device = [] if "--device" in args else ["--device", "H100-SXM"]
    assert (
        main(["plan", *keys, "--world-size", str(world_size), *device, "--simulate", "--json"]) == 0
    )
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("world_size", "ranks"), [(2, [0, 1]), pytest.param(4, [0, 2, 3], marks=pytest.mark.soak)]
)
@pytest.mark.usefixtures("compiled_shim")
def test_plan_simulates_up_to_three_ranks(
    capsys: pytest.CaptureFixture[str], world_size: int, ranks: list[int]
) -> None:
    result = plan(capsys, "parallel.mode=zero3", world_size=world_size)
    simulated, parameters = result["simulated"], result["parameters"]
    assert result["simulated_reason"] is None
    assert [rank["rank"] for rank in simulated["ranks"]] == ranks
    assert simulated["verdict"] == "fits"
    for rank in simulated["ranks"]:
        assert rank["peak_memory_bytes"] == sum(rank["memory_bytes"].values())
        # a shard of the weights and of both moments, in allocations of 512 bytes
        shard_bytes = 4 * parameters / world_size
        assert rank["memory_bytes"]["parameters"] == pytest.approx(shard_bytes, rel=0.1)
        assert rank["memory_bytes"]["optimizer"] == pytest.approx(2 * shard_bytes, rel=0.2)
        # Weights for forward and for backward in bfloat16, except the table of tokens, which is
        # also the head, and the last norm; they stay gathered. Gradients once in float32.
        kept = 8192 * 64 + 64
        assert sent(rank)["all_gather"] == pytest.approx(4 * parameters - 2 * kept, rel=0.01)
        assert sent(rank)["reduce_scatter"] == pytest.approx(4 * parameters, rel=0.01)
        assert rank["time_floor_s"] > 0
    peaks = [rank["peak_memory_bytes"] for rank in simulated["ranks"]]
    assert simulated["peak_memory_bytes"] == max(peaks)


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["parallel.mode=deepspeed"], "`parallel.mode: deepspeed` is not simulated"),
        (["optim=adamw_8bit"], "`train_args.optim: adamw_8bit` is not simulated"),
        (["fp8=rowwise", "precision=bf16-mixed"], "`train_args.fp8: rowwise` is not simulated"),
        (["parallel.mode=dp"], "`parallel.mode: dp` is not simulated"),
        (["parallel.mode=parameter_server"], "parameter_server"),
        (["parallel.mode=tensor", "parallel.tensor=3"], "does not make 4 ranks"),
        (["parallel.mode=ddp", "compression.method=topk"], "`compression` is not simulated"),
    ],
)
def test_gives_the_reason_if_a_run_is_not_simulated(
    capsys: pytest.CaptureFixture[str], args: list[str], reason: str
) -> None:
    result = plan(capsys, *args)
    assert result["simulated"] is None
    assert reason in result["simulated_reason"]


def test_verdict_leaves_room_for_what_the_allocator_reserves() -> None:
    assert [verdict_of(peak, 123) for peak in (99, 101, 123, 124)] == [
        "fits",
        "unsure",
        "unsure",
        "does_not_fit",
    ]


def test_reports_an_interpreter_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(run.PYTHON_VARIABLE, "/none/python")
    with raises_error(ConfigError, code="simulation-python-missing", naming="/none/python"):
        run.run_jobs([job(1)])


@pytest.mark.soak
@pytest.mark.usefixtures("compiled_shim")
def test_simulates_every_strategy() -> None:
    micro_batches = {"precision": "bf16-mixed", "max_length": 128, "gradient_accumulation_steps": 8}
    single, ddp, accumulated, zero1, tensor, first, last, local = run.run_jobs(
        [
            job(1),
            job(4, parallel={"mode": "ddp"}),
            job(4, parallel={"mode": "ddp"}, train_args=micro_batches),
            job(4, parallel={"mode": "zero1"}),
            job(4, parallel={"tensor": 2, "data": 2}),
            job(2, parallel={"mode": "pipeline"}, train_args=micro_batches),
            job(2, 1, parallel={"mode": "pipeline"}, train_args=micro_batches),
            job(4, parallel={"mode": "local_sgd"}, local_sgd={"sync_every": 10}),
        ]
    )
    assert single["messages"] == []
    gradients = ddp["memory_bytes"]["gradients"]
    assert gradients == single["memory_bytes"]["gradients"]
    assert sent(ddp)["all_reduce"] == pytest.approx(gradients, rel=0.01)
    # every micro-batch is counted; the gradients are reduced once
    assert accumulated["flops"] == 8 * ddp["flops"]
    assert sent(accumulated) == sent(ddp)
    assert zero1["memory_bytes"]["optimizer"] < ddp["memory_bytes"]["optimizer"] / 3
    assert sent(zero1)["all_gather"] == sent(zero1)["reduce_scatter"]
    assert sent(tensor)["all_reduce"] > 0
    assert tensor["flops"] < ddp["flops"]
    # hidden states of each micro-batch, and their gradients
    assert sent(first)["send"] >= 8 * 128 * 64 * 4
    assert sent(last)["send"] >= 8 * 128 * 64 * 4
    # the parameters are averaged every 10 steps
    assert sent(local)["all_reduce"] == pytest.approx(gradients / 10, rel=0.01)


@pytest.mark.soak
@pytest.mark.usefixtures("compiled_shim")
def test_counts_the_products_of_experts(tmp_path: Path) -> None:
    """Each expert that computes a token adds its products, forward once and backward twice."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    models = [
        str(write_config("mixtral", tmp_path / str(count), num_experts_per_tok=count, **sizes))
        for count in (1, 2)
    ]
    # Autocast leaves the weights of experts in float32; those that FSDP gathers are in bfloat16.
    for parallel, world_size in (({"mode": "single"}, 1), ({"mode": "zero3"}, 2)):
        sparse, dense = run.run_jobs(
            [job(world_size, model=model, parallel=parallel) for model in models]
        )
        tokens = 4 * 128
        assert dense["flops"] - sparse["flops"] == 3 * 2 * tokens * 2 * (3 * 64 * 96)


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.usefixtures("compiled_shim")
@pytest.mark.parametrize(
    "settings", [("--device-memory", "6GB"), ("--device-memory", "4GB", "lora.quantize=nf4")]
)
def test_simulates_the_run_with_the_settings_that_are_chosen_for_it(
    settings: tuple[str, ...],
) -> None:
    # In a process of its own, because tests of this process do not see bitsandbytes.
    model = "model=Qwen/Qwen2.5-0.5B"
    command = [sys.executable, "-m", "paceline", "plan", model, "dataset=none.jsonl"]
    layout_ = ["parallel.mode=ddp", "lora.enable=true", "max_length=1024", "--world-size", "2"]
    device = ["--device", "A10", "--simulate", "--json"]
    done = subprocess.run(
        [*command, *layout_, *settings, *device], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["simulated_reason"] is None
    assert result["run"]["settings"]
    assert result["run"]["fits"]
    predicted = result["run"]["memory_bytes"]["total"]
    assert result["simulated"]["peak_memory_bytes"] == pytest.approx(predicted, rel=0.05)
