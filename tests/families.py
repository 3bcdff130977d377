"""Tiny random models of many families, and the equivalent of `paceline verify` for all of them on
one pair of ranks."""

import json
import time
import traceback
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from packaging.version import Version

NOISE = 0.02
SIZES = {
    "vocab_size": 8192,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
TOKENS = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0}
FFN = {"intermediate_size": 48}
KV = {"num_key_value_heads": 2}
LLAMA: dict[str, Any] = {**SIZES, **FFN, **KV}
EXPERTS = {
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 2,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
}
MLA = {
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
SSM = {"state_size": 4, "conv_kernel": 4, "expand": 2, "time_step_rank": 4}
GPT2 = {"vocab_size": 8192, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 128}

#: name → (model_type, config)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", LLAMA),
    "mistral": ("mistral", {**LLAMA, "sliding_window": 16}),
    "mixtral": ("mixtral", {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("qwen2", LLAMA),
    "qwen2_window": (
        "qwen2",
        {**LLAMA, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    ),
    "qwen2_moe": (
        "qwen2_moe",
        {**LLAMA, **EXPERTS, "shared_expert_intermediate_size": 24, "decoder_sparse_step": 1},
    ),
    "qwen3": ("qwen3", {**LLAMA, "head_dim": 8}),
    "qwen3_moe": ("qwen3_moe", {**LLAMA, **EXPERTS, "head_dim": 8, "mlp_only_layers": [1]}),
    "gemma": ("gemma", {**LLAMA, "head_dim": 8, "num_key_value_heads": 1}),
    "gemma2": ("gemma2", {**LLAMA, "head_dim": 8, "sliding_window": 16}),
    "gemma3_text": ("gemma3_text", {**LLAMA, "head_dim": 8, "sliding_window": 16}),
    "phi": ("phi", {**LLAMA, "num_key_value_heads": 4}),
    "phi3": ("phi3", LLAMA),
    "gpt2": ("gpt2", GPT2),
    "gpt_bigcode": ("gpt_bigcode", {**GPT2, "multi_query": True}),
    "gpt_neo": (
        "gpt_neo",
        {
            **SIZES,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 16,
        },
    ),
    "gpt_neox": ("gpt_neox", {**SIZES, **FFN}),
    "gptj": ("gptj", {**GPT2, "rotary_dim": 4}),
    "opt": ("opt", {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "opt_350m": (
        "opt",
        {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 16, "do_layer_norm_before": False},
    ),
    "bloom": ("bloom", {**SIZES, "n_layer": 2, "n_head": 4}),
    "falcon_7b": ("falcon", {**SIZES, "multi_query": True, "parallel_attn": True}),
    "falcon_40b": ("falcon", {**SIZES, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon_rw": (
        "falcon",
        {**SIZES, "multi_query": False, "parallel_attn": False, "alibi": True, "bias": True},
    ),
    "mpt": (
        "mpt",
        {
            "vocab_size": 8192,
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 128,
            "expansion_ratio": 4,
        },
    ),
    "olmo": ("olmo", LLAMA),
    "olmo2": ("olmo2", LLAMA),
    "olmoe": ("olmoe", {**LLAMA, **EXPERTS}),
    "glm": ("glm", {**LLAMA, "head_dim": 8, "attention_bias": True}),
    "glm4": ("glm4", {**LLAMA, "head_dim": 8, "attention_bias": True}),
    "starcoder2": ("starcoder2", LLAMA),
    "stablelm": ("stablelm", LLAMA),
    "cohere": ("cohere", LLAMA),
    "cohere2": ("cohere2", {**LLAMA, "sliding_window": 16}),
    "granite": ("granite", LLAMA),
    "granitemoe": ("granitemoe", {**LLAMA, **EXPERTS}),
    "deepseek_v2": (
        "deepseek_v2",
        {**LLAMA, **EXPERTS, **MLA, "n_shared_experts": 1, "head_dim": 4, "topk_method": "greedy"},
    ),
    "deepseek_v3": ("deepseek_v3", {**LLAMA, **EXPERTS, **MLA, "n_shared_experts": 1}),
    "lfm2": (
        "lfm2",
        {**LLAMA, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    ),
    "smollm3": ("smollm3", LLAMA),
    "exaone4": ("exaone4", {**LLAMA, "sliding_window": 16}),
    "ernie4_5": ("ernie4_5", {**LLAMA, "head_dim": 8}),
    "nemotron": ("nemotron", {**LLAMA, "head_dim": 8}),
    "persimmon": ("persimmon", {**SIZES, **FFN}),
    "codegen": ("codegen", {**GPT2, "rotary_dim": 4}),
    "mamba": ("mamba", {**SIZES, **SSM}),
    "mamba2": (
        "mamba2",
        {**SIZES, **SSM, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 16},
    ),
    "falcon_mamba": ("falcon_mamba", {**SIZES, **SSM}),
    "bamba": (
        "bamba",
        {
            **LLAMA,
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_d_state": 4,
            "mamba_chunk_size": 16,
            "attn_layer_indices": [1],
            "mamba_n_groups": 1,
        },
    ),
    "jamba": (
        "jamba",
        {
            **LLAMA,
            **EXPERTS,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "use_mamba_kernels": False,
        },
    ),
    "gpt_oss": ("gpt_oss", {**LLAMA, **EXPERTS, "head_dim": 8, "sliding_window": 16}),
    "minimax": (
        "minimax",
        {**LLAMA, **EXPERTS, "head_dim": 8, "layer_types": ["full_attention", "full_attention"]},
    ),
    "dbrx": (
        "dbrx",
        {
            "vocab_size": 8192,
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 128,
            "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
            "ffn_config": {
                "ffn_hidden_size": 24,
                "moe_num_experts": 4,
                "moe_top_k": 2,
                "hidden_size": 32,
            },
        },
    ),
    "helium": ("helium", {**LLAMA, "head_dim": 8}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {**LLAMA, "head_dim": 8}),
    "seed_oss": ("seed_oss", {**LLAMA, "head_dim": 8}),
    "apertus": ("apertus", LLAMA),
    "arcee": ("arcee", LLAMA),
    "biogpt": ("biogpt", {**SIZES, **FFN}),
    "xglm": (
        "xglm",
        {
            "vocab_size": 8192,
            "d_model": 32,
            "num_layers": 2,
            "attention_heads": 4,
            "ffn_dim": 48,
            "max_position_embeddings": 128,
        },
    ),
    "openai-gpt": ("openai-gpt", GPT2),
    "bitnet": ("bitnet", LLAMA),
    "qwen3_next": (
        "qwen3_next",
        {
            **LLAMA,
            **EXPERTS,
            "head_dim": 8,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "shared_expert_intermediate_size": 24,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {
            **LLAMA,
            **EXPERTS,
            "moe_num_experts": 4,
            "moe_k": 2,
            "head_dim": 8,
            "moe_num_shared_experts": 1,
        },
    ),
    "glm4_moe": (
        "glm4_moe",
        {
            **LLAMA,
            **EXPERTS,
            "head_dim": 8,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
        },
    ),
    "llama4_text": (
        "llama4_text",
        {
            **LLAMA,
            **EXPERTS,
            "head_dim": 8,
            "intermediate_size_mlp": 48,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 16,
        },
    ),
    "phimoe": ("phimoe", {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "recurrent_gemma": (
        "recurrent_gemma",
        {
            **LLAMA,
            "head_dim": 8,
            "lru_width": 32,
            "attention_window_size": 16,
            "block_types": ["recurrent", "attention"],
        },
    ),
    "rwkv": (
        "rwkv",
        {
            "vocab_size": 8192,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "attention_hidden_size": 32,
            "intermediate_size": 48,
            "context_length": 128,
        },
    ),
}

_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 1}
_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
_ZAMBA = {
    **SIZES,
    **FFN,
    "num_hidden_layers": 4,
    "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
    "num_key_value_heads": 4,
    "attention_head_dim": 16,
    "mamba_d_state": 4,
}
#: Further families with recurrent or convolution layers: name → (model_type, config).
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5_text": ("qwen3_5_text", {**LLAMA, **_DELTA, "head_dim": 8}),
    "qwen3_5_moe_text": (
        "qwen3_5_moe_text",
        {**LLAMA, **EXPERTS, **_DELTA, "head_dim": 8, "shared_expert_intermediate_size": 24},
    ),
    "falcon_h1": ("falcon_h1", {**LLAMA, **_MAMBA, "mamba_d_ssm": 64, "mamba_chunk_size": 16}),
    "nemotron_h": (
        "nemotron_h",
        {
            **LLAMA,
            "head_dim": 8,
            "num_hidden_layers": 3,
            "layers_block_type": ["mamba", "attention", "mlp"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "n_groups": 1,
            "ssm_state_size": 4,
            "chunk_size": 16,
        },
    ),
    "zamba2": (
        "zamba2",
        {
            **_ZAMBA,
            "mamba_ngroups": 1,
            "n_mamba_heads": 8,
            "mamba_headdim": 8,
            "chunk_size": 16,
            "num_mem_blocks": 1,
            "adapter_rank": 4,
        },
    ),
    "zamba": ("zamba", {**_ZAMBA, "n_mamba_heads": 2, "mamba_dt_rank": 4}),
    "granitemoehybrid": (
        "granitemoehybrid",
        {
            **LLAMA,
            **EXPERTS,
            **_MAMBA,
            "shared_intermediate_size": 24,
            "layer_types": ["mamba", "attention"],
            "mamba_chunk_size": 16,
        },
    ),
    "lfm2_moe": (
        "lfm2_moe",
        {**LLAMA, **EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    ),
    "lfm3": ("lfm3", {**LLAMA, "layer_types": ["conv", "full_attention"]}),
    "olmo_hybrid": ("olmo_hybrid", {**LLAMA, **_DELTA, "linear_num_key_heads": 4}),
    "kimi_linear": (
        "kimi_linear",
        {
            **LLAMA,
            **EXPERTS,
            **MLA,
            "q_lora_rank": None,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_heads": 4,
            "linear_head_dim": 8,
        },
    ),
    "bailing_hybrid": ("bailing_hybrid", {**LLAMA, **EXPERTS, "head_dim": 8}),
}
#: Families of both kinds whose recurrent or convolution layers keep the samples of a row apart.
PACKED_HYBRIDS = (
    *HYBRIDS,
    *("qwen3_next", "mamba", "mamba2", "falcon_mamba", "bamba", "jamba", "lfm2"),
)

#: Families that cannot use packing, because samples in one row would affect each other: ALiBi,
#: other recurrent layers, chunked attention, or masks that ignore position_ids.
PADDED_FAMILIES = {
    "bloom",
    "falcon_7b",
    "falcon_40b",
    "falcon_rw",
    "mpt",
    "xglm",
    "openai-gpt",
    "gpt_oss",
    "recurrent_gemma",
    "rwkv",
    "llama4_text",
}
if Version(version("transformers")) >= Version("5.24"):  # takes positions from the caller
    PADDED_FAMILIES -= {"falcon_7b", "falcon_40b", "falcon_rw"}


def build_model(name: str, **overrides: Any) -> Any:
    """Return a tiny model of the family with random weights.

    Args:
        overrides: values in the model's config that differ from the family's.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, numbers = {**FAMILIES, **HYBRIDS}[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**TOKENS, **numbers, **overrides})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for param in model.parameters():  # zeros and ones would hide omitted or repeated terms
            param.add_(torch.randn_like(param) * NOISE)
    return model


def make_model(name: str, folder: Path, **overrides: Any) -> Path:
    """Write the model of :func:`build_model` and the built-in tokenizer; return its folder."""
    import shutil

    from paceline.models.builtin import builtin_tokenizer

    model = build_model(name, **overrides)
    target = folder / name
    model.save_pretrained(str(target))
    for file in builtin_tokenizer().glob("tokenizer*"):
        shutil.copyfile(file, target / file.name)
    return target


PADDED = "padded"  # name of the trial of `single` without packing


def make_trials(
    name: str, folder: Path, modes: list[str], steps: int, ranks: int = 2, **settings: Any
) -> tuple[list[Any], dict[str, str]]:
    """Return the trials of a family, the reference first, and {mode: reason} for the modes that are
    rejected before the start."""
    from paceline.config.load import Loaded
    from paceline.config.schema import Config
    from paceline.core.errors import ConfigError
    from paceline.verify import run as verify
    from paceline.verify.modes import make_mode

    args = {"per_device_train_batch_size": 2, "max_length": 48, **settings.pop("train_args", {})}
    parallel = {"device": "cpu", "num_gpus": ranks, **settings.pop("parallel", {})}
    config = verify._verification_config(
        Config(
            model=str(folder / name),
            dataset="builtin:python-docs#48",
            parallel=parallel,
            train_args=args,
            output_dir=str(folder / "out" / name),
            **settings,
        ),
        steps,
    )
    devices = verify._devices(config, ranks)
    rejected: dict[str, str] = {}
    accepted = []
    for mode in ["single", *modes]:
        verify_mode = make_mode("single" if mode == PADDED else mode, config, ranks)
        trial_config = config
        if mode == PADDED:
            verify_mode = replace(verify_mode, name=PADDED)
            trial_config = config.model_copy(
                update={"train_args": config.train_args.model_copy(update={"packing": False})}
            )
        try:
            verify._check_mode(verify_mode, trial_config, devices.type)
            accepted.append((verify_mode, trial_config))
        except ConfigError as error:
            rejected[mode] = error.paragraph()
    base = verify._base_spec(Loaded(config, [], None), devices, folder / "out")
    trials = [
        verify._trial(
            number,
            mode,
            trial_config,
            replace(
                base, config=trial_config.model_copy(update={"output_dir": base.config.output_dir})
            ),
        )
        for number, (mode, trial_config) in enumerate(accepted)
    ]
    return trials, rejected


def run_trials(
    world: Any, trials_by_family: dict[str, list[Any]], steps: int, folder: str
) -> dict[str, dict[str, Any]]:
    """Run every family's trials one after another on each rank; return {family: {mode: result}}. A
    failed trial is recorded and does not stop the others."""
    from paceline.core.stop import StopFlag
    from paceline.verify.worker import Certification, _run_trial

    table: dict[str, dict[str, Any]] = {}
    for name, trials in trials_by_family.items():
        figures = Path(folder) / "figures" / name
        figures.mkdir(parents=True, exist_ok=True)
        certification = Certification(trials, steps, len(trials), str(figures))
        table[name] = {}
        for trial in trials:
            start = time.monotonic()
            try:
                result = _run_trial(certification, trial, world, StopFlag())
            except Exception as error:
                result = {
                    "status": "failed",
                    "reason": f"{type(error).__name__}: {error}",
                    "trace": traceback.format_exc(),
                }
            result["seconds"] = time.monotonic() - start
            table[name][trial.name] = result
            if world.is_rank_zero:
                with (Path(folder) / "log.jsonl").open("a") as log:
                    log.write(
                        json.dumps({"family": name, "mode": trial.name, **result}, default=str)
                        + "\n"
                    )
            world.gather_objects(result["status"])
    return table


def evaluate_trials(
    table: list[dict[str, dict[str, Any]]], trials: dict[str, list[Any]]
) -> dict[str, dict[str, Any]]:
    """Return {family: {mode: verdict}} for the results of both ranks."""
    from paceline.verify.certificate import bounds_for, combine, evaluate_mode, not_run

    verdicts: dict[str, dict[str, Any]] = {}
    for name, family_trials in trials.items():
        bounds = bounds_for(family_trials[0].spec.config, "cpu")
        by_rank = {
            trial.name: [rank[name][trial.name] for rank in table] for trial in family_trials
        }
        results = {}
        for mode, rank_results in by_rank.items():
            failed = [result for result in rank_results if result["status"] == "failed"]
            results[mode] = failed[0] if failed else combine(rank_results, bounds.floor)
        verdicts[name] = {}
        for mode, result in results.items():
            if result["status"] == "done" and results["single"]["status"] == "done":
                verdicts[name][mode] = evaluate_mode(
                    mode, "", result, results["single"], results.get("ddp"), bounds
                )
            else:
                verdicts[name][mode] = not_run(
                    mode,
                    "",
                    None if result["status"] == "refused" else False,
                    result.get("reason", "?"),
                )
    return verdicts


def train_families(
    names: list[str], modes: list[str], folder: Path, steps: int = 3, **settings: Any
) -> dict[str, dict[str, str]]:
    """Train the families with each mode on one pair of ranks. Return {family: {mode: "ok" or a
    reason}}; the mode "packed" states whether the samples were packed or padded.

    Args:
        settings: further sections of the config.
    """
    from ranks import run_ranks

    trials, rejected = {}, {}
    for name in names:
        make_model(name, folder)
        trials[name], rejected[name] = make_trials(
            name, folder, [*modes, PADDED], steps, **settings
        )
    table = run_ranks(run_trials, 2, trials, steps, str(folder), timeout_s=100.0 * len(names))
    results: dict[str, dict[str, str]] = {}
    for name, verdicts in evaluate_trials(table, trials).items():
        results[name] = {
            mode: "ok" if verdict["ok"] else f"{verdict['reason']}"
            for mode, verdict in verdicts.items()
        } | rejected[name]
        notices = table[0][name]["single"].get("notices", [])
        packed = PADDED if any("packing: off" in notice for notice in notices) else "packed"
        padded = results[name].pop(PADDED)
        results[name]["packed"] = packed if padded == "ok" else padded
    return results
