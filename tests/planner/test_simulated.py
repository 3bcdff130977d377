"""Compare the memory that the planner estimates with that of simulated ranks: models of several
families with four of their layers, with full fine-tuning and LoRA, with and without activation
checkpointing."""

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.config.schema import Config
from paceline.models.hub_configs import read_raw_config
from paceline.parallel.registry import layout
from paceline.planner.devices import find_device
from paceline.planner.estimate import estimate, micro_batch
from paceline.planner.hardware import named_machine
from paceline.planner.model_profile import describe
from paceline.simulation.run import job_of, run_jobs

pytestmark = [pytest.mark.soak, pytest.mark.usefixtures("compiled_shim")]

FAMILIES = {
    "qwen2": "Qwen/Qwen2.5-1.5B",
    "llama": "meta-llama/Llama-3.2-1B",
}
MODES: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {"mode": "single"}),
    "ddp": (4, {"mode": "ddp"}),
    "zero1": (4, {"mode": "zero1"}),
    "zero2": (4, {"mode": "zero2"}),
    "zero3": (4, {"mode": "zero3"}),
    "zero3 with replicas": (4, {"mode": "zero3", "data": 2}),
    "tensor": (2, {"mode": "tensor"}),
    "pipeline": (2, {"mode": "pipeline"}),
    "hybrid": (4, {"data": 2, "tensor": 2}),
    "local_sgd": (4, {"mode": "local_sgd"}),
}
NUM_LAYERS = 4


def write_config(folder: Path, family: str) -> str:
    content = read_raw_config(FAMILIES[family])
    assert content is not None
    content["num_hidden_layers"] = NUM_LAYERS
    (folder / "config.json").write_text(json.dumps(content))
    return str(folder)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_estimated_peak_is_within_5_percent(tmp_path: Path, family: str, mode: str) -> None:
    model = write_config(tmp_path, family)
    world_size, parallel = MODES[mode]
    machine = named_machine(find_device("H100-SXM")[0], None, world_size, "bfloat16")
    estimated, jobs = {}, []
    for lora in (False, True):
        for checkpointing in (False, True):
            config = Config(
                model=model,
                dataset="none.jsonl",
                parallel=parallel,
                lora={"enable": lora, "rank": 16},
                local_sgd={"sync_every": 4},
                train_args={
                    "precision": "bf16-mixed",
                    "per_device_train_batch_size": 1,
                    "max_length": 1024,
                    "gradient_checkpointing": checkpointing,
                    "gradient_accumulation_steps": 4 if mode == "pipeline" else 1,
                },
            )
            planned, batch = layout(config.parallel, world_size), micro_batch(config)
            mode_estimate = estimate(planned, config, describe(config), batch, machine)
            estimated[lora, checkpointing] = mode_estimate.total
            ranks = range(world_size) if mode == "pipeline" else (0,)
            jobs += [job_of(config, planned, batch, machine, rank) for rank in ranks]
    peaks = [report["peak_memory_bytes"] for report in run_jobs(jobs)]
    per_run = len(peaks) // len(estimated)
    simulated = {
        key: max(peaks[number * per_run : (number + 1) * per_run])
        for number, key in enumerate(estimated)
    }
    assert estimated == {key: pytest.approx(peak, rel=0.05) for key, peak in simulated.items()}
