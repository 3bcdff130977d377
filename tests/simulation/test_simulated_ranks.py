"""Compare simulated steps of two models with those of a script that uses transformers, FSDP2,
DTensor and peft directly, without Paceline (H100, 8 ranks, 1 × 2048 tokens on each). Its settings
differ from Paceline's, so they are compared with its settings (plain_worker.py), and the difference
to Paceline's own is printed by kind."""

from pathlib import Path
from typing import Any

import pytest

from paceline.config.schema import Config
from paceline.parallel.registry import layout
from paceline.planner.devices import find_device
from paceline.planner.machine.hardware import named_machine
from paceline.planner.micro_batch import micro_batch
from paceline.simulation.records import RankJob, RankReport
from paceline.simulation.run import job_of, run_jobs

pytestmark = [pytest.mark.soak, pytest.mark.usefixtures("compiled_shim")]

PLAIN_WORKER = str(Path(__file__).with_name("plain_worker.py"))
GIB = 2**30
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"parallel": {"mode": "ddp"}},
    "zero3": {"parallel": {"mode": "zero3"}},
    "zero3, checkpointing": {
        "parallel": {"mode": "zero3"},
        "train_args": {"gradient_checkpointing": True},
    },
    "LoRA": {"parallel": {"mode": "ddp"}, "lora": {"enable": True, "rank": 64, "dropout": 0.0}},
    "tensor 4": {"parallel": {"tensor": 4, "data": 2}},
}
#: GiB at the peak and TFLOP of a step of rank 0. With checkpointing, the script ran without torch's
#: FlopCounterMode, whose hooks keep outputs of modules during backward.
EXPECTED = {
    "Qwen/Qwen2.5-7B": {
        "ddp": (145.0, 92.8),
        "zero3": (29.6, 92.8),
        "zero3, checkpointing": (19.77, 113.4),
        "LoRA": (34.1, 65.7),
        "tensor 4": (24.3, 28.2),
    },
    "meta-llama/Meta-Llama-3-8B": {
        "ddp": (152.4, 99.9),
        "zero3": (29.8, 99.9),
        "zero3, checkpointing": (20.34, 123.0),
        "LoRA": (35.0, 71.1),
        "tensor 4": (25.1, 29.8),
    },
}
#: GiB at the peak with checkpointing, within FlopCounterMode.
EXPECTED_COUNTED = {"Qwen/Qwen2.5-7B": 25.2, "meta-llama/Meta-Llama-3-8B": 27.0}


def job_for(model: str, name: str) -> RankJob:
    settings = LAYOUTS[name]
    args = {
        "precision": "bf16-mixed",
        "per_device_train_batch_size": 1,
        "max_length": 2048,
        "packing": False,
        **settings.get("train_args", {}),
    }
    config = Config(model=model, dataset="none.jsonl", **{**settings, "train_args": args})
    machine = named_machine(find_device("H100-SXM")[0], None, 8, "bfloat16")
    return job_of(config, layout(config.parallel, 8), micro_batch(config), machine, 0)


def text(report: RankReport) -> str:
    kinds = {kind: round(size / GIB, 2) for kind, size in report["memory_bytes"].items()}
    return f"{report['peak_memory_bytes'] / GIB:.2f} GiB, of which {kinds}"


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("model", EXPECTED)
def test_agrees_with_a_script_without_paceline(model: str, name: str) -> None:
    job = job_for(model, name)
    program = [PLAIN_WORKER, name]
    [plain] = run_jobs([job], program)
    [default] = run_jobs([job])
    print(f"\n{model}, {name}: its settings: {text(plain)}\n  Paceline's: {text(default)}")
    peak, flops = EXPECTED[model][name]
    assert plain["peak_memory_bytes"] / GIB == pytest.approx(peak, rel=0.03)
    assert plain["flops"] / 1e12 == pytest.approx(flops, rel=0.03)
    if "tensor" in name:  # the head is split too
        assert default["flops"] < 0.9 * plain["flops"]
    else:
        assert default["flops"] == pytest.approx(plain["flops"], rel=0.03)


@pytest.mark.parametrize("model", EXPECTED_COUNTED)
def test_counting_operations_keeps_outputs_of_recomputed_modules(model: str) -> None:
    name = "zero3, checkpointing"
    [counted] = run_jobs([job_for(model, name)], [PLAIN_WORKER, name, "counted"])
    print(f"\n{model}, {name}, operations counted: {text(counted)}")
    assert counted["peak_memory_bytes"] / GIB == pytest.approx(EXPECTED_COUNTED[model], rel=0.03)
