"""Test that configs of Unsloth Studio load, with the sections `training`, `data` and `logging`."""

from collections.abc import Callable
from typing import Any

import pytest

from paceline.config.load import Loaded
from paceline.core.errors import ConfigError

Load = Callable[..., Loaded]
CONFIG = """
model: unsloth/Qwen2.5-0.5B
data: {dataset: DATASET, format_type: FORMAT}
training:
  training_type: lora
  max_seq_length: 2048
  load_in_4bit: true
  output_dir: outputs
  num_epochs: 3
  learning_rate: 2e-4
  batch_size: 2
  gradient_accumulation_steps: 4
  warmup_steps: 5
  max_steps: 0
  save_steps: 0
  weight_decay: 0.001
  random_seed: 3407
  packing: false
  train_on_completions: true
  gradient_checkpointing: unsloth
  optim: adamw_8bit
lora:
  lora_r: 64
  lora_alpha: 16
  lora_dropout: 0.0
  target_modules: "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
  vision_all_linear: false
  use_rslora: false
  use_loftq: false
  finetune_vision_layers: true
  finetune_language_layers: false
  finetune_attention_modules: true
  finetune_mlp_modules: true
logging:
  enable_wandb: true
  wandb_project: project
  enable_tensorboard: false
  tensorboard_dir: runs
  log_frequency: 10
inference: {temperature: 0.7, top_p: 0.95}
"""


def config_text(dataset: str = "o/d", form: str = "auto", **replaced: str) -> str:
    text = CONFIG.replace("DATASET", dataset).replace("FORMAT", form)
    lines = []
    for line in text.splitlines():
        key = line.strip().partition(":")[0]
        indent = line[: len(line) - len(line.lstrip())]
        lines.append(f"{indent}{key}: {replaced[key]}" if key in replaced else line)
    return "\n".join(lines)


def test_loads_a_complete_config(load: Load) -> None:
    loaded = load(config_text())
    config, args, lora = loaded.config, loaded.config.train_args, loaded.config.lora
    assert (config.model, config.dataset, config.output_dir) == (
        "unsloth/Qwen2.5-0.5B",
        "o/d",
        "outputs",
    )
    assert (lora.enable, lora.rank, lora.alpha, lora.dropout, lora.quantize) == (
        True,
        64,
        16,
        0,
        "nf4",
    )
    assert lora.target_modules[0] == "q_proj"
    assert (args.max_length, args.num_train_epochs, args.max_steps, args.save_steps) == (
        2048,
        3,
        None,
        0,
    )
    assert (args.per_device_train_batch_size, args.seed, args.optim) == (2, 3407, "adamw_8bit")
    assert (args.train_on_inputs, args.gradient_checkpointing) == (False, "full")
    assert config.parallel.cpu_offload == "activations"
    assert (config.report_to, args.project, args.logging_steps) == (["wandb"], "project", 10)
    assert not config.vision.freeze_vision_tower
    assert config.vision.freeze_language_model
    notices = "\n".join(text for _, text in loaded.notices)
    assert "`inference: " in notices
    unneeded = next(line for line in notices.splitlines() if "does not need are ignored" in line)
    assert "`logging.tensorboard_dir: runs`" in unneeded


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize(
    ("replaced", "key", "value"),
    [
        ({"training_type": "full"}, "lora.enable", False),
        ({"training_type": "Continued Pretraining"}, "task", "pretrain"),
        ({"num_epochs": "0", "max_steps": "30"}, "train_args.max_steps", 30),
        ({"train_on_completions": "false"}, "train_args.train_on_inputs", True),
        ({"use_loftq": "true"}, "lora.init_lora_weights", "loftq"),
        ({"vision_all_linear": "true"}, "lora.target_modules", "all-linear"),
        ({"finetune_attention_modules": "false"}, "lora.target_modules", MLP),
        ({"finetune_mlp_modules": "false"}, "lora.target_modules", ATTENTION),
        (
            {"finetune_mlp_modules": "false", "target_modules": "[all-linear]"},
            "lora.target_modules",
            "all-linear",
        ),
        ({"finetune_vision_layers": "false"}, "vision.freeze_vision_tower", True),
        ({"gradient_checkpointing": "none"}, "train_args.gradient_checkpointing", "none"),
    ],
)
def test_reads_values(load: Load, replaced: dict[str, str], key: str, value: Any) -> None:
    result: Any = load(config_text(**replaced)).config
    for part in key.split("."):
        result = getattr(result, part)
    assert result == value


@pytest.mark.parametrize(
    ("form", "expected"),
    [("chatml", "messages"), ("alpaca", "alpaca"), ("raw", "text"), ("auto", "auto")],
)
def test_reads_the_format_of_the_data(load: Load, form: str, expected: str) -> None:
    config = load(config_text(form=form)).config
    assert config.format == expected
    assert config.task == ("pretrain" if form == "raw" else "sft")


def test_reads_local_files(load: Load) -> None:
    text = config_text().replace(
        "{dataset: o/d, format_type: auto}", "{dataset: null, local_dataset: [a.jsonl, b.jsonl]}"
    )
    assert load(text).config.dataset == ["a.jsonl", "b.jsonl"]


def test_lora_is_trained_unless_the_config_says_otherwise(load: Load) -> None:
    text = "model: m\ndataset: d\ntraining: {max_steps: 30, batch_size: 2}\nlora: {lora_r: 16}"
    assert load(text).config.lora.enable


def test_overrides_and_unknown_keys(load: Load) -> None:
    assert load(config_text(), ["training.batch_size=7"]).config.train_args.seed == 3407
    with pytest.raises(ConfigError) as caught:
        load("audio_type: whisper\n" + config_text(batch_size="2\n  learning_rat: 1"))
    assert "audio is not supported" in caught.value.paragraph()
    assert "unknown key `training.learning_rat`" in caught.value.paragraph()
    assert "did you mean `learning_rate`?" in caught.value.paragraph()


def test_reads_the_arguments_of_the_library(load: Load) -> None:
    text = "model_name: m\ndataset: d\nrandom_state: 5\nfinetune_vision_layers: false\n"
    loaded = load(text + "lora: {r: 4, bias: none, task_type: CAUSAL_LM, random_state: 5}")
    config = loaded.config
    assert (config.train_args.seed, config.lora.rank) == (5, 4)
    assert config.vision.freeze_vision_tower
    assert not any(level == "warning" and "bias" in notice for level, notice in loaded.notices)
