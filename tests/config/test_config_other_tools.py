"""Test that configs of ms-swift, LLaMA-Factory, axolotl and TRL load, and that each of their keys
is read or reported."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from raised import raises_error

from paceline.config.compat.keys import alias_tables, ignored_tables
from paceline.config.fields import KEYS
from paceline.config.load import Loaded, load_config
from paceline.config.schema.train_args import TrainArgs
from paceline.config.schema.train_args_sections import Profile
from paceline.config.yaml_read import parse_yaml
from paceline.core.errors import ConfigError

TABLES = alias_tables()
IGNORED = ignored_tables().keys
BASE = "model: m\ndataset: d\n"
EXAMPLES = sorted(
    (Path(__file__).parents[2] / "examples" / "configs-from-other-tools").glob("*.yaml")
)
Load = Callable[..., Loaded]


def test_key_tables_are_complete_and_disjoint() -> None:
    assert len(EXAMPLES) == 4
    assert len(TABLES.aliases) + len(IGNORED) > 600
    assert not set(TABLES.aliases) & set(IGNORED)
    top_level = {key for key in KEYS if "." not in key} | set(TrainArgs.model_fields)
    assert not top_level & (set(TABLES.aliases) | set(IGNORED)), (
        "an alias may not shadow a native key"
    )
    for alias in [
        *TABLES.aliases.values(),
        *TABLES.sections.values(),
        *TABLES.shared.values(),
        *TABLES.shared_if_foreign.values(),
    ]:
        assert alias.target in KEYS or not alias.target
        assert set(alias.tools) <= set("slatcu")


# The fields of TrainingArguments in transformers 5, and some of version 4. They are listed here
# because importing transformers takes seconds.
TRAINING_ARGUMENTS = """
accelerator_config activation_checkpointing activation_checkpointing_kwargs adam_beta1 adam_beta2
adam_epsilon auto_find_batch_size average_tokens_across_devices batch_eval_metrics bf16
bf16_full_eval data_seed dataloader_drop_last dataloader_in_order dataloader_multiprocessing_context
dataloader_num_workers dataloader_persistent_workers dataloader_pin_memory
dataloader_prefetch_factor ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb
ddp_find_unused_parameters ddp_static_graph ddp_timeout debug deepspeed disable_tqdm do_eval
do_predict do_train enable_jit_checkpoint eval_accumulation_steps eval_delay eval_do_concat_batches
eval_on_start eval_steps eval_strategy eval_use_gather_object fp16 fp16_full_eval fsdp fsdp_config
full_determinism gradient_accumulation_steps gradient_checkpointing gradient_checkpointing_kwargs
greater_is_better hub_always_push hub_model_id hub_private_repo hub_revision hub_strategy hub_token
ignore_data_skip include_for_metrics include_num_input_tokens_seen label_names
label_smoothing_factor learning_rate length_column_name liger_kernel_config load_best_model_at_end
local_rank log_level log_level_replica log_on_each_node logging_first_step logging_nan_inf_filter
logging_steps logging_strategy lr_scheduler_kwargs lr_scheduler_type max_grad_norm max_steps
metric_for_best_model neftune_noise_alpha num_train_epochs optim optim_args optim_target_modules
output_dir parallelism_config per_device_eval_batch_size per_device_train_batch_size
prediction_loss_only project push_to_hub remove_unused_columns report_to
restore_callback_states_from_checkpoint resume_from_checkpoint run_name save_on_each_node
save_only_model save_steps save_strategy save_total_limit seed skip_memory_metrics tf32
torch_compile torch_compile_backend torch_compile_mode torch_empty_cache_steps trackio_bucket_id
trackio_space_id trackio_static_space_id train_sampling_strategy use_cache use_cpu use_liger_kernel
warmup_steps weight_decay evaluation_strategy group_by_length no_cuda overwrite_output_dir
warmup_ratio save_safetensors logging_dir
"""


def test_knows_every_training_argument_of_transformers() -> None:
    known = set(TrainArgs.model_fields) | set(TABLES.aliases) | set(IGNORED) | set(KEYS)
    assert not set(TRAINING_ARGUMENTS.split()) - known


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_reads_or_reports_each_key_of_other_tools(path: Path) -> None:
    loaded = load_config(path)
    notices = "\n".join(text for _, text in loaded.notices)
    for key in parse_yaml(path.read_text(), path.name).value:
        assert f"`{key}" in notices or key in KEYS, f"{key} was dropped without a notice"
    assert loaded.config.lora.enable
    assert loaded.config.train_args.max_length == 2048
    assert (
        load_config(path, ["model=/m", "dataset=/d.jsonl", "parallel.device=cpu"]).config.model
        == "/m"
    )
    names = {"axolotl": "axolotl", "llama": "LLaMA-Factory", "ms": "ms-swift", "trl": "TRL"}
    tool = names[path.stem.split("_")[0]]
    others = set(names.values()) - {tool}
    assert f"({tool})" in notices
    assert not any(f"({other}" in notices for other in others)


@pytest.mark.parametrize(
    ("text", "level", "expected"),
    [
        ("load_in_4bit: true", "info", "nf4"),
        ("load_in_4bit: false", "info", "is ignored"),
        ("adapter: qlora", "info", "lora.quantize: nf4"),
        ("group_by_length: true", "warning", "has no effect"),
        ("use_dora: true", "info", "lora.use_dora"),
        ("optimizer: lion_8bit", "warning", "float32"),
        ("flash_attention: true", "info", "if device and precision allow it"),
        ("xformers_attention: true", "warning", "speed and memory differ"),
        ("template: qwen", "info", "chat_template: qwen"),
        ("template: something_else", "warning", "the tokenizer's own is used"),
        ("env: {A: 1, B: 2}", "warning", "A, B"),
        ("ENV: {A: 1}", "warning", "shell"),
        ("save_strategy: epoch\nmax_steps: 9", "warning", "save_steps"),
        ("save_strategy: epoch\nsave_steps: 50", "info", "`save_steps: 50` has no effect"),
        ("sample_packing: true", "info", "the batch size counts rows"),
        ("report_to: dvclive", "warning", "dvclive"),
        ("wandb_entity: x", "warning", "WANDB_ENTITY"),
        ("do_train: false", "warning", "trains"),
        ("bf16: auto", "info", "train_args.precision: auto"),
        ("model_revision: v2", "warning", "download"),
        ("gradient_checkpointing: offload_disk", "info", "recomputed"),
        ("batch_size: 8", "warning", "gradient_accumulation_steps"),
        ("device_map: auto", "info", "parallel.mode"),
        ("special_tokens: {pad_token: x}", "warning", "tokenizer"),
        ("lora_bias: true", "warning", "plain LoRA"),
    ],
)
def test_reports_keys_without_effect(load: Load, text: str, level: str, expected: str) -> None:
    key = re.findall(r"\w+", text)[1 if text.startswith(("lora:", "parallel:")) else 0]
    lines = [
        notice
        for notice in load(BASE + text).notices
        if f"{key}: " in notice[1] and "is not true" not in notice[1]
    ]
    assert lines
    assert lines[0][0] == level
    assert expected in lines[0][1]


def test_loads_every_known_key(load: Load) -> None:
    for key in IGNORED:
        loaded = load(BASE + f"{key}: true\n")
        assert any(f"`{key}: true`" in text for _, text in loaded.notices), key
    empty = load(BASE + "".join(f"{key}:\n" for key in [*IGNORED, *TABLES.aliases]))
    assert all(f"`{key}`" in empty.notices[0][1] for key in IGNORED)


def test_lora_keys_enable_lora_without_a_method(load: Load) -> None:
    loaded = load(BASE + "lora_rank: 4\ntemplate: qwen\n")
    assert loaded.config.lora.enable
    assert any("lora.enable: true" in text for _, text in loaded.notices)
    loaded = load(BASE + "lora: {rank: 4}\n")
    assert not loaded.config.lora.enable
    assert loaded.notices[0][0] == "warning"
    assert "lora.enable" in loaded.notices[0][1]


def test_notices_are_unique(load: Load) -> None:
    notices = load(EXAMPLES[0].read_text()).notices
    assert len(notices) == len(set(notices))
    assert {level for level, _ in notices} == {"info", "warning"}


# Keys that change the result or the memory of training in other tools, and that Paceline ignores.
WARNING_KEYS = """
xformers_attention liger_kernel_config liger_cross_entropy
lora_mlp_kernel use_unsloth
eval_packing dataset_weights
target_parameters lora_ga_batch_size adalora_init_r
use_galore galore_rank badam_mode optim_args
rope_scaling eot_tokens tool_format model_init_kwargs model_kwargs max_memory
data_seed group_by_length dataloader_drop_last pad_to_sequence_len bf16_full_eval lora_on_cpu
loss_watchdog_threshold dataset_shard_num cached_dataset tokenized_path ignore_data_skip
custom_dataset_info batch_size save_total_per_epoch
"""


@pytest.mark.parametrize("key", WARNING_KEYS.split())
def test_ignored_key_that_changes_training_is_a_warning(load: Load, key: str) -> None:
    value = "1" if "rank" in key or key.endswith("_r") else "true"
    notices = load(BASE + f"stage: sft\n{key}: {value}\n").notices
    assert any(level == "warning" and f"`{key}: " in text for level, text in notices)


@pytest.mark.parametrize(
    "text",
    [
        "flash_attn: auto",
        "attn_impl: sdpa",
        "sdp_attention: true",
        "tuner_backend: peft",
        "use_cache: false",
        "loss_type: nll",
        "flash_attention: false",
        "logging_first_step: true",
        "logging_strategy: steps",
    ],
)
def test_ignored_key_without_consequence_is_info(load: Load, text: str) -> None:
    assert {level for level, _ in load(BASE + text).notices} == {"info"}


@pytest.mark.parametrize(("text", "value"), [("true", True), ("false", False), ("auto", None)])
def test_tf32_is_read_as_in_transformers_and_axolotl(
    load: Load, text: str, value: bool | None
) -> None:
    loaded = load(BASE + f"tf32: {text}\n")
    assert loaded.config.train_args.tf32 is value
    assert any("TensorFloat-32" in notice for _, notice in loaded.notices) == (text == "auto")


def test_profiled_steps_of_axolotl_are_counted_from_1(load: Callable[[str], Loaded]) -> None:
    loaded = load(BASE + "profiler_steps: 5\n")
    assert loaded.config.train_args.profile == Profile(start_step=1, num_steps=5)
    loaded = load(BASE + "profiler_steps_start: 7\nprofiler_steps: 5\n")
    assert loaded.config.train_args.profile == Profile(start_step=8, num_steps=5)


@pytest.mark.parametrize("value", [".inf", "[a, {b: 1}]", "true", "1e999"])
@pytest.mark.parametrize("key", ["val_size", "test_split_size", "pref_loss", "peft_config"])
def test_values_of_another_kind_are_errors_of_the_config(load: Load, key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=key):
        load(f"{BASE}stage: dpo\n{key}: {value}")


def test_a_mapping_of_properties_is_a_mapping(load: Load) -> None:
    with raises_error(ConfigError, code="unsupported-value"):
        load("model: m\ndatasets: [{path: a, message_property_mappings: [role]}]")
