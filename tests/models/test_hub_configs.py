"""Configurations of well-known Hub models, available without a network."""

import json
import socket
from importlib.resources import files
from typing import Any

import pytest
import torch
from raised import raises_error
from transformers import AutoConfig, AutoModelForCausalLM

import paceline
from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.models.builtin import config_numbers, model_type, resolve_model
from paceline.models.hub_configs import canonical_id, known_ids, read_config
from paceline.models.shape.dims import dims_of
from paceline.planner.upper_bound import upper_bound

TABLE: list[dict[str, Any]] = json.loads(
    (files("paceline.models") / "hub_configs.json").read_text()
)["models"]


@pytest.fixture(autouse=True)
def block_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("network access is disabled in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def smallest_of_each_type() -> list[dict[str, Any]]:
    rows = sorted(TABLE, key=lambda row: row["parameters"], reverse=True)
    return list({row["config"]["model_type"]: row for row in rows}.values())


@pytest.mark.parametrize(
    "rows",
    [smallest_of_each_type(), pytest.param(TABLE, marks=pytest.mark.soak)],
    ids=["subset", "all"],
)
def test_parameter_counts_match_the_hub(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        model_config = read_config(row["ids"][0])
        assert model_config is not None
        config = AutoConfig.for_model(**model_config)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        assert sum(parameter.numel() for parameter in model.parameters()) == row["parameters"], row[
            "ids"
        ]
        dims = dims_of(model_config)
        assert dims is not None
        assert dims.parameters_at_most >= 0.98 * row["parameters"], row["ids"]
        assert row["source"].startswith("https://huggingface.co/")


def test_model_ids_are_case_insensitive() -> None:
    assert len(known_ids()) >= 40
    assert len({model_id.lower() for model_id in known_ids()}) == len(known_ids())
    assert canonical_id("qwen/Qwen-7B") == resolve_model("QWEN/qwen-7b") == "Qwen/Qwen-7B"
    assert canonical_id("somebody/some-model") == "somebody/some-model"
    assert model_type("meta-llama/llama-2-7b-hf") == "llama"
    assert config_numbers("qwen/qwen-7b")["intermediate_size"] == 11008


def test_plan_for_known_model_without_network() -> None:
    keys = {
        "model": "qwen/Qwen-7B",
        "task": "sft",
        "dataset": "alpaca-en",
        "lora": {"enable": True, "rank": 64},
    }
    result = paceline.plan({**keys, "parallel": {"mode": "ddp", "num_gpus": 4}}, device="A10")
    assert (result["world_size"], result["device"], result["configured"]) == (4, "A10", "ddp")
    # LoRA rank × (inputs + outputs) of the seven projections in each of the 32 layers
    adapters = 64 * 32 * (4 * 2 * 4096 + 3 * (4096 + 11008))
    assert result["trainable_parameters"] == adapters
    assert result["parameters"] == 7_721_324_544 + adapters
    bound = upper_bound(Config(**keys))
    single = next(mode for mode in result["modes"] if mode["mode"] == "single")
    assert bound is not None
    assert bound >= single["memory_bytes"]["total"]


def test_plan_for_unknown_model_suggests_local_folder() -> None:
    with raises_error(ConfigError, code="unusable-model-config") as error:
        paceline.plan(
            {"model": "somebody/some-model", "dataset": "alpaca-en"}, world_size=2, device="A10"
        )
    assert "give a folder with the model's config.json" in str(error.value.fix)
