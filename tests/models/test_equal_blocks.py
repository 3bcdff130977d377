"""Test that a trace of unequal blocks only says the same about a model as a trace of all blocks."""

import pytest

from paceline.config.load import load_text
from paceline.models.blocks import find_blocks
from paceline.models.language import language_model_on_meta
from paceline.models.shape.equal_blocks import without_equal_blocks
from paceline.models.shape.layer_uses import trace_layer_uses
from paceline.models.shape.outline import outline
from paceline.models.shape.trace import trace_model
from paceline.planner.model_profile import describe


@pytest.mark.parametrize(
    ("model", "settings", "num_traced"),
    [
        ("EleutherAI/pythia-70m", "", 3),
        ("EleutherAI/pythia-70m", "lora: {enable: true}", 3),
        ("EleutherAI/pythia-70m", "train_args: {trainable_layers: 2}", 4),
        ("google/gemma-3-1b-pt", "", 4),  # two kinds of attention
    ],
)
def test_shape_is_that_of_a_full_trace(model, settings, num_traced):
    config = load_text(f"model: {model}\ndataset: d.jsonl\n{settings}\n", "config").config
    built = language_model_on_meta(config)
    names = [name for name, _ in find_blocks(built)]
    with without_equal_blocks(built) as stand_ins:
        assert len(find_blocks(built)) == num_traced
    assert [*stand_ins] == names == [name for name, _ in find_blocks(built)]
    shape = outline(built, config)
    full = trace_model(built)
    assert shape.phases == {name: tuple(sorted(phases)) for name, phases in full.phases.items()}
    assert shape.layer_uses == trace_layer_uses(built, shape.tensor_plan)
    assert len(shape.layer_uses) >= 2 * len(names)


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("EleutherAI/pythia-70m", "train_args: {optim: muon}"),
        ("EleutherAI/pythia-70m", "lora: {enable: true, use_dora: true}"),
        ("google/gemma-3-1b-pt", "lora: {enable: true, method: vera}"),
        ("EleutherAI/pythia-70m", "lora: {enable: true, target_modules: '.*layers.3.*dense'}"),
    ],
)
def test_shape_of_a_plan_is_that_of_the_whole_model(model, settings):
    """Only unequal blocks are built for it, unless the config names single blocks."""
    config = load_text(f"model: {model}\ndataset: d.jsonl\n{settings}\n", "config").config
    assert describe(config).shape == outline(language_model_on_meta(config), config)
