"""Test that native keys are loaded without the code for other tools' keys, and that this code reads
native values as they are."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from raised import raises_error

from paceline.config.compat.keys import alias_tables
from paceline.config.compat.translate import translate
from paceline.config.entries import FILE, EntryCollector
from paceline.config.fields import KEYS, literals
from paceline.config.load import Loaded
from paceline.config.schema import Config
from paceline.config.settings import SHARED_KEYS, read_native
from paceline.core.errors import ConfigError

Load = Callable[..., Loaded]
EXAMPLES = Path(__file__).parents[2] / "examples"
BASE = {"model": "m", "dataset": "d"}
_IMPORTED = """
import json, sys
from paceline.config.load import load_config
load_config(sys.argv[1], sys.argv[2:])
print(json.dumps([name for name in sys.modules if name.startswith("paceline.config.compat")]))
"""


def collect(tree: dict[str, Any]) -> EntryCollector:
    collector = EntryCollector(FILE)
    collector.add_tree(tree)
    return collector


@pytest.mark.parametrize(
    ("file", "overrides"),
    [
        ("demo.yaml", ["train_args.max_steps=2", "--lora.enable", "--seed", "3"]),
        ("recipes/qwen-7b-lora-4xa10.yaml", ["optim=sgd", "lora.enable=null"]),
        ("dpo.yaml", ["preference.beta=0.2", "--dataset", "a.jsonl"]),
    ],
)
def test_native_keys_import_no_code_for_other_tools(file: str, overrides: list[str]) -> None:
    command = [sys.executable, "-c", _IMPORTED, str(EXAMPLES / file), *overrides]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def test_keys_that_other_tools_have_too_are_listed() -> None:
    assert set(SHARED_KEYS) == set(alias_tables().shared)


NATIVE = [
    *((key, value) for key in SHARED_KEYS for value in literals(KEYS[key])),
    ("task", "dpo"),
    ("task", "./my_task.py:MyTask"),
    ("parallel.mode", "zero3"),
    ("parallel.mode", "./strategy.py:SPEC"),
    ("report_to", ["wandb", "tensorboard"]),
    ("callbacks", ["./callbacks.py:Stop"]),
    ("new_special_tokens", ["<think>", "</think>"]),
    ("lora.target_modules", "all-linear"),
    ("lora.target_modules", ["q_proj", "v_proj"]),
    ("split_dataset_ratio", 0.1),
    ("split_dataset_ratio", 100),
    ("train_args.metric_for_best_model", "rougeL"),
    ("train_args.lr_scheduler_kwargs", {"num_cycles": 2}),
    ("train_args.precision", 32),
    ("train_args.gradient_checkpointing", True),
    ("train_args.warmup_steps", 10),
    ("dataset", [{"path": "a", "columns": {"prompt": "q"}}, "b"]),
]


@pytest.mark.parametrize(("key", "value"), NATIVE, ids=str)
def test_native_values_mean_the_same_to_both_readers(key: str, value: Any) -> None:
    section, _, name = key.rpartition(".")
    tree = {**BASE, **({section: {name: value}} if section else {key: value})}
    settings, translated = read_native(collect(tree)), translate(collect(tree), tree, None)
    assert settings is not None
    assert Config.model_validate(settings.nested()) == Config.model_validate(translated.nested())
    assert settings.notices() == translated.notices()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("task", "pt"),
        ("parallel.mode", "FSDP"),
        ("report_to", "all"),
        ("callbacks", ["early_stop"]),
        ("new_special_tokens", ["tokens.txt"]),
        ("lora.target_modules", ["all"]),
        ("split_dataset_ratio", 2.0),
        ("train_args.optim", "adamw_torch"),
        ("train_args.warmup_steps", 0.1),
        ("dataset", [{"path": "a", "columns": {"chosen": "c", "rejected": "r"}}]),
        ("model", {"_component_": "torchtune.models"}),
        ("lora_rank", 4),
        ("typo", 1),
    ],
)
def test_values_of_other_tools_are_translated(key: str, value: Any) -> None:
    section, _, name = key.rpartition(".")
    tree = {**BASE, **({section: {name: value}} if section else {key: value})}
    assert read_native(collect(tree)) is None


def test_null_in_an_override_resets_a_native_key(load: Load) -> None:
    loaded = load("model: m\ndataset: d\nmax_steps: 3\nlora: {enable: true}\n", ["max_steps=null"])
    assert loaded.config.train_args.max_steps is None
    assert not load(
        "model: m\ndataset: d\nlora: {enable: true}\n", ["lora.enable="]
    ).config.lora.enable


@pytest.mark.parametrize(
    ("file", "overrides", "key", "value"),
    [
        ("lora_r: 4", ["lora.rank=8"], "lora.rank", 8),
        ("lora: {rank: 4}", ["--lora_r", "8"], "lora.rank", 8),
        ("lora_rank: 4", ["lora_r=8"], "lora.rank", 8),
        ("stage: dpo", ["--pref_loss", "orpo"], "task", "orpo"),
        ("stage: dpo\npref_loss: orpo", ["task=kto"], "task", "kto"),
        ("save_strategy: 'no'", ["save_steps=5"], "train_args.save_steps", 5),
        ("save_steps: 5", ["--save_strategy", "no"], "train_args.save_steps", 0),
        ("evals_per_epoch: 4", ["eval_steps=7"], "train_args.eval_steps", 7),
        ("bf16: true", ["precision=32"], "train_args.precision", "32"),
        ("precision: 32", ["--bf16"], "train_args.precision", "bf16-mixed"),
        ("deepspeed: zero3", ["parallel.mode=ddp"], "parallel.mode", "ddp"),
        ("optim: sgd\nlora_r: 4", ["packing_strategy=bfd"], "train_args.packing_strategy", "bfd"),
        (
            "use_gradient_checkpointing: unsloth",
            ["parallel.cpu_offload=all"],
            "parallel.cpu_offload",
            "all",
        ),
        ("parallel: {mode: ddp}", ["--deepspeed", "zero3"], "parallel.mode", "deepspeed"),
    ],
)
def test_the_command_line_wins_whatever_tool_a_key_is_from(
    load: Load, file: str, overrides: list[str], key: str, value: Any
) -> None:
    config = load(f"model: m\ndataset: d\n{file}\n", overrides).config
    section, _, name = key.rpartition(".")
    assert getattr(getattr(config, section) if section else config, name) == value


def test_unknown_key_with_nested_mappings_is_an_error(load: Load) -> None:
    with raises_error(ConfigError, code="unknown-key", naming="resources"):
        load("model: m\ndataset: d\nresources: {cpu: {count: 4}}\nlora_rank: 4\n")
