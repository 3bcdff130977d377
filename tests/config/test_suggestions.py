"""Test which known key is suggested for an unknown one."""

from collections.abc import Callable

import pytest

from paceline.config.compat.binding import is_opposite, num_edits
from paceline.config.load import Loaded
from paceline.core.errors import ConfigError

BASE = "model: m\ndataset: d\n"
Load = Callable[..., Loaded]


@pytest.mark.parametrize(
    ("text", "suggested"),
    [
        ("learning_rat: 1e-4", "learning_rate"),
        ("lora: {rnk: 8}", "lora.rank"),
        ("max_lenght: 8", "max_length"),
        ("num_train_epoch: 3", "num_train_epochs"),
        ("context_parapllel_size: 2", "context_parallel_size"),
        ("rank: 3", "compression.rank` or `lora.rank"),
        ("gradient_checkpoint: true", "gradient_checkpointing"),
        ("enable_gradient_checkpointing: true", "use_gradient_checkpointing"),
    ],
)
def test_suggests_a_similar_key_of_the_same_kind(load: Load, text: str, suggested: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(BASE + text)
    assert f"did you mean `{suggested}`" in caught.value.paragraph().replace("train_args.", "")


@pytest.mark.parametrize(
    "text",
    [
        "tune_vision_layers: true",  # freeze_vision_tower means the opposite
        "unfreeze_vision_tower: true",
        "enable_shuffling: true",  # disable_shuffling
        "vision_model: true",  # revision_of_model
        "streamin: {a: 1}",  # not a mapping
        "sed: [1]",  # not a list
        "learning_rates: {a: 1}",
        "secrets: [a]",
        "volumes: [a]",
        "branch: main",
    ],
)
def test_suggests_no_key_of_another_kind_or_of_the_opposite_meaning(load: Load, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(BASE + text)
    assert "unknown key" in caught.value.paragraph()
    assert "did you mean" not in caught.value.paragraph()


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("enable_x", "disable_x", True),
        ("freeze_vit", "unfreeze_vit", True),
        ("no_shuffle", "shuffle", True),
        ("skip_memory_metrics", "memory_metrics", True),
        ("learning_rat", "learning_rate", False),
        ("num_train_epoch", "num_train_epochs", False),
        ("distributed_typ", "distributed_type", False),
        ("run_nam", "run_name", False),
    ],
)
def test_names_of_opposite_meaning(first: str, second: str, expected: bool) -> None:
    assert is_opposite(first, second) is is_opposite(second, first) is expected


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("", "abc", 3),
        ("abc", "abc", 0),
        ("abc", "acb", 1),
        ("rnk", "rank", 1),
        ("kitten", "sitting", 3),
    ],
)
def test_number_of_edits(first: str, second: str, expected: int) -> None:
    assert num_edits(first, second) == num_edits(second, first) == expected
