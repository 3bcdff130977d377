"""`paceline config` explains keys."""

import json
from typing import Any

import pytest

from paceline.cli import main
from paceline.config.fields import KEYS


def explain(capsys: pytest.CaptureFixture[str], *args: str) -> Any:
    assert main(["config", *args, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_key_has_type_default_meaning_and_spellings(capsys: pytest.CaptureFixture[str]) -> None:
    key = explain(capsys, "lora.rank")
    assert key["key"] == "lora.rank"
    assert key["type"] == "a whole number of at least 1"
    assert key["default"] == 8
    assert not key["required"]
    assert key["meaning"]
    assert "lora_rank" in key["spellings"]["LLaMA-Factory"]
    assert explain(capsys, "model")["required"]


@pytest.mark.parametrize("name", ["lora_r", "lora_rank"])
def test_key_is_found_by_other_spellings(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert explain(capsys, name)["key"] == "lora.rank"


def test_all_keys_a_section_and_a_word_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    names = [key["key"] for key in explain(capsys)["keys"]]
    assert set(KEYS) <= set(names)
    section = [key["key"] for key in explain(capsys, "recovery")["keys"]]
    assert section == [name for name in names if name.startswith("recovery.")]
    names_found = [key["key"] for key in explain(capsys, "--search", "ACCUMULATION")["keys"]]
    assert "train_args.gradient_accumulation_steps" in names_found
    assert "train_args.seed" not in names_found
    assert explain(capsys, "--search", "xyzzy") == {"keys": []}


def test_text_names_the_key_and_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "train_args.max_length"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("train_args.max_length\n")
    assert "default" in printed


def test_unknown_key_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "lora.rnak"]) == 2
    assert "did you mean `lora.rank`?" in capsys.readouterr().err
    assert main(["config", "model", "--search", "x"]) == 2
    assert "remove one of them" in capsys.readouterr().err


def test_name_without_a_section_finds_each_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert [key["key"] for key in explain(capsys, "rank")["keys"]] == [
        "compression.rank",
        "lora.rank",
    ]
    assert explain(capsys, "warmup_ratio")["key"] == "train_args.warmup_ratio"
