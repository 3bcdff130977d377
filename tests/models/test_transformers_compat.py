"""The wrapper of an undocumented function of transformers, and files on the hub."""

from pathlib import Path
from typing import Any

import pytest
from families import make_model
from huggingface_hub import constants
from raised import raises_error
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

import paceline
from paceline.core.errors import ConfigError
from paceline.models.hub_configs import find_file
from paceline.models.transformers_compat import SUPPORTED, load_generation_config


def test_generation_config_is_that_of_from_pretrained(tmp_path: Path) -> None:
    folder = str(make_model("llama", tmp_path))
    GenerationConfig(temperature=0.3, do_sample=True, top_k=7).save_pretrained(folder)
    expected = AutoModelForCausalLM.from_pretrained(folder).generation_config
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    load_generation_config(model, folder, trust_remote_code=False)
    assert model.generation_config.top_k == 7
    assert model.generation_config.to_dict() == expected.to_dict()


class _OtherArguments:
    def adjust_generation_fn(self, generation_config: object, **kwargs: Any) -> None:
        raise AssertionError("called with arguments that it does not have")


class _MoreArguments:
    def adjust_generation_fn(self, *args: object, mode: str) -> None:
        raise AssertionError("called without an argument that it requires")


@pytest.mark.parametrize("model", [object(), _OtherArguments(), _MoreArguments()])
def test_other_function_is_an_error_with_the_supported_range(model: object) -> None:
    with raises_error(ConfigError, code="changed-in-transformers") as caught:
        load_generation_config(model, "model", trust_remote_code=False)
    assert SUPPORTED in str(caught.value)


def test_supported_range_matches_pyproject() -> None:
    project = Path(paceline.__file__).parents[2] / "pyproject.toml"
    if not project.exists():
        pytest.skip("installed without its sources")
    assert f'"{SUPPORTED}"' in project.read_text(encoding="utf-8")


def test_finds_files_in_a_folder_and_in_the_cache_of_the_hub(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert find_file(str(tmp_path), "config.json") == tmp_path / "config.json"
    assert find_file(str(tmp_path), "missing.json") is None
    repository = Path(constants.HF_HUB_CACHE) / "models--paceline--find-file"
    (repository / "snapshots" / "abc").mkdir(parents=True)
    (repository / "snapshots" / "abc" / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    cached = find_file("paceline/find-file", "config.json")
    assert cached == repository / "snapshots" / "abc" / "config.json"
    assert find_file("paceline/find-file", "missing.json") is None
