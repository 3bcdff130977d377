"""Test that a dry run rejects the models that training would reject, and that the rejection
interrupts a long tokenization."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_families import FAMILIES, write_config
from raised import raises_error
from safetensors.numpy import save_file

import paceline
from paceline.cli import main
from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.distributed.mesh import ParallelDims
from paceline.launch.passes import model as model_check
from paceline.models.checks.step import check_adapted_step
from paceline.models.language import language_model_on_meta
from paceline.parallel.registry import ParallelLayout
from paceline.strategies.hybrid.model_check import check_stages


def make_args(model: Path, output: Path, *extra_args: str) -> list[str]:
    fixed = [
        f"model={model}",
        "tokenizer=builtin:qwen2-micro",
        "dataset=builtin:python-docs#16",
        "lora.enable=true",
    ]
    return ["sft", *fixed, f"output_dir={output}", *extra_args]


@pytest.mark.parametrize(
    ("kind", "extra_args", "expected"),
    [
        (
            "mixtral",
            ["lora.target_modules=[wq]"],
            "gate, k_proj, o_proj, q_proj, v_proj, w1, w2, w3",
        ),
        ("mamba", ["lora.target_modules=[out_proj]"], "dt_proj, in_proj, out_proj, x_proj"),
        ("mixtral", ["lora.modules_to_save=[head]"], "lm_head"),
    ],
)
def test_dry_run_rejects_invalid_lora_targets(
    kind: str,
    extra_args: list[str],
    expected: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = write_config(kind, tmp_path / "model")
    save_file({}, model / "model.safetensors")  # the weights are never read
    assert main([*make_args(model, tmp_path / "run", *extra_args), "--dry-run"]) == 2
    captured = capsys.readouterr()
    assert expected in captured.err
    assert "tokenized" not in captured.err
    assert not (tmp_path / "run").exists()


def test_dry_run_reports_peft_notice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_config("mixtral", tmp_path / "model")
    save_file({}, model / "model.safetensors")
    for _ in range(2):  # the second result comes from the cache
        assert main([*make_args(model, tmp_path / "run"), "--dry-run"]) == 0
        assert "peft cannot apply dropout to mlp.experts.down_proj" in capsys.readouterr().err


@pytest.mark.soak
def test_rejected_model_interrupts_tokenization(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(model_check, "_START_AFTER_S", 0.0)
    model = write_config("mixtral", tmp_path / "model")
    save_file({}, model / "model.safetensors")
    data = tmp_path / "data.jsonl"
    row = {
        "messages": [
            {"role": "user", "content": "word " * 60},
            {"role": "assistant", "content": "answer " * 60},
        ]
    }
    data.write_text((json.dumps(row) + "\n") * 200_000)
    config = {
        "model": str(model), "tokenizer": "builtin:qwen2-micro", "dataset": str(data),
        "output_dir": str(tmp_path / "run"),
        "lora": {"enable": True, "target_modules": ["wq"]},
    }  # fmt: skip
    with pytest.raises(ConfigError, match="`wq`"):
        paceline.train(config)
    assert not list((tmp_path / "cache").glob("paceline/tokens/*"))
    assert not (tmp_path / "run").exists()


def test_check_stages_traces_model_once(tmp_path: Path) -> None:
    config = Config(model=str(write_config("gpt2", tmp_path / "gpt2")), dataset="d")
    model = language_model_on_meta(config)
    forwards: list[Any] = []
    model.register_forward_pre_hook(lambda *_: forwards.append(_))
    check_stages(model, config, 2)
    assert len(forwards) == 1


def test_dry_run_partitions_model_into_stages(tmp_path: Path) -> None:
    for kind in ("gpt2", "mixtral"):
        config = Config(
            model=str(write_config(kind, tmp_path / kind)),
            dataset="d",
            lora={"enable": True},
            train_args={"max_length": 64},
        )
        model = language_model_on_meta(config)
        check_stages(model, config, 2)
        model_check.check_model(config, ParallelLayout("pipeline", ParallelDims(pipeline=2), 2))
    model = language_model_on_meta(Config(model=str(tmp_path / "gpt2"), dataset="d"))
    with raises_error(ConfigError, code="too-many-stages"):
        check_stages(model, config, 8)


def small_config(folder: Path, **settings: Any) -> Config:
    """Return a config for a model of 256 positions."""
    data = {"dataset": "user/texts", "train_args": {"max_length": 64}}
    return Config(model=str(folder), **data, **settings)


@pytest.mark.parametrize(("kind", "stages"), [("gemma3n_text", 2), ("zamba2", 3)])
def test_dry_run_refuses_stages_that_need_the_embeddings(
    kind: str, stages: int, tmp_path: Path
) -> None:
    # Gemma 3n has embeddings of each block, and Zamba 2 concatenates the embeddings to the input of
    # some blocks.
    config = small_config(write_config(kind, tmp_path / kind))
    layout = ParallelLayout("pipeline", ParallelDims(pipeline=stages), stages)
    with raises_error(ConfigError, code="not-a-pipeline") as caught:
        model_check.check_model(config, layout)
    assert "mode: zero3" in caught.value.paragraph()


@pytest.mark.parametrize("kind", ["phimoe", "llama4_text"])
@pytest.mark.parametrize("method", ["lora", "vera"])
def test_routers_that_return_a_tuple_get_no_adapter(kind: str, method: str, tmp_path: Path) -> None:
    folder = write_config(kind, tmp_path / kind)
    config = small_config(folder, lora={"enable": True, "method": method})
    notices = model_check.check_model(config, ParallelLayout("single", ParallelDims(), 1))
    assert any("no adapter on" in text and "router" in text for _, text in notices)
    for targets in (["q_proj", "router"], r".*\.router"):
        lora = {"enable": True, "target_modules": targets}
        named = small_config(folder, lora=lora)
        with raises_error(ConfigError, code="special-target-modules"):
            language_model_on_meta(named)


@pytest.mark.parametrize("task", ["reward", "classify"])
def test_dry_run_checks_the_adapters_of_classifiers(task: str, tmp_path: Path) -> None:
    folder = write_config("qwen3_moe", tmp_path / "model")
    save_file({}, folder / "model.safetensors")
    lora = {"enable": True, "target_modules": ["wq"]}
    config = small_config(folder, task=task, lora=lora)
    with raises_error(ConfigError, code="unknown-target-modules", naming="wq"):
        model_check.check_model(config, ParallelLayout("single", ParallelDims(), 1))


@pytest.mark.parametrize("fails_alone", [False, True])
def test_step_with_adapters_runs_before_training(fails_alone: bool, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    config = Config(model=str(write_config("mixtral", tmp_path / "model")), dataset="d")
    model: Any = language_model_on_meta(config)
    attention = model.model.layers[0].self_attn
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj", "gate"]))
    check_adapted_step(adapted)
    attention.q_proj.lora_B.default = torch.nn.Linear(8, 7, device="meta")
    if fails_alone:
        attention.k_proj = torch.nn.Linear(3, 7, device="meta")
        check_adapted_step(adapted)  # the adapters are not the cause
        return
    with raises_error(ConfigError, code="unfit-adapter", naming="self_attn.q_proj"):
        check_adapted_step(adapted)


@pytest.mark.parametrize(
    ("kind", "settings", "expected"),
    [
        ("qwen3_moe", {"output_router_logits": True, "router_aux_loss_coef": 0.02}, None),
        ("bamba", {"z_loss_coefficient": 0.5}, "z-loss (`z_loss_coefficient: 0.5`)"),
        ("deepseek_v3", {"num_nextn_predict_layers": 1}, "`num_nextn_predict_layers: 1`"),
        ("mixtral", {}, None),
    ],
)
def test_what_the_model_asks_for_and_is_left_out_is_reported(
    kind: str, settings: dict[str, Any], expected: str | None, tmp_path: Path
) -> None:
    folder = write_config(kind, tmp_path / "model")
    file = folder / "config.json"
    content = json.loads(file.read_text())
    content.pop("num_nextn_predict_layers", None)
    file.write_text(json.dumps({**content, **settings}))
    config = small_config(folder)
    notices = model_check.check_model(config, ParallelLayout("single", ParallelDims(), 1))
    warnings = [text for level, text in notices if level == "warning"]
    assert len(warnings) == (expected is not None)
    assert expected is None or expected in warnings[0]
    has_router_loss = "output_router_logits" in settings
    texts = [text for level, text in notices if text.startswith("loss: with 0.02 times")]
    assert bool(texts) == has_router_loss


def test_result_without_sequence_parallel_is_not_used_with_it(tmp_path: Path) -> None:
    folder = write_config("qwen3_moe", tmp_path / "model")
    layout = ParallelLayout("tensor", ParallelDims(tensor=2), 2)
    model_check.check_model(small_config(folder), layout)
    parallel = {"tensor": 2, "sequence_parallel": True}
    with raises_error(
        ConfigError, code="sequence-parallel-not-supported", naming="parallel.sequence_parallel"
    ):
        model_check.check_model(small_config(folder, parallel=parallel), layout)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("bloom", "cannot be replaced"), ("falcon_mamba", "a state from each token")],
)
def test_dry_run_refuses_models_whose_rows_cannot_be_divided(
    kind: str, reason: str, tmp_path: Path
) -> None:
    config = small_config(write_config(kind, tmp_path / kind))
    layout = ParallelLayout("context", ParallelDims(context=2), 2)
    with raises_error(ConfigError, code="context-model", naming=reason):
        model_check.check_model(config, layout)


def refusal_of(config: Config, layout: ParallelLayout) -> str:
    """Return why a dry run refuses a config; empty if it does not."""
    try:
        model_check.check_model(config, layout)
    except ConfigError as error:
        return error.what
    return ""


@pytest.mark.parametrize("kind", FAMILIES)
def test_dry_run_runs_a_step_with_split_layers(kind: str, tmp_path: Path) -> None:
    config = small_config(write_config(kind, tmp_path / kind))
    layout = ParallelLayout("tensor", ParallelDims(tensor=2), 2)
    if kind == "doge":  # the code of its attention takes the number of heads from its config
        with raises_error(ConfigError, code="failed-step"):
            model_check.check_model(config, layout)
        return
    assert "a step fails" not in refusal_of(config, layout)
