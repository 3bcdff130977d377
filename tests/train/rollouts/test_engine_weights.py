"""The weights that an engine with a copy of the model gets are those that the files of the trained
model would have, by name and by value, and giving them leaves the model as it is."""

from pathlib import Path
from typing import Any

import pytest
import torch
from families import build_model
from peft import LoraConfig, get_peft_model
from raised import raises_error
from ranks import run_ranks
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.distributed.communicator import Communicator
from paceline.distributed.mesh import ParallelDims
from paceline.parallel.strategy import make_strategy
from paceline.train.rollouts.engines.weights import check_mergeable, named_weights


def adapted(model: PreTrainedModel, **settings: Any) -> Any:
    """Return a model with adapters that are not zero."""
    torch.manual_seed(1)
    config = LoraConfig(
        r=4,
        target_modules=settings.pop("target_modules", "all-linear"),
        init_lora_weights=False,
        task_type="CAUSAL_LM",
        **settings,
    )
    return get_peft_model(model, config)


def copy_of(model: PreTrainedModel) -> PreTrainedModel:
    twin = type(model)(model.config)
    twin.load_state_dict(model.state_dict())
    return twin


def weights_of_files(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    model.save_pretrained(folder)
    return {
        name: value
        for file in folder.glob("*.safetensors")
        for name, value in load_file(file).items()
    }


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_names_and_values_are_those_of_the_files(family: str, tmp_path: Path) -> None:
    model = build_model(family)
    given = {name: value.clone() for name, value in named_weights(model)}
    expected = weights_of_files(model, tmp_path)
    assert given.keys() == expected.keys()
    assert all(torch.equal(given[name], value) for name, value in expected.items())


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        ("llama", {"use_dora": True}),
        ("mixtral", {}),
        ("gpt2", {"fan_in_fan_out": True}),
    ],
)
def test_adapters_are_merged_and_leave_no_trace(
    family: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    model = adapted(build_model(family), **settings)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    given = {name: value.clone() for name, value in named_weights(model)}
    after = model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    expected = weights_of_files(model.merge_and_unload(), tmp_path)
    assert given.keys() == expected.keys()
    assert all(torch.equal(given[name], value) for name, value in expected.items())


def test_a_module_that_is_trained_in_full_is_given_instead_of_the_original() -> None:
    model = adapted(build_model("llama"), target_modules=["q_proj"], modules_to_save=["lm_head"])
    head = model.get_base_model().lm_head.modules_to_save["default"]
    with torch.no_grad():
        head.weight.add_(1.0)
    given = dict(named_weights(model))
    assert torch.equal(given["lm_head.weight"], head.weight)
    assert not [name for name in given if "modules_to_save" in name or "original" in name]


def test_an_adapter_on_one_of_two_tied_weights_is_refused() -> None:
    model = build_model("llama", tie_word_embeddings=True)
    with raises_error(ConfigError, code="adapter-not-mergeable"):
        check_mergeable(adapted(model, target_modules=["lm_head", "q_proj"]))
    check_mergeable(adapted(build_model("llama")))


def gathered_weights(world: Communicator, with_adapters: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model: Any = build_model("llama")
    if with_adapters:
        model = adapted(model)
    sharded = Communicator(world.env, world.device, ParallelDims(shard=2))
    config = Config(
        model="m", dataset="d", parallel={"mode": "zero3"}, train_args={"precision": "32"}
    )
    strategy = make_strategy("zero3", config, sharded)
    model = strategy.setup(model)
    with strategy.gathered(), torch.no_grad():
        return {name: value.clone() for name, value in named_weights(model)}


@pytest.mark.slow
@pytest.mark.parametrize("with_adapters", [False, True], ids=["full", "lora"])
def test_ranks_with_shards_give_a_model_that_can_be_loaded(with_adapters: bool) -> None:
    torch.manual_seed(0)
    model: Any = build_model("llama")
    twin = copy_of(model)
    expected = adapted(model).merge_and_unload() if with_adapters else model
    for given in run_ranks(gathered_weights, 2, with_adapters):
        receiver = AutoModelForCausalLM.from_config(twin.config)
        receiver.load_state_dict(given, strict=True)
        for name, value in expected.state_dict().items():
            assert torch.equal(receiver.state_dict()[name], value), name
