"""The ways in which other tools name their data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.config.load import Loaded

Load = Callable[..., Loaded]


@pytest.mark.parametrize(
    ("text", "sources"),
    [
        (
            "datasets: [{path: a, type: alpaca}, {path: b, type: chat_template, split: 's[:5%]', name: n}]",
            [{"path": "a", "format": "alpaca"}, {"path": "b", "format": "messages", "split": "s[:5%]", "name": "n"}],
        ),
        (
            "datasets: [{path: a, type: chat_template, field_messages: conv, "
            "message_property_mappings: {role: from, content: value}}]",
            [{"path": "a", "format": "sharegpt", "columns": {"conversations": "conv"}}],
        ),
        (
            "datasets: [{path: a, type: completion, field: body}]",
            [{"path": "a", "format": "text", "columns": {"text": "body"}}],
        ),
        ("datasets: [{path: a, type: sharegpt.load_role}]", [{"path": "a", "format": "sharegpt"}]),
        (
            "datasets: [{path: json, data_files: [x.json, y.json], ds_type: json, type: alpaca}]",
            [{"path": "x.json", "format": "alpaca"}, {"path": "y.json", "format": "alpaca"}],
        ),
        (
            "datasets: [{path: a, type: {field_instruction: q, field_output: r}}]",
            [{"path": "a", "format": "alpaca", "columns": {"instruction": "q", "output": "r"}}],
        ),
        ("dataset: a, b\nstage: sft", [{"path": "a"}, {"path": "b"}]),
        (
            "dataset: ['o/x#500', 'o/y:sub#5', z.jsonl]\ntuner_type: lora",
            [{"path": "o/x#500"}, {"path": "o/y#5", "name": "sub"}, {"path": "z.jsonl"}],
        ),
        ("dataset: a#2,b\nstage: sft\nmax_samples: 7", [{"path": "a#2"}, {"path": "b#7"}]),
        ("dataset_name: a\ndataset_config: c\ndataset_train_split: s", [{"path": "a", "name": "c", "split": "s"}]),
        ("dataset_name: a\ndataset_text_field: body", [{"path": "a", "format": "text", "columns": {"text": "body"}}]),
        (
            "dataset_mixture: {datasets: [{id: a, config: c, split: s, columns: [m], weight: 1.0}], test_split_size: 0.1}",
            [{"path": "a", "name": "c", "split": "s"}],
        ),
        ("dataset_mixer: {a: 1.0, b: 0.5}", [{"path": "a"}, {"path": "b"}]),
        ("pretraining_dataset: [{path: a, text_column: body}]", [{"path": "a", "format": "text", "columns": {"text": "body"}}]),
    ],
)
def test_sources(load: Load, text: str, sources: list[dict[str, Any]]) -> None:
    loaded = load(f"model: m\n{text}\n")
    assert [one.model_dump(exclude_defaults=True) for one in loaded.config.sources()] == sources
    assert loaded.notices


def test_a_native_dataset_with_a_comma_means_what_it_says(load: Load) -> None:
    assert load("model: m\ndataset: a,b\nchat_template: chatml").config.dataset == "a,b"


def test_dataset_dir(load: Load, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "mine.jsonl").write_text("")
    (folder / "dataset_info.json").write_text(
        '{"talk": {"file_name": "t.json", "formatting": "sharegpt", "columns": {"messages": "conv"}}, '
        '"hub": {"hf_hub_url": "o/h"}}'
    )
    loaded = load(f"model: m\ndataset: mine,talk#5,hub,other\ndataset_dir: {folder}\n")
    assert [one.path for one in loaded.config.sources()] == [f"{folder}/mine.jsonl", f"{folder}/t.json#5", "o/h", "other"]
    assert loaded.config.sources()[1].columns == {"conversations": "conv"}


def test_an_override_of_the_data_leaves_its_split_behind(load: Load) -> None:
    text = "model: m\ndataset_name: a\ndataset_train_split: s\ndataset_test_split: t\n"
    assert load(text).config.sources(validation=True)[0].split == "t"
    config = load(text, ["dataset=./local.jsonl"]).config
    assert (config.dataset, config.val_dataset) == ("./local.jsonl", None)
