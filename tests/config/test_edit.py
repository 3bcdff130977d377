"""Test that editing a key of a YAML text leaves the rest of the text unchanged."""

import pytest
from raised import raises_error

from paceline.config.load import load_text
from paceline.config.yaml_edit import edit_yaml
from paceline.core.errors import ConfigError

TEXT = """# what this is for
model: builtin:qwen2-tiny  # the small one
dataset:
  - a.jsonl   # first
  - b.jsonl
# adapters
lora: {enable: true, rank: 8}  # one line
train_args:
  # found by trying
  learning_rate: 1e-4
  max_steps: 9   # short
"""


def diff_lines(before: str, after: str) -> tuple[list[str], list[str]]:
    """Return the removed and the added lines."""
    old_lines, new_lines = before.splitlines(), after.splitlines()
    removed = [line for line in old_lines if line not in new_lines]
    return removed, [line for line in new_lines if line not in old_lines]


@pytest.mark.parametrize(
    ("values", "removed", "new"),
    [
        (
            {"train_args.max_steps": "12"},
            ["  max_steps: 9   # short"],
            ["  max_steps: 12   # short"],
        ),
        (
            {"lora.rank": 16},
            ["lora: {enable: true, rank: 8}  # one line"],
            ["lora: {enable: true, rank: 16}  # one line"],
        ),
        (
            {"lora.alpha": 4},
            ["lora: {enable: true, rank: 8}  # one line"],
            ["lora: {enable: true, rank: 8, alpha: 4}  # one line"],
        ),
        (
            {"dataset": "c.jsonl"},
            ["dataset:", "  - a.jsonl   # first", "  - b.jsonl"],
            ["dataset: c.jsonl"],
        ),
        (
            {"dataset": "[x, y]"},
            ["dataset:", "  - a.jsonl   # first", "  - b.jsonl"],
            ["dataset: [x, y]"],
        ),
        ({"task": "pretrain"}, [], ["task: pretrain"]),
        ({"parallel.mode": "ddp"}, [], ["parallel:", "  mode: ddp"]),
        ({"train_args.precision": "bf16-mixed"}, [], ["  precision: bf16-mixed"]),
        ({"train_args.packing": "false"}, [], ["  packing: false"]),
        ({"system": "a: b # c"}, [], ["system: 'a: b # c'"]),
        (
            {"model": "7"},
            ["model: builtin:qwen2-tiny  # the small one"],
            ["model: '7'  # the small one"],
        ),
        ({"train_args.save_total_limit": None}, [], ["  save_total_limit: null"]),
    ],
)
def test_sets_one_key_and_keeps_the_rest(values, removed, new):
    text, rest_is_unchanged = edit_yaml(TEXT, values)
    assert rest_is_unchanged
    assert diff_lines(TEXT, text) == (removed, new)


def test_removes_a_key_with_its_line():
    assert diff_lines(TEXT, edit_yaml(TEXT, {}, ["train_args.max_steps"])[0]) == (
        ["  max_steps: 9   # short"],
        [],
    )
    assert "lora: {enable: true}  # one line" in edit_yaml(TEXT, {}, ["lora.rank"])[0]


def test_removes_an_empty_section():
    text, _ = edit_yaml("model: a\nlora:\n  rank: 4\n", {}, ["lora.rank"])
    assert text == "model: a\n"


def test_keeps_the_spelling_of_numbers():
    text, _ = edit_yaml(TEXT, {"train_args.learning_rate": "3e-5"})
    assert "  learning_rate: 3e-5\n" in text
    assert load_text(text, "config").config.train_args.learning_rate == 3e-5


def test_replaces_an_alias_with_the_native_key():
    text, rest_is_unchanged = edit_yaml(
        "model: a\ndataset: b\nlr: 1e-4\nnum_train_epochs: 2\n", {"train_args.learning_rate": 0.001}
    )
    assert rest_is_unchanged
    assert "lr: 1e-4" not in text
    assert load_text(text, "config").config.train_args.learning_rate == 0.001


@pytest.mark.parametrize(
    "text",
    ["", "model: a", "{model: a, dataset: b}", "model: a\nlora:\n", "model: a\ntrain_args: {}\n"],
)
def test_adds_keys_to_any_valid_text(text):
    text, rest_is_unchanged = edit_yaml(
        text,
        {
            "lora.rank": 4,
            "train_args.max_steps": 7,
            "system": "short",
            "dataset": "d",
            "model": "m",
        },
    )
    config = load_text(text, "config").config
    assert rest_is_unchanged
    assert (config.lora.rank, config.train_args.max_steps, config.system) == (4, 7, "short")
    assert (config.model, config.dataset) == ("m", "d")


def test_edits_an_alias_without_changing_its_anchor():
    text, rest_is_unchanged = edit_yaml(
        "model: m\ndataset: d\ntask_args: &shared {rank: 3}\nlora: *shared\n", {"lora.rank": 4}
    )
    config = load_text(text, "config").config
    assert not rest_is_unchanged  # comments are lost
    assert (config.lora.rank, config.task_args) == (4, {"rank": 3})


def test_rejects_text_that_is_not_a_config():
    with raises_error(ConfigError, code="invalid-yaml"):
        edit_yaml("model: [a", {"model": "b"})
    with raises_error(ConfigError, code="not-a-mapping"):
        edit_yaml("- a\n- b\n", {"model": "b"})
    with raises_error(ConfigError, code="unknown-config-key", naming="trian"):
        edit_yaml("model: a", {"trian": 1})


@pytest.mark.parametrize(
    "value",
    [
        "9" * 5000,
        "\x85",
        "a\nb: c",
        "- x",
        "&a",
        "*a",
        "!!int 7",
        float("nan"),
        [[[1]]],
        "#",
        "'",
        '"',
    ],
)
def test_writes_any_value(value):
    for key in ("system", "train_args.max_steps", "task_args"):
        text, _ = edit_yaml(TEXT, {key: value})
        assert text != TEXT
