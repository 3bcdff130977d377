"""Test that configs of LLaMA-Factory v1 load: datasets listed in a YAML file, `peft_config` and
`dist_config`."""

from collections.abc import Callable
from pathlib import Path

import pytest
from raised import raises_error

from paceline.config.load import Loaded
from paceline.core.errors import ConfigError

Load = Callable[..., Loaded]
CONFIG = """
model: Qwen/Qwen3-0.6B
model_class: llm
peft_config: {name: lora, r: 16, lora_alpha: 64, lora_dropout: 0.1, target_modules: all}
kernel_config: {name: auto, include_kernels: auto}
quant_config: null
dist_config: {name: fsdp2, dcp_path: null}
cp_mode: ulysses
train_dataset: data.yaml
output_dir: outputs/run
micro_batch_size: 1
cutoff_len: 2048
learning_rate: 1.0e-4
bf16: true
max_steps: 10
sample_backend: hf
max_new_tokens: 128
"""
DATA = """
identity: {path: data/identity.json, source: local, converter: alpaca}
demo:
  {file_name: alpaca_en_demo.json, dataset_dir: data, converter: alpaca, num_samples: 500,
   weight: 0.5}
hub: {path: organization/name, source: hf_hub, split: test, size: 1000, streaming: false}
"""


def test_loads_a_complete_config(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data.yaml").write_text(DATA)
    loaded = load(CONFIG)
    config = loaded.config
    assert [source.model_dump(exclude_defaults=True) for source in config.sources()] == [
        {"path": "data/identity.json", "format": "alpaca"},
        {"path": "data/alpaca_en_demo.json#500", "format": "alpaca"},
        {"path": "organization/name#1000", "split": "test"},
    ]
    lora = config.lora
    assert (lora.enable, lora.rank, lora.alpha, lora.dropout, lora.target_modules) == (
        True,
        16,
        64,
        0.1,
        "all-linear",
    )
    assert (config.parallel.mode, config.train_args.precision) == ("zero3", "bf16-mixed")
    assert config.train_args.per_device_train_batch_size == 1
    assert any(level == "warning" and "`weight` of demo" in text for level, text in loaded.notices)


@pytest.mark.parametrize("value", ["data.jsonl", "organization/name"])
def test_train_dataset_is_a_file_or_hub_id(load: Load, value: str) -> None:
    assert load(f"model: m\ntrain_dataset: {value}\neval_dataset: {value}").config.dataset == value


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (None, "file not found: data.yaml"),
        ("a: {path: x, converter: pair}", "add task: dpo or task: orpo"),
        ("a: {path: x, converter: pairs}", "use alpaca, sharegpt or pair"),
        ("a: {path: x, convertor: alpaca}", "did you mean `converter`"),
        ("a: {converter: alpaca}", "`path` is missing"),
        ("[1, 2]", "expected a mapping of names"),
        ("a: [", "cannot read data.yaml"),
    ],
)
def test_rejects_invalid_dataset_list(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: str | None, expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if data is not None:
        Path("data.yaml").write_text(data)
    with pytest.raises(ConfigError) as caught:
        load("model: m\ntrain_dataset: data.yaml")
    assert expected in caught.value.paragraph()
    assert "`dataset` is missing" not in caught.value.paragraph()


@pytest.mark.parametrize("task", ["dpo", "orpo", "simpo", "reward"])
def test_reads_pairs_of_answers(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data.yaml").write_text("pairs: {path: p.jsonl, source: local, converter: pair}")
    config = load(f"model: m\ntask: {task}\ntrain_dataset: data.yaml").config
    assert [source.model_dump(exclude_defaults=True) for source in config.sources()] == [
        {"path": "p.jsonl"}
    ]
    if task == "reward":
        assert load("model: m\nmodel_class: cls\ntrain_dataset: data.yaml").config.task == "reward"


def test_reads_the_settings_of_plugins(load: Load) -> None:
    base = "model: m\ntrain_dataset: d.jsonl\n"
    freeze = "{name: freeze, freeze_trainable_layers: 5, freeze_extra_modules: [embed_tokens]}"
    args = load(f"{base}peft_config: {freeze}").config.train_args
    assert (args.trainable_layers, args.trainable) == (5, ["embed_tokens"])
    assert load(f"{base}peft_config: {{name: freeze}}").config.train_args.trainable_layers == 2
    loaded = load(
        f"{base}peft_config: {{name: lora, use_rslora: true, use_dora: true, modules_to_save:"
        " [lm_head], unheard: 1}"
    )
    lora = loaded.config.lora
    assert (lora.use_rslora, lora.use_dora, lora.modules_to_save) == (True, True, ["lm_head"])
    assert any("no effect: `unheard`" in text for _, text in loaded.notices)
    lora = load(
        f"{base}peft_config: {{name: lora}}\nquant_config: {{name: bnb, quantization_bit: 8}}"
    ).config.lora
    assert lora.quantize == "int8"
    optimizer = "{name: muon, wd: 0.1, momentum: 0.9, nesterov: true, adamw_betas: [0.9, 0.95]}"
    args = load(f"{base}optim_config: {optimizer}\nsave_epochs: 0.5\nnum_train_epochs: 2").config
    args = args.train_args
    assert (args.optim, args.weight_decay, args.muon_momentum, args.adam_beta2) == (
        "muon",
        0.1,
        0.9,
        0.95,
    )
    assert args.save_steps == 0.25
    with raises_error(ConfigError, code="unsupported-value", naming="nesterov"):
        load(f"{base}optim_config: {{name: muon, nesterov: false}}")


@pytest.mark.parametrize(
    ("strategy", "packing", "rows"),
    [
        ("normal", "auto", "micro_batch"),
        ("padding_free", True, "micro_batch"),
        ("dynamic_padding_free", True, "bfd"),
    ],
)
def test_reads_the_batching_strategy(
    load: Load, strategy: str, packing: bool | str, rows: str
) -> None:
    args = load(f"model: m\ntrain_dataset: d\nbatching_strategy: {strategy}").config.train_args
    assert (args.packing, args.packing_strategy) == (packing, rows)
