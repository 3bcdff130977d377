"""LoRA on every family of language models: training, reloading, merging, errors and notices."""

from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_families import FAMILIES, make_family, write_config
from merged_models import write_merged
from raised import raises_error

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.inference.loading import load_model
from paceline.models.adapters.lora import (
    adapter_layers,
    adapter_notices,
    bypassed_modules,
    ineffective_adapters,
)
from paceline.models.language import language_model_on_meta
from paceline.tasks.language import LanguageTask

#: Families that represent the others outside the soak tests: expert parameters, and a state-space
#: model.
QUICK = ("mixtral", "mamba2")
EXPERTS = ("mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3", "olmoe", "qwen3_next")


def config_for(model: Path, **extra: Any) -> Config:
    lora = {"enable": True, **extra.pop("lora", {})}
    args = {"max_length": 48, "packing": False, **extra.pop("train_args", {})}
    return Config(
        model=str(model),
        tokenizer="builtin:qwen2-micro",
        dataset="builtin:python-docs#6",
        lora=lora,
        train_args=args,
        **extra,
    )


def train_adapters(config: Config) -> tuple[LanguageTask, Any, list[tuple[str, str]]]:
    """Train two steps and return (task, model, notices). Every adapter must receive a gradient."""
    task = LanguageTask(config)
    task.check()
    task.prepared = task.prepare()
    data, _ = task.build_datasets()
    torch.manual_seed(0)
    model = task.build_model()
    notices = task.setup(model)
    model.train()
    parameters = {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    assert parameters
    assert all(
        "lora_" in name and parameter.dtype == torch.float32
        for name, parameter in parameters.items()
    )
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-2)
    for step in range(2):
        batch = task.collate([data[index] for index in range(2 * step, 2 * step + 2)])
        (task.loss(model, batch) / task.count(batch)).backward()
        without_gradient = [
            name
            for name, parameter in parameters.items()
            if parameter.grad is None or not parameter.grad.isfinite().all()
        ]
        optimizer.step()
        assert without_gradient == []
        optimizer.zero_grad()
    assert [
        name for name, parameter in parameters.items() if "lora_B" in name and not parameter.any()
    ] == []
    return task, model.eval(), notices


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(10, 34).unsqueeze(0), use_cache=False).logits


@pytest.mark.parametrize(
    "kind",
    [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.soak) for kind in FAMILIES],
)
def test_default_lora_trains_reloads_and_merges(kind: str, tmp_path: Path) -> None:
    base = make_family(kind, tmp_path / "base")
    config = config_for(base)
    on_meta = {
        name
        for name, parameter in language_model_on_meta(config).named_parameters()
        if parameter.requires_grad
    }
    task, model, notices = train_adapters(config)
    assert on_meta == {
        name for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    expected = logits(model)
    folder = tmp_path / "run" / "model"
    folder.mkdir(parents=True)
    task.save_model(model, folder)
    torch.testing.assert_close(
        logits(load_model(tmp_path / "run")[0]), expected, rtol=1e-4, atol=1e-4
    )
    merged = load_model(write_merged(tmp_path / "run"))[0]
    torch.testing.assert_close(logits(merged), expected, rtol=1e-3, atol=1e-3)
    text = " ".join(text for _, text in notices)
    assert ("peft cannot apply dropout" in text) == (kind in EXPERTS)
    if kind in EXPERTS:
        linear = [
            layer for _, layer in adapter_layers(model) if not hasattr(layer, "parameter_name")
        ]
        assert linear
        assert {layer.lora_dropout["default"].p for layer in linear} == {0.05}
        resumed_model = train_adapters(config_for(base, lora={"adapter": str(folder)}))[1]
        dropouts = [layer.lora_dropout["default"] for _, layer in adapter_layers(resumed_model)]
        assert sorted({getattr(dropout, "p", 0.0) for dropout in dropouts}) == [0.0, 0.05]


@pytest.mark.parametrize("kind", FAMILIES)
def test_default_lora_supports_every_family(kind: str, tmp_path: Path) -> None:
    model = language_model_on_meta(config_for(write_config(kind, tmp_path)))
    assert list(adapter_layers(model))
    assert ineffective_adapters(model) == []


def test_bypassed_modules_get_no_adapter(tmp_path: Path) -> None:
    """A module is bypassed if its parent reads its weight; initializing the weight or reading its
    dtype does not count."""
    names = {
        kind: {
            name.rpartition(".")[2]
            for name in bypassed_modules(language_model_on_meta(full_config(kind, tmp_path / kind)))
        }
        for kind in ("mamba", "mamba2", "bamba", "jamba", "mixtral", "gpt2")
    }
    assert names == {
        "mamba": {"out_proj", "x_proj", "dt_proj"}, "mamba2": {"out_proj"}, "bamba": {"out_proj"},
        "jamba": {"dt_proj"},
        "mixtral": set(), "gpt2": set(),
    }  # fmt: skip


def full_config(kind: str, folder: Path) -> Config:
    return config_for(write_config(kind, folder), lora={"enable": False})


@pytest.mark.parametrize(
    ("kind", "lora", "expected"),
    [
        (
            "gpt2",
            {"target_modules": ["c_attn", "c_prj"]},
            ["`c_prj`", "c_attn, c_fc, c_proj", "did you mean `c_proj`?"],
        ),
        (
            "mixtral",
            {"target_modules": ["wq"]},
            ["`wq`", "gate, k_proj, o_proj, q_proj, v_proj, w1, w2, w3"],
        ),
        ("mixtral", {"target_modules": ["w1"]}, ["without also targeting w3", "all-linear"]),
        (
            "mixtral",
            {"target_modules": "no_such_.*"},
            ["no_such_.*", "gate, k_proj, o_proj, q_proj, v_proj, w1, w2, w3"],
        ),
        (
            "mamba",
            {"target_modules": ["in_proj", "out_proj"]},
            ["out_proj", "incompatible", "dt_proj, in_proj, out_proj, x_proj"],
        ),
        (
            "mixtral",
            {"modules_to_save": ["lm_heads"]},
            ["lora.modules_to_save", "`lm_heads`", "did you mean `lm_head`?"],
        ),
    ],
)
def test_errors_list_modules_of_the_model(
    kind: str, lora: dict[str, Any], expected: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        language_model_on_meta(config_for(write_config(kind, tmp_path), lora=lora))
    text = str(caught.value)
    assert all(part in text for part in expected), text
    assert not any(part in text for part in ("base_layer", "default", "lora_A"))


@pytest.mark.parametrize(
    "target_modules",
    [["w1", "w2", "w3", "q_proj"], ["experts"], ["layers.1.self_attn.q_proj"], r".*\.(w1|w2|w3)"],
)
def test_accepts_matching_target_modules(target_modules: list[str] | str, tmp_path: Path) -> None:
    config = config_for(write_config("mixtral", tmp_path), lora={"target_modules": target_modules})
    if target_modules == ["experts"]:
        with raises_error(ConfigError, code="unfit-target-modules", naming="MixtralExperts"):
            language_model_on_meta(config)
    else:
        assert list(adapter_layers(language_model_on_meta(config)))


def test_unsupported_dropout_is_reported(tmp_path: Path) -> None:
    folder = write_config("mixtral", tmp_path)
    for lora, level in (({}, "info"), ({"dropout": 0.1}, "warning"), ({"dropout": 0.0}, None)):
        config = config_for(folder, lora=lora)
        notices = adapter_notices(language_model_on_meta(config), config)
        assert [notice_level for notice_level, text in notices if "dropout" in text] == (
            [level] if level else []
        )
        if level:
            assert "mlp.experts.down_proj, mlp.experts.gate_up_proj" in notices[0][1]


def test_modules_excluded_from_all_linear_are_reported(tmp_path: Path) -> None:
    for kind, names in (
        ("qwen2_moe", "mlp.experts.down_proj"),
        ("deepseek_v3", "mlp.shared_experts.up_proj"),
        ("mamba", "mixer.dt_proj"),
    ):
        config = config_for(write_config(kind, tmp_path / kind))
        assert any(
            names in text for _, text in adapter_notices(language_model_on_meta(config), config)
        ), kind
    plain = config_for(
        write_config("gpt2", tmp_path / "gpt2"), lora={"modules_to_save": ["lm_head"]}
    )
    assert adapter_notices(language_model_on_meta(plain), plain) == []


def test_ineffective_adapter_is_reported(tmp_path: Path) -> None:
    config = config_for(
        write_config("jamba", tmp_path), lora={"target_modules": ["dt_proj", "in_proj"]}
    )
    assert any(
        level == "warning" and "dt_proj" in text
        for level, text in adapter_notices(language_model_on_meta(config), config)
    )
