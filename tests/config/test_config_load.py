"""Test the precedence of defaults, file and overrides, and errors for unknown keys, invalid values
and conflicts."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from raised import raises_error

from paceline.config.load import Loaded, diff_configs, load_config, to_yaml
from paceline.config.overrides import split_cli
from paceline.config.schema import Config
from paceline.core.errors import ConfigError

BASE = "model: m\ndataset: d\n"
README_CONFIG = """model: qwen/Qwen-7B
task: sft
dataset: alpaca-en
parallel:
  mode: ddp
  num_gpus: 4
lora:
  enable: true
  rank: 64
output_dir: ./output/qwen-7b-lora-ddp
train_args:
  gradient_accumulation_steps: 4
"""

Load = Callable[..., Loaded]


def load_error(load: Load, text: str, overrides: Any = ()) -> str:
    with pytest.raises(ConfigError) as caught:
        load(text, overrides)
    assert caught.value.exit_code == 2
    assert "pydantic" not in str(caught.value).lower()
    assert "validation error" not in str(caught.value).lower()
    return str(caught.value)


def test_loads_the_config_of_the_readme(load: Load) -> None:
    loaded = load(README_CONFIG)
    config = loaded.config
    assert loaded.notices == []
    assert (config.model, config.task, config.dataset) == ("qwen/Qwen-7B", "sft", "alpaca-en")
    assert (
        config.parallel.mode,
        config.parallel.num_gpus,
        config.lora.enable,
        config.lora.rank,
    ) == ("ddp", 4, True, 64)
    assert config.train_args.gradient_accumulation_steps == 4
    config = load(
        README_CONFIG, ["model=./local", "dataset=./file.jsonl", "parallel.device=cpu"]
    ).config
    assert (config.model, config.dataset) == ("./local", "./file.jsonl")
    assert (config.parallel.device, config.parallel.num_gpus) == ("cpu", 4)


def test_overrides_take_precedence_over_the_file(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEED", "7")
    monkeypatch.setenv("PACELINE_TRAIN_ARGS_SEED", "7")
    assert load(BASE).config.train_args.seed == 42
    assert load(BASE + "train_args: {seed: 1, max_length: 64}").config.train_args.seed == 1
    config = load(BASE + "train_args: {seed: 1, max_length: 64}", ["train_args.seed=2"]).config
    assert (config.train_args.seed, config.train_args.max_length) == (2, 64)
    assert load(BASE + "seed: 1", ["seed=null"]).config.train_args.seed == 42


@pytest.mark.parametrize(
    "overrides",
    [
        ["lora.rank=16", "learning_rate=1e-4", "lora.enable=true"],
        ["--lora.rank", "16", "--learning-rate", "1e-4", "--lora.enable"],
        ["--lora.rank=16", "--learning_rate=1e-4", "--lora.enable", "true"],
        ["lora={rank: 16, enable: true}", "train_args={learning_rate: 1e-4}"],
        {"lora.rank": 16, "learning_rate": 1e-4, "lora.enable": True},
        {"lora": {"rank": 16, "enable": True}, "train_args": {"learning_rate": 1e-4}},
    ],
)
def test_accepts_every_form_of_override(load: Load, overrides: Any) -> None:
    config = load(BASE + "lora: {dropout: 0.5}", overrides).config
    assert (
        config.lora.rank,
        config.lora.dropout,
        config.lora.enable,
        config.train_args.learning_rate,
    ) == (16, 0.5, True, 1e-4)


def test_loads_overrides_without_a_file() -> None:
    assert load_config(None, ["model=m", "dataset=[a, b#5]"]).config.dataset == ["a", "b#5"]
    assert load_config(None, {"model": Path("m"), "dataset": ("a", "b")}).config.dataset == [
        "a",
        "b",
    ]
    assert load_config(None, ["model=m", "dataset=a,b"]).config.dataset == ["a", "b"]
    with raises_error(ConfigError, code="missing-key"):
        load_config(None, ["dataset=d"])


def test_override_takes_precedence_over_an_alias(load: Load) -> None:
    loaded = load(
        "base_model: x\ndataset: d\nsequence_len: 512\n", ["model=y", "train_args.max_length=64"]
    )
    assert (loaded.config.model, loaded.config.train_args.max_length) == ("y", 64)
    assert any("base_model: x" in text and "command line" in text for _, text in loaded.notices)
    assert (
        load(BASE + "val_size: 100", ["split_dataset_ratio=0.1"]).config.split_dataset_ratio == 0.1
    )


@pytest.mark.parametrize(
    ("file", "override", "key", "value"),
    [
        ("save_steps: 100", "saves_per_epoch=1", "train_args.save_steps", 1 / 3),
        ("save_steps: 100", "save_strategy=epoch", "train_args.save_steps", 1 / 3),
        ("saves_per_epoch: 1", "save_steps=5", "train_args.save_steps", 5),
        ("save_strategy: epoch", "train_args.save_steps=5", "train_args.save_steps", 5),
        ("save_strategy: epoch", "save_strategy=no", "train_args.save_steps", 0),
        (
            "lr_scheduler_kwargs: {min_lr: 1e-6}\nlr_scheduler_type: cosine_with_min_lr",
            "cosine_min_lr_ratio=0.1",
            "train_args.lr_scheduler_kwargs",
            {"min_lr_rate": 0.1},
        ),
        (
            "cosine_min_lr_ratio: 0.1",
            "lr_scheduler_type=linear",
            "train_args.lr_scheduler_type",
            "linear",
        ),
        (
            "per_device_train_batch_size: 1\ntuner_type: lora",
            "batch_size=4",
            "train_args.per_device_train_batch_size",
            4,
        ),
        ("", "dataset_train_split=a", "dataset.split", "a"),
        ("dataset: [{path: d, split: b}]", "dataset_train_split=a", "dataset.0.split", "a"),
        ("dataset_train_split: b", "dataset_train_split=a", "dataset.split", "a"),
        ("dataset_train_split: b", "dataset.split=a", "dataset.split", "a"),
        ("", "dataset_text_field=a", "dataset.columns", {"text": "a"}),
        ("val_dataset: v", "dataset_test_split=a", "val_dataset.0.split", "a"),
        ("dataset_test_split: a", "val_dataset=v", "val_dataset", "v"),
        ("split_dataset_ratio: 0.1", "dataset_test_split=a", "split_dataset_ratio", 0),
    ],
)
def test_command_line_wins_whatever_tool_either_key_is_from(
    load: Load, file: str, override: str, key: str, value: object
) -> None:
    base = "model: m\n" if file.startswith("dataset: ") else BASE
    setting: Any = load(base + file, [override]).config.model_dump()
    for part in key.split("."):
        setting = setting[int(part) if part.isdigit() else part]
    assert setting == (pytest.approx(value) if isinstance(value, float) else value)


def test_override_replaces_conflicting_keys(load: Load) -> None:
    args = load(
        BASE + "max_steps: 9\nwarmup_steps: 3\nfp16: true",
        ["num_train_epochs=2", "warmup_ratio=0.1", "bf16=true"],
    )
    train = args.config.train_args
    assert (train.max_steps, train.warmup_steps, train.precision) == (None, None, "bf16-mixed")
    assert sum("is overridden by" in text for _, text in args.notices) == 3
    assert (
        load(BASE + "split_dataset_ratio: 0.1", ["val_dataset=v"]).config.split_dataset_ratio == 0
    )


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("train_args: {shuffle: 'false'}", "train_args.shuffle", False),
        ("lora: {enable: 'True'}", "lora.enable", True),
        ("use_wandb: 'true'", "report_to", ["wandb"]),
        ("finetuning_type: lora\nuse_rslora: 'true'", "lora.use_rslora", True),
        ("streaming: 'true'", "streaming", True),
        ("streaming: auto", "streaming", "auto"),
        ("run_name: 'true'", "train_args.run_name", "true"),
        ("saves_per_epoch: '4'\nnum_epochs: '2'", "train_args.save_steps", 0.125),
        ("max_samples: '5'", "dataset", "d#5"),
        ("num_processes: '8'\nnum_machines: '2'", "parallel.num_gpus", 4),
        ("warmup_steps: '0.1'", "train_args.warmup_ratio", 0.1),
        ("val_size: '100.0'", "split_dataset_ratio", 100),
        ("deepspeed: zero2\nnum_train_epochs: '1.5'", "train_args.num_train_epochs", 1.5),
    ],
)
def test_reads_values_in_quotes(load: Load, text: str, key: str, value: Any) -> None:
    result: Any = load(BASE + text).config
    for part in key.split("."):
        result = getattr(result, part)
    assert result == value
    assert type(result) is type(value)


def test_text_that_is_no_flag_is_rejected(load: Load) -> None:
    for value in ("'yes, please'", "'1'", "'on'"):
        assert "not true or false" in load_error(load, BASE + f"trust_remote_code: {value}\n")


def test_keys_that_hold_anchors_are_not_read(load: Load) -> None:
    text = (
        BASE + "x-common: &common {learning_rate: 1e-3, seed: 7}\n.hidden: &lora {rank: 3}\n"
        "train_args: {<<: *common, seed: 8}\nlora: {<<: *lora, alpha: 2}\n"
    )
    loaded = load(text)
    args, lora = loaded.config.train_args, loaded.config.lora
    assert (args.learning_rate, args.seed, lora.rank, lora.alpha) == (1e-3, 8, 3, 2)
    assert any("`x-common`, `.hidden`" in notice for _, notice in loaded.notices)
    assert "unknown key `train_args.x-common`" in load_error(
        load, BASE + "train_args: {x-common: 1}\n"
    )


def test_number_of_checkpoints_with_the_best_one(load: Load) -> None:
    text = "save_total_limit: 1\nval_dataset: v\n"
    for key in ("save_best", "load_best_model_at_end"):
        notices = load(BASE + text + f"{key}: true").notices
        assert any(
            f"`{key}: true` the best one, so there may be two" in text for _, text in notices
        )
    assert not any("there may be two" in notice for _, notice in load(BASE + text).notices)


@pytest.mark.parametrize(
    ("overrides", "fragments"),
    [
        (["--init_weights", "lora-ga"], ["`--init_weights lora-ga`", "lora.init_lora_weights"]),
        (["lora.init_lora_weights=eva"], ["`lora.init_lora_weights=eva`"]),
        (["freeze=(a"], ["`freeze=(a`"]),
    ],
)
def test_errors_of_a_single_key_name_it(
    load: Load, overrides: list[str], fragments: list[str]
) -> None:
    message = load_error(load, BASE, overrides)
    for fragment in fragments:
        assert fragment in message


def test_merges_mappings_and_sources(load: Load) -> None:
    text = (
        BASE
        + "task_args: {a: 1, b: {c: 2}}\ntrain_args:\n  lr_scheduler_type: cosine_with_min_lr\n"
        "  lr_scheduler_kwargs: {min_lr: 1e-6}\n"
    )
    config = load(
        text,
        ["task_args.b.c=3", "train_args.lr_scheduler_kwargs.num_cycles=2", "dataset.format=alpaca"],
    ).config
    assert config.task_args == {"a": 1, "b": {"c": 3}}
    assert config.train_args.lr_scheduler_kwargs == {"min_lr": 1e-6, "num_cycles": 2}
    assert config.sources()[0].format == "alpaca"
    config = load("model: m\ndataset: [a, {path: b, name: n}]\n", ["dataset.format=text"]).config
    assert [(source.path, source.format, source.name) for source in config.sources()] == [
        ("a", "text", None),
        ("b", "text", "n"),
    ]


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("modle: x\ndataset: d\n", ["line 1", "`modle`", "did you mean `model`?"]),
        (BASE + "lora:\n  rnk: 3\n", ["line 4", "`lora.rnk`", "did you mean `lora.rank`?"]),
        (BASE + "rank: 3\n", ["line 3", "`rank`", "`lora.rank`"]),
        (BASE + "num_gpus: 3\n", ["line 3", "`parallel.num_gpus`"]),
        (BASE + "lora: {max_length: 3}\n", ["line 3", "`train_args.max_length`"]),
        (
            BASE + "per_device_train_batchsize: 3\n",
            ["line 3", "did you mean `per_device_train_batch_size`?"],
        ),
        (
            BASE + "train_args:\n  learning_rat: 3\n",
            ["line 4", "did you mean `train_args.learning_rate`?"],
        ),
        (BASE + "finetunning_type: lora\n", ["line 3", "did you mean `finetuning_type`?"]),
        (BASE + "xyzzy: 3\n", ["line 3", "`paceline config`"]),
        (BASE + "lora: true\n", ["line 3", "is a section", "lora: {enable: ...}"]),
        (BASE + "lora:\n  rank: 0\n", ["line 4", "`lora.rank: 0`", "out of range", "at least 1"]),
        (BASE + "lora:\n  rank: true\n", ["line 4", "true/false", "a whole number"]),
        (
            BASE + "max_length: 1.5\n",
            ["line 3", "`max_length: 1.5`", "a whole number of at least 8"],
        ),
        (BASE + "seed: five\n", ["line 3", "`seed: five`", "a whole number"]),
        (BASE + "packing: 1\n", ["line 3", "true or false"]),
        (BASE + "learning_rate: .inf\n", ["line 3", "not a finite number"]),
        (BASE + "learning_rate: .nan\n", ["line 3", "not a finite number"]),
        (BASE + "weight_decay: [1]\n", ["line 3", "weight_decay: [1]", "a number of at least 0"]),
        (BASE + "lr_scheduler_type: cosin\n", ["line 3", "`linear`", "did you mean `cosine`?"]),
        (BASE + "truncation_strategy: cut\n", ["line 3", "`truncate`, `drop`"]),
        (BASE + "packing: maybe\n", ["line 3", "`auto` or true or false"]),
        (BASE + "evaluation: {mode: rank_0}\n", ["line 3", "did you mean `rank0`?"]),
        (BASE + "parallel: {num_gpus: 0}\n", ["line 3", "`auto` or a whole number of at least 1"]),
        (BASE + "split_dataset_ratio: -1\n", ["line 3", "less than 1"]),
        ("model: [a]\ndataset: d\n", ["line 1", "model: [a]", "text"]),
        ("model: m\ndataset: {pth: x}\n", ["line 2", "`path` of the data source"]),
        ("model: m\ndataset: {path: x, format: alpca}\n", ["line 2", "did you mean `alpaca`?"]),
        ("model: m\ndataset: {path: x, splt: y}\n", ["line 2", "`splt`", "did you mean `split`?"]),
        ("model: m\ndataset: []\n", ["line 2", "empty list"]),
        ("model: m\n", ["`dataset` is missing", "dataset="]),
        ("model:\ndataset: d\n", ["`model` is missing"]),
        (BASE + "bf16: true\nfp16: true\n", ["line 4", "line 3", "choose one"]),
        (BASE + "val_dataset: v\nsplit_dataset_ratio: 0.1\n", ["line 3", "line 4", "keep one"]),
        (
            BASE + "lora_r: 8\nlora: {rank: 16}\n",
            ["`lora_r: 8` (line 3)", "`lora.rank: 16` (line 4)", "disagree", "keep one"],
        ),
        (
            BASE + "cutoff_len: 64\nmax_seq_length: 65\n",
            ["line 3", "line 4", "disagree", "train_args.max_length"],
        ),
        (BASE + "torch_dtype: float16\nbf16: true\n", ["line 3", "line 4", "disagree"]),
        (BASE + "packing: true\nsample_packing: false\n", ["line 3", "line 4", "disagree"]),
        (BASE + "val_size: 100.5\n", ["line 3", "val_size: 100.5"]),
        (BASE + "stage: ppo\n", ["line 3", "`stage: ppo`", "PPO", "task: sft"]),
        (BASE + "rl: grpo\n", ["line 3", "`rl: grpo`", "rewards"]),
        (BASE + "task: grpo\n", ["line 3", "`task: grpo`", "rewards"]),
        (BASE + "task_type: token_cls\n", ["line 3", "token_cls"]),
        (BASE + "finetuning_type: oft\n", ["line 3", "oft", "full"]),
        (BASE + "logging_steps: 1.5\n", ["line 3", "logging_steps: 1.5", "whole number"]),
        (BASE + "saves_per_epoch: 2\nsave_steps: 10\n", ["line 3", "keep one of"]),
        (BASE + "evals_per_epoch: -1\n", ["line 3", "per epoch"]),
        (BASE + "lora_target_modules: '(q_proj'\n", ["line 3", "regular expression"]),
        (
            BASE + "target_modules: [all-linear, all-router]\n",
            ["line 3", "all-router", "modules_to_save"],
        ),
        (BASE + "stage: sft\nchat_template: jinja\n", ["line 4", "chat_template_jinja"]),
        (
            (
                "model: m\ndatasets: [{path: a, chat_template: chatml}, {path: b, chat_template:"
                " llama3}]\n"
            ),
            ["line 2", "different chat templates"],
        ),
        (
            "model: m\nchat_template: chatml\ndatasets: [{path: a, chat_template: llama3}]\n",
            ["disagree", "chat_template"],
        ),
        (BASE + "optim: lamb\n", ["line 3", "lamb", "`adamw`"]),
        (BASE + "optimizer: galore_adamw\n", ["line 3", "galore_adamw", "`adamw`"]),
        (BASE + "adapters: [a, b]\n", ["line 3", "one adapter", "got 2"]),
        (BASE + "nnodes: 4:2\n", ["line 3", "expected MIN:MAX"]),
        (BASE + "max_samples: 0\n", ["line 3", "at least 1"]),
        ("model: m\ndatasets: [{pth: x}]\n", ["line 2", "`pth`", "did you mean `path`?"]),
        (BASE + "lr_scheduler_kwargs: x\n", ["line 3", "min_lr"]),
    ],
)
def test_reports_invalid_configs(load: Load, text: str, fragments: list[str]) -> None:
    message = load_error(load, text)
    for fragment in fragments:
        assert fragment in message, message


def test_accepts_aliases_with_equal_values(load: Load) -> None:
    config = load(
        BASE + "cutoff_len: 512\nmax_length: 512.0\ntarget_modules: all\nlora_target:"
        " all-linear\nuse_peft: true\n"
    ).config
    assert config.train_args.max_length == 512
    assert config.lora.target_modules == "all-linear"


def test_reports_all_errors_at_once(load: Load) -> None:
    message = load_error(load, "modle: m\ndataset: d\nlora: {rnk: 1}\nseed: x\n", ["lora.rank=0"])
    assert "4 errors" in message
    assert message.count("\n- ") == 4
    for location in ("line 1", "line 3", "line 4", "command line"):
        assert location in message


@pytest.mark.parametrize(
    ("overrides", "fragments"),
    [
        (["lora.rank=1", "lora.rank=2"], ["lora.rank=1", "lora.rank=2", "disagree"]),
        (["lora_r=1", "lora.rank=2"], ["lora_r=1", "lora.rank=2"]),
        (["--lora-rnk", "3"], ["command line", "lora_rnk"]),
        (["lora.rnk=3"], ["command line", "`lora.rank`"]),
        (["seed=x"], ["command line", "`seed=x`", "whole number"]),
        (["lora=[x"], ["lora="]),
        (["seed"], ["`seed` is not an override", "key=value"]),
        (["--"], ["is not an option"]),
        (["--seed"], ["`--seed` has no value"]),
        ({"lora": {"rnk": 3}}, ["override", "`lora.rank`"]),
    ],
)
def test_reports_invalid_overrides(load: Load, overrides: Any, fragments: list[str]) -> None:
    message = load_error(load, BASE, overrides)
    for fragment in fragments:
        assert fragment in message, message


def test_accepts_the_same_override_twice(load: Load) -> None:
    assert load(BASE, ["seed=3", "--seed", "3"]).config.train_args.seed == 3


def test_split_cli_separates_file_and_overrides(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(BASE)
    file = str(path)
    assert split_cli([file, "seed=3"]) == (path, ["seed=3"])
    assert split_cli(["--config", file, "--seed", "3"]) == (path, ["seed=3"])
    assert split_cli([f"--config={file}", "--lora-r=3"]) == (path, ["lora_r=3"])
    assert split_cli(["model=m", "dataset=d"]) == (None, ["model=m", "dataset=d"])
    assert split_cli(["--bf16", file, "--max-steps", "-1"]) == (path, ["bf16=true", "max_steps=-1"])
    assert split_cli(["--train_args.bf16", "auto", file]) == (path, ["train_args.bf16=auto"])
    assert split_cli(["--use_peft", "--dataset", "a", "b#5", file]) == (
        path,
        ["use_peft=true", 'dataset=["a", "b#5"]'],
    )
    assert load_config(*split_cli([file, "--dataset", "a", "b#5"])).config.dataset == ["a", "b#5"]


@pytest.mark.parametrize(
    ("tokens", "override"),
    [
        (["--loss_scale", "ignore_empty_think"], "loss_scale=ignore_empty_think"),
        (["--loss_scale", "all"], "loss_scale=all"),
        (["--adapter", "qlora"], "adapter=qlora"),
        (["--padding_free", "auto"], "padding_free=auto"),
        (["--use_dora"], "use_dora=true"),
        (["--no_gradient_checkpointing"], "gradient_checkpointing=false"),
        (["--no_cuda"], "no_cuda=true"),
        (["--deepspeed", "ds.json"], "deepspeed=ds.json"),
        (["--some_new_flag"], "some_new_flag=true"),
        (["--bf16"], "bf16=true"),
        (["--packing"], "packing=true"),
    ],
)
@pytest.mark.parametrize("is_last", [True, False])
def test_split_cli_separates_values_of_foreign_options_from_the_file(
    tmp_path: Path, tokens: list[str], override: str, is_last: bool
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(BASE)
    arguments = [*tokens, str(path)] if is_last else [str(path), *tokens]
    assert split_cli(arguments) == (path, [override])


def test_option_without_a_value_is_true(tmp_path: Path) -> None:
    assert split_cli(["--use_x", "--plot", "seed=3"])[1] == ["use_x=true", "plot=true", "seed=3"]
    data = tmp_path / "data.yaml"
    data.write_text("a: {path: a.jsonl}")
    assert split_cli(["--train_dataset", str(data)]) == (None, [f"train_dataset={data}"])


def test_split_cli_rejects_invalid_arguments(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(BASE)
    (tmp_path / "b.yaml").write_text(BASE)
    for tokens, fragment in [
        ([str(tmp_path / "rum.yaml")], "did you mean"),
        (["rank"], "neither a config file nor an override"),
        (["--config"], "`--config` has no value"),
        ([str(tmp_path / "run.yaml"), str(tmp_path / "b.yaml")], "expected one config file"),
        (["-x"], "two dashes"),
    ]:
        with pytest.raises(ConfigError, match=fragment):
            split_cli(tokens)


def _random_config(rng: random.Random) -> Config:
    def text() -> str:
        return rng.choice(
            [
                "1e-4",
                "yes",
                "a: b",
                "x#5",
                "null",
                "é漢\n",
                "~",
                "010",
                "a,b",
                " x ",
                "{a}",
                "!!str",
                "1:30",
                "-",
            ]
        )

    return Config.model_validate(
        {
            "model": text(),
            "dataset": rng.choice(
                [
                    text(),
                    [text(), {"path": text(), "columns": {"prompt": text()}}],
                    {"path": text()},
                ]
            ),
            "system": rng.choice([None, text()]),
            "chat_template": rng.choice([None, text()]),
            "output_dir": text(),
            "task_args": rng.choice([{}, {"a": 1, "b": {"c": [1, "x"], "d": None}}, {"x": text()}]),
            "lora": {
                "rank": rng.randint(1, 99),
                "dropout": rng.random() * 0.9,
                "target_modules": rng.choice([text(), ["q", "1e5"]]),
            },
            "parallel": {
                "num_gpus": rng.choice(["auto", 3]),
                "device": rng.choice(["cpu", "auto"]),
            },
            "train_args": {
                "learning_rate": rng.choice([None, 1e-8, rng.random()]),
                "adam_epsilon": 10 ** -rng.uniform(1, 300),
                "precision": rng.choice(["auto", "bf16-mixed", "fp16-mixed", "32"]),
                "save_total_limit": rng.choice([None, 2]),
                "max_steps": rng.choice([None, 5]),
                "warmup_steps": rng.choice([None, 0, 5]),
                "packing": rng.choice(["auto", True, False]),
                "lr_scheduler_kwargs": rng.choice([{}, {"num_cycles": 0.25}]),
            },
            "report_to": rng.choice([[], ["tensorboard"]]),
        }
    )


@pytest.mark.parametrize("seed", range(40))
def test_to_yaml_round_trips(tmp_path: Path, seed: int) -> None:
    config = _random_config(random.Random(seed))
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    reloaded = load_config(path)
    assert reloaded.config == config, diff_configs(config, reloaded.config)


def test_diff_configs_lists_changed_keys() -> None:
    old = Config(model="m", dataset="d")
    new = Config.model_validate(
        {"model": "n", "dataset": "d", "lora": {"rank": 16}, "task_args": {"x": 1}}
    )
    assert diff_configs(old, old) == []
    assert sorted(diff_configs(old, new), key=str)[:2] == [
        ("lora.rank", 8, 16),
        ("model", "m", "n"),
    ]
    assert ("task_args.x", None, 1) in diff_configs(old, new)
