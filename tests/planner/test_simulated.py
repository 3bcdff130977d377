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
from paceline.planner.estimate import estimate
from paceline.planner.machine.hardware import named_machine
from paceline.planner.micro_batch import micro_batch
from paceline.planner.model_profile import describe
from paceline.simulation.records import RankJob
from paceline.simulation.run import job_of, run_jobs

FAMILIES = {
    "qwen2": "Qwen/Qwen2.5-1.5B",
    "llama": "meta-llama/Llama-3.2-1B",
    "mistral": "mistralai/Mistral-7B-v0.3",
    "qwen3": "Qwen/Qwen3-1.7B",
    "gemma2": "google/gemma-2-2b",
    "gemma3": "google/gemma-3-1b-pt",
    "phi": "microsoft/phi-2",
    "gpt_neox": "EleutherAI/pythia-1b",
    "qwen3_moe": "Qwen/Qwen3-30B-A3B",
}
NUM_LAYERS = 4
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
    "context": (2, {"mode": "context"}),
    "context of 4": (4, {"mode": "context"}),
    "local_sgd": (4, {"mode": "local_sgd"}),
    "diloco": (4, {"mode": "diloco"}),
}
#: Layouts of mixtures. Most of them divide the experts.
MIXTURE_MODES: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (4, {"mode": "ddp"}),
    "zero3": (4, {"mode": "zero3"}),
    "data2-expert2": (2, {"data": 2, "expert": 2}),
    "data4-expert2": (4, {"data": 4, "expert": 2}),
    "shard4-expert2": (4, {"shard": 4, "expert": 2}),
    "shard4-expert4": (4, {"shard": 4, "expert": 4}),
}
_WIDTHS = {
    "vocab_size": 8192, "hidden_size": 1024, "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}  # fmt: skip
#: Of multi-head latent attention, and of the experts.
_LATENT = {
    "num_key_value_heads": 16, "kv_lora_rank": 256, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64,
    "v_head_dim": 64, "intermediate_size": 2048, "moe_intermediate_size": 512,
}  # fmt: skip
#: Of linear attention: queries and keys are repeated for two heads of values.
_LINEAR = {
    "linear_num_key_heads": 8, "linear_num_value_heads": 16, "linear_key_head_dim": 64,
    "linear_value_head_dim": 64, "head_dim": 64, "intermediate_size": 2048,
    "layer_types": ["linear_attention", "full_attention"] * (NUM_LAYERS // 2),
}  # fmt: skip
#: Mixtures in which activations are a large part of the memory.
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": 2048, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "intermediate_size": 2048, "moe_intermediate_size": 512, "head_dim": 64,
        "num_experts": 32, "num_experts_per_tok": 8,
    },
    "olmoe": {
        "intermediate_size": 512, "num_experts": 32, "num_experts_per_tok": 8,
        "num_key_value_heads": 16,
    },
    "gpt_oss": {
        "intermediate_size": 1024, "head_dim": 64, "num_local_experts": 16,
        "num_experts_per_tok": 4, "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * (NUM_LAYERS // 2),
    },
    "qwen2_moe": {  # an expert processes every token, and LoRA leaves the others frozen
        "intermediate_size": 2048, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 1024, "num_experts": 32, "num_experts_per_tok": 4,
    },
    # Their first layer is dense, and an expert processes every token; LoRA merges both.
    "glm4_moe": {
        "intermediate_size": 2048, "moe_intermediate_size": 512, "head_dim": 64,
        "n_routed_experts": 32, "num_experts_per_tok": 8, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "use_qk_norm": True,
    },
    "deepseek_v2": {
        **_LATENT, "n_routed_experts": 32, "num_experts_per_tok": 6, "n_shared_experts": 2,
        "first_k_dense_replace": 1, "q_lora_rank": None,
    },
    "deepseek_v3": {
        **_LATENT, "n_routed_experts": 32, "num_experts_per_tok": 8, "n_shared_experts": 1,
        "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "q_lora_rank": 384,
    },
    "glm4_moe_lite": {
        **_LATENT, "n_routed_experts": 32, "num_experts_per_tok": 4, "n_shared_experts": 1,
        "q_lora_rank": 384,
    },
    # Half of their layers have linear attention, the others multiply the result of attention by a
    # gate.
    "qwen3_next": {
        **_LINEAR, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 1024,
        "num_experts": 32, "num_experts_per_tok": 4,
    },
    "qwen3_5_moe_text": {
        **_LINEAR, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 1024,
        "num_experts": 32, "num_experts_per_tok": 4,
    },
}  # fmt: skip
#: Dense models with linear attention, as in mixtures.
HYBRIDS = {"qwen3_5_text": _LINEAR}
#: Of a step whose micro-batch is one sample of 1024 tokens.
CASES = [
    (family, mode)
    for family in FAMILIES
    for mode in MODES
    # It has one head for keys and values, which tensor parallelism cannot split.
    if family != "gemma3" or mode not in ("tensor", "hybrid")
]
#: Family, mode, LoRA, activation checkpointing → peak that the long test simulated.
SIMULATED_MIB = {
    ("gpt_neox", "zero3", True, False): 1367,
    ("phi", "local_sgd", False, True): 11003,
    ("phi", "pipeline", False, False): 6017,
    ("qwen3_moe", "single", False, False): 50912,
    ("qwen3_moe", "single", True, True): 9016,
    ("qwen3_moe", "tensor", False, False): 26100,
}
#: The same of mixtures.
SIMULATED_MIXTURES_MIB = {
    ("deepseek_v3", "ddp", True, False): 1752,
    ("deepseek_v3", "shard4-expert4", True, True): 562,
    ("qwen2_moe", "shard4-expert2", True, True): 475,
    ("qwen3_5_moe_text", "data4-expert2", False, True): 2790,
    ("qwen3_5_moe_text", "zero3", True, False): 1310,
}


def write_config(folder: Path, family: str) -> str:
    """Write the config.json of a family with fewer layers, and return its folder."""
    content = read_raw_config(FAMILIES[family])
    assert content is not None
    content["num_hidden_layers"] = NUM_LAYERS
    if isinstance(kinds := content.get("layer_types"), list):
        content["layer_types"] = kinds[:NUM_LAYERS]
    (folder / "config.json").write_text(json.dumps(content))
    return str(folder)


def plan(
    model: str, mode: str, lora: bool, checkpointing: bool, **args: int
) -> tuple[int, list[RankJob]]:
    """Return the estimated bytes, and the simulated ranks: all stages of a pipeline, else the
    first one."""
    world_size, parallel = (MODES | MIXTURE_MODES)[mode]
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
            **args,
        },
    )
    planned, batch = layout(config.parallel, world_size), micro_batch(config)
    estimated = estimate(planned, config, describe(config), batch, machine)
    ranks = range(world_size) if mode == "pipeline" else (0,)
    return estimated.total, [job_of(config, planned, batch, machine, rank) for rank in ranks]


Settings = tuple[bool, bool]  # LoRA, activation checkpointing
SETTINGS = [(lora, checkpointing) for lora in (False, True) for checkpointing in (False, True)]


def settings_of(family: str, mode: str) -> list[Settings]:
    """Return the settings that a mode supports: adapters on fused experts are refused with tensor
    and pipeline parallelism."""
    is_refused = family == "qwen3_moe" and mode in ("tensor", "pipeline", "hybrid")
    return [setting for setting in SETTINGS if not (setting[0] and is_refused)]


def compare(model: str, mode: str, settings: list[Settings], **args: int) -> None:
    """Check that the estimated peak is within 5 % of the simulated one."""
    plans = {each: plan(model, mode, *each, **args) for each in settings}
    reports = iter(run_jobs([job for _, jobs in plans.values() for job in jobs]))
    simulated = {
        each: max(next(reports)["peak_memory_bytes"] for _ in jobs)
        for each, (_, jobs) in plans.items()
    }
    estimated = {each: total for each, (total, _) in plans.items()}
    assert estimated == {each: pytest.approx(peak, rel=0.05) for each, peak in simulated.items()}


@pytest.mark.soak
@pytest.mark.usefixtures("compiled_shim")
@pytest.mark.parametrize(("family", "mode"), CASES)
def test_estimated_peak_is_within_5_percent(tmp_path: Path, family: str, mode: str) -> None:
    compare(write_config(tmp_path, family), mode, settings_of(family, mode))


@pytest.mark.soak
@pytest.mark.usefixtures("compiled_shim")
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt_neox"])
def test_estimated_peak_of_large_micro_batches(tmp_path: Path, family: str) -> None:
    """Here most of the memory is activations; those of gemma2 are scores of the whole row."""
    model = write_config(tmp_path, family)
    compare(model, "single", SETTINGS, per_device_train_batch_size=4, max_length=2048)


def write_mixture(folder: Path, family: str) -> str:
    """Write the config.json of a mixture or hybrid, and return its folder."""
    content = {"model_type": family, **_WIDTHS, **(MIXTURES | HYBRIDS)[family]}
    (folder / "config.json").write_text(json.dumps(content))
    return str(folder)


@pytest.mark.soak
@pytest.mark.usefixtures("compiled_shim")
@pytest.mark.parametrize("mode", MIXTURE_MODES)
@pytest.mark.parametrize("family", MIXTURES)
def test_estimated_peak_of_mixtures(tmp_path: Path, family: str, mode: str) -> None:
    compare(write_mixture(tmp_path, family), mode, SETTINGS, per_device_train_batch_size=2)


@pytest.mark.soak
@pytest.mark.usefixtures("compiled_shim")
@pytest.mark.parametrize("mode", ["ddp", "zero3"])
@pytest.mark.parametrize("family", HYBRIDS)
def test_estimated_peak_of_linear_attention(tmp_path: Path, family: str, mode: str) -> None:
    compare(write_mixture(tmp_path, family), mode, SETTINGS, per_device_train_batch_size=2)


@pytest.mark.parametrize(("case", "simulated_mib"), SIMULATED_MIXTURES_MIB.items())
def test_estimates_of_mixtures_agree_with_recorded_simulations(
    tmp_path: Path, case: tuple[str, str, bool, bool], simulated_mib: int
) -> None:
    family, *settings = case
    model = write_mixture(tmp_path, family)
    estimated, _ = plan(model, *settings, per_device_train_batch_size=2)
    assert estimated / 2**20 == pytest.approx(simulated_mib, rel=0.05)


@pytest.mark.parametrize("mode", ["tensor", "pipeline", "hybrid"])
def test_adapters_on_fused_experts_are_refused(tmp_path: Path, mode: str) -> None:
    estimated, _ = plan(write_config(tmp_path, "qwen3_moe"), mode, lora=True, checkpointing=False)
    assert estimated == 0


@pytest.mark.parametrize(("case", "simulated_mib"), SIMULATED_MIB.items())
def test_estimates_agree_with_recorded_simulations(
    tmp_path: Path, case: tuple[str, str, bool, bool], simulated_mib: int
) -> None:
    family, *settings = case
    estimated, _ = plan(write_config(tmp_path, family), *settings)
    assert estimated / 2**20 == pytest.approx(simulated_mib, rel=0.05)
