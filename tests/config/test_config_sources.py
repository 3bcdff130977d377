"""Test that datasets in the syntax of other tools are read."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from raised import raises_error

from paceline.config.load import Loaded
from paceline.config.overrides import split_cli
from paceline.core.errors import ConfigError

Load = Callable[..., Loaded]


@pytest.mark.parametrize(
    ("text", "sources"),
    [
        (
            (
                "datasets: [{path: a, type: alpaca}, {path: b, type: chat_template, split:"
                " 's[:5%]', name: n}]"
            ),
            [
                {"path": "a", "format": "alpaca"},
                {"path": "b", "format": "messages", "split": "s[:5%]", "name": "n"},
            ],
        ),
        (
            (
                "datasets: [{path: a, type: chat_template, field_messages: conv, "
                "message_property_mappings: {role: from, content: value}}]"
            ),
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
        (
            "dataset_name: a\ndataset_config: c\ndataset_train_split: s",
            [{"path": "a", "name": "c", "split": "s"}],
        ),
        (
            "dataset_name: a\ndataset_text_field: body",
            [{"path": "a", "format": "text", "columns": {"text": "body"}}],
        ),
        (
            (
                "dataset_mixture: {datasets: [{id: a, config: c, split: s, columns: [m], weight:"
                " 1.0}], test_split_size: 0.1}"
            ),
            [{"path": "a", "name": "c", "split": "s"}],
        ),
        (
            "dataset_mixer: {a: 1.0}\ndataset_splits: [train_sft, test_sft]\ndataset_configs: [en]",
            [{"path": "a", "split": "train_sft", "name": "en"}],
        ),
        ("dataset_mixer: {a: 1.0, b: 0.5}", [{"path": "a"}, {"path": "b#50%"}]),
        (
            "datasets: [{path: a, weight: 0.125}, {path: b, weight: 1}, {path: c}]",
            [{"path": "a#12.5%"}, {"path": "b"}, {"path": "c"}],
        ),
        (
            "datasets: [{path: a, weight: 3}, {path: b, weight: 0.5}]\nmixing: weights",
            [{"path": "a", "weight": 3}, {"path": "b", "weight": 0.5}],
        ),
        (
            (
                "datasets: [{path: a, type: chat_template, field_messages: conv,"
                " message_property_mappings: {role: from, content: value, tool_calls: calls},"
                " message_field_training: learn, message_field_training_detail: parts, field_tools:"
                " functions, roles: {assistant: [gpt, bot9000]}, roles_to_train: [assistant],"
                " train_on_eos: turn}]"
            ),
            [
                {
                    "path": "a",
                    "format": "sharegpt",
                    "roles": {"assistant": ["gpt", "bot9000"]},
                    "columns": {
                        "conversations": "conv",
                        "tools": "functions",
                        "weight": "learn",
                        "train_detail": "parts",
                        "tool_calls": "calls",
                    },
                }
            ],
        ),
        (
            "pretraining_dataset: [{path: a, text_column: body}]",
            [{"path": "a", "format": "text", "columns": {"text": "body"}}],
        ),
    ],
)
def test_reads_sources_of_other_tools(load: Load, text: str, sources: list[dict[str, Any]]) -> None:
    loaded = load(f"model: m\n{text}\n")
    assert [item.model_dump(exclude_defaults=True) for item in loaded.config.sources()] == sources
    assert loaded.notices


@pytest.mark.parametrize(
    "text",
    [
        "datasets: [{path: a, type: chat_template, roles_to_train: [user, assistant]}]",
        "datasets: [{path: a, type: chat_template, roles_to_train: []}]",
        "datasets: [{path: a, type: chat_template, train_on_eos: all}]",
        "datasets: [{path: a, type: chat_template, train_on_eot: none}]",
        "dataset: a\nroles_to_train: [human]",
        "dataset: a\ntrain_on_eos: last",
        "dataset: a\nloss_scale: react",
        "dataset: a\nloss_scale: last_round+ignore_empty_think",
        "dataset: a\nmask_history: true\ntrain_on_prompt: true",
    ],
)
def test_rejects_unsupported_loss_masks(load: Load, text: str) -> None:
    with pytest.raises(ConfigError):
        load(f"model: m\n{text}\n")


@pytest.mark.parametrize(
    "text",
    [
        "ignore_columns: [a, b]",
        "ignore_columns: a, b",
        "ignore_columns: b\ndataset.ignore_columns: a",
    ],
)
def test_ignore_columns_accepts_list_and_text(load: Load, text: str) -> None:
    config = load(f"model: m\ndataset: {{path: d}}\n{text}\n").config
    assert sorted(config.sources()[0].ignore_columns) == ["a", "b"]


def test_reads_tools_and_roles_of_dataset_info(load: Load, tmp_path: Path) -> None:
    tags = {
        "role_tag": "who",
        "content_tag": "said",
        "user_tag": "me",
        "assistant_tag": "gpt",
        "function_tag": "call",
    }
    share = {"messages": "talk", "tools": "functions"}
    table = {
        "share": {"file_name": "a.json", "formatting": "sharegpt", "columns": share, "tags": tags}
    }
    (tmp_path / "dataset_info.json").write_text(json.dumps(table))
    loaded = load(f"model: m\nstage: sft\ndataset: share\ndataset_dir: {tmp_path}\n")
    assert loaded.config.sources()[0].model_dump(exclude_defaults=True) == {
        "path": str(tmp_path / "a.json"), "format": "sharegpt",
        "columns": {"conversations": "talk", "tools": "functions", "from": "who", "value": "said"},
        "roles": {"user": "me", "tool_call": "call"},
    }  # fmt: skip


def test_native_dataset_name_may_contain_a_comma(load: Load) -> None:
    assert load("model: m\ndataset: a,b\nchat_template: chatml").config.dataset == "a,b"


def test_resolves_names_in_dataset_dir(load: Load, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "mine.jsonl").write_text("")
    (folder / "dataset_info.json").write_text(
        '{"talk": {"file_name": "t.json", "formatting": "sharegpt", "columns": {"messages":'
        ' "conv"}}, "hub": {"hf_hub_url": "o/h"}}'
    )
    loaded = load(f"model: m\ndataset: mine,talk#5,hub,other\ndataset_dir: {folder}\n")
    assert [source.path for source in loaded.config.sources()] == [
        f"{folder}/mine.jsonl",
        f"{folder}/t.json#5",
        "o/h",
        "other",
    ]
    assert loaded.config.sources()[1].columns == {"conversations": "conv"}


def test_validation_data_is_found_by_name_if_the_dataset_is_overridden(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.jsonl").write_text("")
    _write_dataset_info(
        tmp_path / "data", mine={"file_name": "m.json"}, test={"file_name": "t.json"}
    )
    text = "model: m\nstage: sft\ndataset: mine\neval_dataset: test\n"
    for folder in ("", "dataset_dir: data\n"):
        config = load(text + folder, ["dataset=own.jsonl"]).config
        assert [source.path for source in config.sources()] == ["own.jsonl"]
        assert [source.path for source in config.sources(validation=True)] == ["data/t.json"]
        config = load(text + folder, ["dataset=test"]).config
        assert [source.path for source in config.sources()] == ["data/t.json"]


def test_field_of_a_chat_names_its_column(load: Load) -> None:
    text = "model: m\ndatasets: [{path: a, type: sharegpt, field: talk}]\n"
    assert load(text).config.sources()[0].columns == {"conversations": "talk"}
    text = text.replace("sharegpt", "chat_template").replace("talk", "messages")
    assert load(text).config.sources()[0].columns == {}


def test_a_mixture_overrides_the_name_of_a_dataset(load: Load) -> None:
    text = "model: m\ndataset_name: a\ndataset_mixture: {datasets: [{id: b, weight: 1}]}\n"
    loaded = load(text)
    assert [source.path for source in loaded.config.sources()] == ["b"]
    assert any("`dataset_name: a` (TRL) is overridden by" in notice for _, notice in loaded.notices)


def test_dataset_override_discards_the_split(load: Load) -> None:
    text = "model: m\ndataset_name: a\ndataset_train_split: s\ndataset_test_split: t\n"
    assert load(text).config.sources(validation=True)[0].split == "t"
    config = load(text, ["dataset=./local.jsonl"]).config
    assert (config.dataset, config.val_dataset) == ("./local.jsonl", None)


def _write_dataset_info(folder: Path, **entries: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "dataset_info.json").write_text(json.dumps(entries))
    return folder


_MESSAGES = {
    "role_tag": "role",
    "content_tag": "content",
    "user_tag": "user",
    "assistant_tag": "assistant",
}


@pytest.mark.parametrize(
    ("entry", "source"),
    [
        (
            {"hf_hub_url": "o/h", "subset": "en", "split": "validation"},
            {"path": "o/h", "format": "alpaca", "name": "en", "split": "validation"},
        ),
        (
            {"hf_hub_url": "o/h", "file_name": "x.json", "num_samples": 10},
            {"path": "o/h#10", "format": "alpaca"},
        ),
        (
            {"hf_hub_url": "o/h", "revision": "main", "ranking": False},
            {"path": "o/h", "format": "alpaca"},
        ),
        (
            {"hf_hub_url": "o/h", "columns": {"prompt": "input", "response": "target"}},
            {
                "path": "o/h",
                "format": "alpaca",
                "columns": {"instruction": "input", "output": "target", "input": ""},
            },
        ),
        (
            {
                "hf_hub_url": "o/h",
                "columns": {
                    "prompt": "q",
                    "query": "more",
                    "response": "a",
                    "system": "s",
                    "history": "h",
                },
            },
            {
                "path": "o/h",
                "format": "alpaca",
                "columns": {
                    "instruction": "q",
                    "input": "more",
                    "output": "a",
                    "system": "s",
                    "history": "h",
                },
            },
        ),
        (
            {
                "hf_hub_url": "o/h",
                "formatting": "sharegpt",
                "columns": {"messages": "chat"},
                "tags": _MESSAGES,
            },
            {"path": "o/h", "format": "messages", "columns": {"messages": "chat"}},
        ),
        ({"hf_hub_url": "o/h", "formatting": "openai"}, {"path": "o/h", "format": "messages"}),
        (
            {
                "hf_hub_url": "o/h",
                "formatting": "sharegpt",
                "tags": {"role_tag": "who", "content_tag": "says"},
            },
            {"path": "o/h", "format": "sharegpt", "columns": {"from": "who", "value": "says"}},
        ),
    ],
)
def test_reads_entries_of_dataset_info(
    load: Load, tmp_path: Path, entry: dict[str, Any], source: dict[str, Any]
) -> None:
    folder = _write_dataset_info(tmp_path / "data", mine=entry)
    loaded = load(
        f"model: m\nstage: sft\ndataset: mine\neval_dataset: mine\ndataset_dir: {folder}\n"
    )
    assert [item.model_dump(exclude_defaults=True) for item in loaded.config.sources()] == [source]
    assert [
        item.model_dump(exclude_defaults=True) for item in loaded.config.sources(validation=True)
    ] == [source]


@pytest.mark.parametrize(
    ("entry", "fragments"),
    [
        (
            {"file_name": "a.json", "ranking": True},
            ["`ranking: true`", "pairs of answers", "task: dpo"],
        ),
        (
            {"file_name": "a.json", "columns": {"chosen": "c", "rejected": "r"}},
            ["`chosen`", "pairs of answers"],
        ),
        (
            {"file_name": "a.json", "columns": {"messages": "m", "kto_tag": "label"}},
            ["`kto_tag`", "task: kto"],
        ),
        ({"file_name": "a.json", "columns": {"videos": "videos"}}, ["videos", "not supported"]),
        ({"hf_hub_url": "o/h", "folder": "python"}, ["`folder: python`", "download"]),
        ({"hf_hub_url": "o/h", "revision": "v2"}, ["`revision: v2`"]),
        ({"om_hub_url": "o/h"}, ["om_hub_url"]),
        ({"script_url": "o/h"}, ["script_url"]),
        ({"formatting": "sharegpt"}, ["file_name"]),
        ({"file_name": "a.json", "formatting": "parquet"}, ["`formatting: parquet`"]),
        ({"file_name": "a.json", "num_samples": 0}, ["`num_samples: 0`"]),
    ],
)
def test_rejects_unsupported_entries_of_dataset_info(
    load: Load, tmp_path: Path, entry: dict[str, Any], fragments: list[str]
) -> None:
    folder = _write_dataset_info(tmp_path / "data", mine=entry)
    with pytest.raises(ConfigError) as caught:
        load(f"model: m\nstage: sft\ndataset: mine\ndataset_dir: {folder}\n")
    for fragment in ["`mine`", *fragments]:
        assert fragment in caught.value.paragraph()


def test_reads_dataset_info_for_pretraining_from_the_default_folder(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write_dataset_info(
        tmp_path / "data",
        wiki={"file_name": "wiki.jsonl", "columns": {"prompt": "body"}, "unknown": 1},
    )
    monkeypatch.chdir(tmp_path)
    loaded = load("model_name_or_path: m\nstage: pt\nfinetuning_type: full\ndataset: wiki\n")
    assert [source.model_dump(exclude_defaults=True) for source in loaded.config.sources()] == [
        {"path": "data/wiki.jsonl", "format": "text", "columns": {"text": "body"}}
    ]
    assert any(
        "LLaMA-Factory's default" in text and "`unknown`" in text for _, text in loaded.notices
    )
    assert load("model: m\ndataset: wiki\n").config.dataset == "wiki"


def test_flags_accept_several_values(load: Load) -> None:
    path, overrides = split_cli(
        ["--dataset", "a", "b", "--model_author", "x", "y", "--lr", "1e-4", "--strict", "true"]
    )
    assert path is None
    config = load("model: m\n", overrides).config
    assert (config.dataset, config.train_args.learning_rate) == (["a", "b"], 1e-4)


def test_reads_chat_template_of_a_source(load: Load) -> None:
    text = (
        "model: m\ndatasets: [{path: a, type: chat_template, chat_template: chatml}, {path: b,"
        " type: chat_template}]\n"
    )
    loaded = load(text)
    assert loaded.config.chat_template == "chatml"
    assert any("`chat_template: chatml`" in text for _, text in loaded.notices)
    assert load(
        "model: m\ndatasets: [{path: a, chat_template: jinja, chat_template_jinja: ./t.jinja}]\n"
    ).config.chat_template


def test_splits_select_training_and_validation_data(load: Load) -> None:
    config = load(
        "model: m\ndataset_mixer: {a: 1.0, b: 1.0}\ndataset_splits: [train_sft, test_sft]\n"
    ).config
    assert [(source.path, source.split) for source in config.sources()] == [
        ("a", "train_sft"),
        ("b", "train_sft"),
    ]
    assert [(source.path, source.split) for source in config.sources(validation=True)] == [
        ("a", "test_sft"),
        ("b", "test_sft"),
    ]
    with raises_error(ConfigError, code="unsupported-value", naming="train"):
        load("model: m\ndataset_mixer: {a: 1.0}\ndataset_splits: [dev]\n")
    with raises_error(ConfigError, code="unsupported-value"):
        load("model: m\ndataset_mixer: {a: 1.0}\ndataset_configs: [x, y]\n")
