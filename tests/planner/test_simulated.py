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
from paceline.simulation.records import RankJob
from paceline.simulation.run import job_of, run_jobs

pytestmark = [pytest.mark.soak, pytest.mark.usefixtures("compiled_shim")]

FAMILIES = {
    "qwen2": "Qwen/Qwen2.5-1.5B",
    "llama": "meta-llama/Llama-3.2-1B",
    "mistral": "mistralai/Mistral-7B-v0.3",
    "qwen3": "Qwen/Qwen3-1.7B",
    "gemma2": "google/gemma-2-2b",
    "gemma3": "google/gemma-3-1b-pt",
    "phi": "microsoft/phi-2",
    "gpt_neox": "EleutherAI/pythia-1b",
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
}
CASES = [
    (family, mode)
    for family in FAMILIES
    for mode in MODES
    if family in ("qwen2", "llama") or mode in ("single", "ddp", "zero1")
]
NUM_LAYERS = 4


def write_config(folder: Path, family: str) -> str:
    """Write the config.json of a family with fewer layers, and return its folder."""
    content = read_raw_config(FAMILIES[family])
    assert content is not None
    content["num_hidden_layers"] = NUM_LAYERS
    if isinstance(kinds := content.get("layer_types"), list):
        content["layer_types"] = kinds[:NUM_LAYERS]
    (folder / "config.json").write_text(json.dumps(content))
    return str(folder)


def plan(model: str, mode: str, lora: bool, checkpointing: bool) -> tuple[int, list[RankJob]]:
    """Return the estimated bytes, and the simulated ranks: all stages of a pipeline, else the
    first one."""
    world_size, parallel = MODES[mode]
    machine = named_machine(find_device("H100-SXM")[0], None, world_size, "bfloat16")
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
    estimated = estimate(planned, config, describe(config), batch, machine)
    ranks = range(world_size) if mode == "pipeline" else (0,)
    return estimated.total, [job_of(config, planned, batch, machine, rank) for rank in ranks]


@pytest.mark.parametrize(("family", "mode"), CASES)
def test_estimated_peak_is_within_5_percent(tmp_path: Path, family: str, mode: str) -> None:
    model = write_config(tmp_path, family)
    plans = {
        (lora, checkpointing): plan(model, mode, lora, checkpointing)
        for lora in (False, True)
        for checkpointing in (False, True)
    }
    reports = iter(run_jobs([job for _, jobs in plans.values() for job in jobs]))
    simulated = {
        key: max(next(reports)["peak_memory_bytes"] for _ in jobs)
        for key, (_, jobs) in plans.items()
    }
    estimated = {key: total for key, (total, _) in plans.items()}
    assert estimated == {key: pytest.approx(peak, rel=0.05) for key, peak in simulated.items()}
