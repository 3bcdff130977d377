"""Engines that cannot generate the completions of a run are refused before anything starts."""

import json
from pathlib import Path

import pytest
from families import build_model
from raised import raises_error

from paceline.config.load import load_text
from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.models.transformers_compat import batching_obstacle
from paceline.rollouts.engine_check import check_engine, engine_notices


def config(model: str, **grpo: object) -> Config:
    values = {
        "model": model,
        "task": "grpo",
        "dataset": "prompts.jsonl",
        "rewards": [{"name": "exact"}],
        "grpo": grpo,
    }
    return load_text(json.dumps(values), "mine.yaml").config


def codes(config: Config) -> list[str | None]:
    return [getattr(notice.message, "code", None) for notice in engine_notices(config)]


def test_auto_is_generate_whose_probabilities_need_no_correction() -> None:
    chosen = config("builtin:qwen2-micro").grpo
    assert chosen.engine_used == "generate"
    assert not chosen.corrects_probabilities
    assert config("m", engine="continuous_batching").grpo.corrects_probabilities
    assert config("m", importance_sampling_correction=True).grpo.corrects_probabilities
    off = config("m", engine="vllm", importance_sampling_correction=False).grpo
    assert not off.corrects_probabilities


def test_vllm_must_be_installed() -> None:
    with raises_error(ConfigError, code="rollouts-need-vllm"):
        check_engine(config("builtin:qwen2-micro", engine="vllm"))


def test_the_notices_name_the_engine_and_what_is_untested() -> None:
    assert codes(config("m")) == ["rollout-engine"]
    assert "vllm-untested" in codes(config("m", engine="vllm"))
    restricted = config("m", engine="continuous_batching", top_p=0.9)
    assert "restricted-probabilities" in codes(restricted)
    unused = config("m", vllm_mode="server", importance_sampling_clip_max=2.0)
    (notice,) = [each for each in engine_notices(unused) if "no effect" in each.message]
    assert "grpo.importance_sampling_clip_max" in notice.message
    assert "grpo.vllm_mode" in notice.message


def test_recorded_completions_need_no_engine() -> None:
    values = {"engine": "vllm", "replay": "rollouts", "vllm_mode": "server"}
    replayed = config("builtin:qwen2-micro", **values)
    check_engine(replayed)
    assert codes(replayed) == ["engine-without-effect"]
    assert "grpo.replay" in engine_notices(replayed)[0].message
    evaluated = replayed.model_copy(update={"val_dataset": "prompts.jsonl"})
    assert "rollout-engine" in codes(evaluated)
    with raises_error(ConfigError, code="rollouts-need-vllm"):
        check_engine(evaluated)


@pytest.mark.parametrize(
    "family", ["gpt_neo", "gptj", "bloom", "falcon_7b", "mamba", "jamba", "lfm2", "deepseek_v3"]
)
def test_models_without_paged_attention_are_refused(family: str, tmp_path: Path) -> None:
    build_model(family).config.save_pretrained(tmp_path)
    with raises_error(ConfigError, code="engine-not-supported"):
        check_engine(config(str(tmp_path), engine="continuous_batching"))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text", "qwen3_moe", "mistral"])
def test_models_with_paged_attention_are_accepted(family: str, tmp_path: Path) -> None:
    build_model(family).config.save_pretrained(tmp_path)
    check_engine(config(str(tmp_path), engine="continuous_batching"))


def test_a_model_that_transformers_does_not_know_is_checked_when_it_is_loaded() -> None:
    assert batching_obstacle({"model_type": "not-in-transformers"}) is None


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"importance_sampling_clip_min": 4.0}, "clip-limits-reversed"),
        ({"vllm_server_base_url": "localhost:8000"}, "not-a-url"),
    ],
)
def test_settings_that_contradict_each_other_are_errors(
    settings: dict[str, object], code: str
) -> None:
    with raises_error(ConfigError, code=code):
        config("m", **settings)
