"""LoRA on hybrid models and mixtures of experts: `all-linear` adapts every linear layer that peft
can adapt except routers, and the run lists what is left out."""

from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_families import write_config
from families import FAMILIES, HYBRIDS, make_model

from paceline.config.schema import Config
from paceline.models.adapters.lora import adapter_notices
from paceline.models.adapters.targets import (
    adapter_layers,
    bypassed_modules,
    linear_modules,
    routers,
    short_names,
)
from paceline.models.language import language_model_on_meta, load_language_model

TEN = (
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "mamba2",
    "bamba",
    "jamba",
    "falcon_h1",
    "nemotron_h",
    "lfm2",
    "zamba2",
)
OUT_PROJ = {"no-adapter-on-bypassed": {"out_proj"}}
ROUTER = {"no-adapter-on-routers": {"gate"}}
EXPERTS = {"no-adapter-selected": {"down_proj", "gate_up_proj"}}
#: family → the last parts of the names that notices list, by the code of the notice.
LEFT_OUT: dict[str, dict[str, set[str]]] = {
    "qwen3_next": ROUTER,
    "qwen3_5_text": {},
    "qwen3_5_moe_text": {**ROUTER, **EXPERTS},
    "mamba2": OUT_PROJ,
    "bamba": OUT_PROJ,
    "jamba": {
        "no-adapter-on-bypassed": {"dt_proj"},
        "no-adapter-on-routers": {"router"},
        **EXPERTS,
    },
    "falcon_h1": OUT_PROJ,
    "nemotron_h": OUT_PROJ,
    "lfm2": {},
    "zamba2": OUT_PROJ,
}


def config_of(folder: Path, **lora: Any) -> Config:
    args = {"max_length": 48, "precision": "32"}
    settings = {"enable": True, "dropout": 0.0, **lora}
    return Config.model_validate(
        {"model": str(folder), "dataset": "d", "train_args": args, "lora": settings}
    )


def adapted_names(model: Any) -> set[str]:
    """Return the names of the linear modules and parameters with an adapter."""
    prefix = "base_model.model."
    return {
        f"{name.removeprefix(prefix).replace('.base_layer', '')}"
        f".{getattr(layer, 'parameter_name', '')}".removesuffix(".").removesuffix(".weight")
        for name, layer in adapter_layers(model)
    }


def left_out(model: Any, config: Config) -> dict[str, set[str]]:
    return {
        text.code: {name.rpartition(".")[2] for name in str(text.values["short_names"]).split(", ")}
        for _, text in adapter_notices(model, config)
        if getattr(text, "code", "").startswith("no-adapter")
    }


def write_family(name: str, folder: Path) -> Path:
    from transformers import AutoConfig

    kind, numbers = {**FAMILIES, **HYBRIDS}[name]
    AutoConfig.for_model(kind, **numbers).save_pretrained(str(folder))
    return folder


@pytest.mark.parametrize("name", TEN)
def test_every_linear_layer_is_adapted_or_listed(name: str, tmp_path: Path) -> None:
    config = config_of(write_family(name, tmp_path))
    plain = language_model_on_meta(config_of(tmp_path, enable=False))
    linear = {*linear_modules(plain)}
    excluded = {*bypassed_modules(plain), *routers(plain)}
    model = language_model_on_meta(config)
    adapted = adapted_names(model)
    assert linear - adapted == excluded & linear
    assert not adapted & excluded
    assert left_out(model, config) == LEFT_OUT[name]
    if "no-adapter-on-bypassed" in LEFT_OUT[name]:
        assert "out_proj" in short_names(excluded) or name == "jamba"


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3", "olmoe", "granitemoe"])
def test_routers_are_left_out_of_all_mixtures(name: str, tmp_path: Path) -> None:
    model = language_model_on_meta(config := config_of(write_config(name, tmp_path)))
    assert not adapted_names(model) & set(routers(model.get_base_model()))
    assert "no-adapter-on-routers" in left_out(model, config)


def test_a_router_can_be_listed(tmp_path: Path) -> None:
    config = config_of(write_config("mixtral", tmp_path), target_modules=["gate", "q_proj"])
    names = {name.rpartition(".")[2] for name in adapted_names(language_model_on_meta(config))}
    assert names == {"gate", "q_proj"}


def test_layers_with_names_of_experts_are_adapted(tmp_path: Path) -> None:
    """A shared expert, whose projections have the names that peft takes for those of the experts,
    changes the output by its adapter, and peft loads the adapter again."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder = make_model("qwen3_next", tmp_path)
    config = config_of(folder)
    model = load_language_model(config)
    ids = torch.arange(1, 9).unsqueeze(0)
    before = model(input_ids=ids).logits
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".shared_expert." in name and "lora_B" in name:
                parameter.normal_(std=0.1)
    after = model(input_ids=ids).logits
    assert not torch.allclose(before, after)
    model.save_pretrained(str(tmp_path / "adapter"))
    base = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    again = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    torch.testing.assert_close(again(input_ids=ids).logits, after)
    merged = again.merge_and_unload()
    torch.testing.assert_close(merged(input_ids=ids).logits, after, rtol=1e-4, atol=1e-4)


def test_quantized_layers_with_names_of_experts_are_listed(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    config = config_of(write_family("qwen3_next", tmp_path), quantize="nf4")
    names = left_out(language_model_on_meta(config), config)
    assert names == {
        "no-adapter-on-routers": {"gate"},
        "no-adapter-selected": {"down_proj", "gate_proj", "up_proj"},
    }
