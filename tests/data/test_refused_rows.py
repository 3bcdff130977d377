"""Rejection of rows that training cannot use: preference data, images, unsupported columns."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from raised import raises_error

from paceline.cli import main
from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.data.encoding.prepare import PreparedTokens, prepare_tokens
from paceline.data.sources.rows import Unsupported
from paceline.data.text.formats import RowConverter
from paceline.data.text.refused_rows import find_placeholder
from paceline.models.builtin import resolve_model

ASK = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}
CHAT = [ASK, ANSWER]
SHAREGPT_QUESTION = [{"from": "human", "value": "q"}]


def prepare(path: Path, rows: list[Any], task: Any = "sft", **settings: Any) -> PreparedTokens:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return prepare_tokens(
        Config(model="builtin:qwen2-micro", dataset=str(path), **settings), task, resolve_model
    )


def expect_error(path: Path, rows: list[Any], **settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        prepare(path, rows, **settings)
    return str(caught.value)


# -- preference data
PAIRS = {
    "trl": {"prompt": "q", "chosen": "a", "rejected": "b"},
    "trl, chats": {"prompt": [ASK], "chosen": [ANSWER], "rejected": [{**ANSWER, "content": "b"}]},
    "trl, implicit prompt": {"chosen": CHAT, "rejected": [ASK, {**ANSWER, "content": "b"}]},
    "hh-rlhf": {"chosen": "Human: q Assistant: a", "rejected": "Human: q Assistant: b"},
    "llamafactory": {
        "conversations": SHAREGPT_QUESTION,
        "chosen": {"from": "gpt", "value": "a"},
        "rejected": {"from": "gpt", "value": "b"},
    },
    "llamafactory, alpaca": {"instruction": "q", "input": "", "chosen": "a", "rejected": "b"},
    "llamafactory, old": {"instruction": "q", "input": "", "output": ["a", "b"]},
    "ms-swift": {"messages": CHAT, "rejected_response": "b"},
    "ms-swift, messages": {
        "messages": CHAT,
        "rejected_messages": [ASK, {**ANSWER, "content": "b"}],
    },
    "ms-swift, query": {"query": "q", "response": "a", "rejected_response": "b", "history": []},
    "reward model": {"chosen": CHAT, "rejected": CHAT, "margin": 0.5},
    "orca": {"system": "s", "question": "q", "chosen": "a", "rejected": "b"},
    "ultrafeedback": {
        "prompt": "q",
        "messages": CHAT,
        "chosen": CHAT,
        "rejected": CHAT,
        "score_chosen": 9.0,
    },
    "openai": {
        "input": {"messages": [ASK]},
        "preferred_output": [ANSWER],
        "non_preferred_output": [ANSWER],
    },
    "stack exchange": {"question": "q", "response_j": "a", "response_k": "b"},
}


@pytest.mark.parametrize("row", PAIRS.values(), ids=PAIRS)
@pytest.mark.parametrize("task", ["sft", "pretrain"])
def test_rejects_preference_pairs(row: dict[str, Any], task: str) -> None:
    with pytest.raises(Unsupported, match="DPO"):
        RowConverter("here", pretrain=task == "pretrain")(row)


KTO = {
    "trl": {"prompt": "q", "completion": "a", "label": False},
    "completion": {"completion": "a", "label": True},
    "messages": {"messages": CHAT, "label": True},
    "llamafactory": {
        "conversations": [*SHAREGPT_QUESTION, {"from": "gpt", "value": "a"}],
        "kto_tag": False,
    },
    "alpaca": {"instruction": "q", "output": "a", "label": True},
    "csv": {"prompt": "q", "completion": "a", "label": "True"},
}


@pytest.mark.parametrize("row", KTO.values(), ids=KTO)
def test_rejects_kto_labels(row: dict[str, Any]) -> None:
    with pytest.raises(Unsupported, match="KTO"):
        RowConverter("here")(row)


def test_rejects_step_labels() -> None:
    with pytest.raises(Unsupported, match="process reward model"):
        RowConverter("here")({"prompt": "q", "completions": ["a", "b"], "labels": [True, False]})


@pytest.mark.parametrize(
    "row",
    [
        {
            "messages": CHAT,
            "chosen": None,
            "rejected": None,
            "label": None,
            "images": None,
            "tools": None,
            "history": None,
        },
        {
            "messages": CHAT,
            "rejected": "",
            "images": [],
            "tools": "[]",
            "history": [],
            "image": {"bytes": None, "path": None},
        },
        {"text": "spam", "label": True},
        {"text": "spam", "label": 1},
        {"prompt": "q", "completion": "a", "label": 3},
        {"prompt": "q", "completion": "a", "rejected": False, "images": 0},
    ],
)
def test_accepts_empty_columns_and_class_labels(row: dict[str, Any]) -> None:
    converter = RowConverter("here")
    converter(row)
    assert sum(converter.tally.seen.values()) == 1


def test_error_names_row_and_method_and_fix_works(tmp_path: Path) -> None:
    rows = [
        {"prompt": "q", "completion": "a"},
        {"prompt": "q", "chosen": "good", "rejected": "bad"},
    ]
    message = expect_error(tmp_path / "a.jsonl", rows)
    assert message.startswith(
        f"line 2 of {tmp_path / 'a.jsonl'}: the rows are preference pairs (`chosen`, `rejected`)"
    )
    assert "`columns: {completion: chosen}` and `ignore_columns: [rejected]`" in message
    source = {
        "path": str(tmp_path / "b.jsonl"),
        "columns": {"completion": "chosen"},
        "ignore_columns": ["rejected"],
    }
    (tmp_path / "b.jsonl").write_text(json.dumps(rows[1]))
    tokens = prepare_tokens(
        Config(model="builtin:qwen2-micro", dataset=source), "sft", resolve_model
    )
    assert tokens.counts.kept == 1
    assert (
        prepare(
            tmp_path / "c.jsonl", [{"messages": CHAT, "label": True}], ignore_columns=["label"]
        ).counts.kept
        == 1
    )


def test_warns_about_labels_of_only_zero_and_one(tmp_path: Path) -> None:
    rows = [{"prompt": "q", "completion": "a", "label": number} for number in (0, 1)]
    notices = prepare(tmp_path / "a.jsonl", rows).notices
    assert any(
        level == "warning" and "`label` has only the values 0 and 1" in text
        for level, text in notices
    )
    notices = prepare(tmp_path / "b.jsonl", [*rows, {**rows[0], "label": 2}]).notices
    assert not any("only the values 0 and 1" in text for _, text in notices)


def test_command_exits_with_2_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(KTO["trl"]))
    code = main(
        [
            "sft",
            "model=builtin:qwen2-micro",
            f"dataset={tmp_path / 'a.jsonl'}",
            f"output_dir={tmp_path / 'out'}",
        ]
    )
    assert code == 2
    assert "for KTO" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# -- images, video, audio
MEDIA = {
    "images": {"messages": CHAT, "images": ["a.png"]},
    "image": {"prompt": "q", "completion": "a", "image": {"bytes": "x", "path": "a.png"}},
    "videos": {"messages": CHAT, "videos": ["a.mp4"]},
    "audios": {"messages": CHAT, "audios": ["a.wav"]},
    "placeholder": {"messages": [{"role": "user", "content": "<image>\nWho is it?"}, ANSWER]},
    "placeholder at the end": {
        "messages": [{"role": "user", "content": "Who is it? <image>"}, ANSWER]
    },
    "sharegpt": {
        "conversations": [
            {"from": "human", "value": "<image>Who is it?"},
            {"from": "gpt", "value": "a"},
        ]
    },
    "alpaca": {"instruction": "<image>\nWho is it?", "input": "", "output": "a"},
    "query": {"query": "<video>What happens?", "response": "a"},
    "audio": {"messages": [{"role": "user", "content": "<audio>Write it down."}, ANSWER]},
    "path": {"query": "<img>https://x.org/a.jpg</img>What is it?", "response": "a"},
    "image_url": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "q"}, {"type": "image_url"}]},
            ANSWER,
        ]
    },
    "input_audio": {
        "messages": [
            {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]},
            ANSWER,
        ]
    },
    "in a message": {"messages": [{**ASK, "images": ["a.png"]}, ANSWER]},
    "text": {"text": "hello", "images": ["a.png"]},
}


@pytest.mark.parametrize("row", MEDIA.values(), ids=MEDIA)
def test_rejects_images_video_and_audio(row: dict[str, Any]) -> None:
    with pytest.raises(Unsupported, match="trains on text only"):
        RowConverter("here")(row)


@pytest.mark.parametrize(
    "text",
    [
        "Use `<image>` in the prompt.", "How do I use the <image> tag in SVG?", "a < b and c > d",
        "<think>hm</think>", "Parse this:\n<image>\n<url>x</url>\n</image>",
        "<svg><image href='a.png'/></svg>", 'He wrote "<image>" there.', "```\n<image>\n```",
        "Write this:\n<div>\n<image>\n</div>", "What is <video>, an HTML element?",
    ],
)  # fmt: skip
def test_markup_in_text_is_not_a_placeholder(text: str) -> None:
    assert find_placeholder(text) is None
    RowConverter("here")({"messages": [{"role": "user", "content": text}, ANSWER]})


def test_placeholders_in_answers_or_with_ignored_images_are_text() -> None:
    RowConverter("here")({"messages": [ASK, {"role": "assistant", "content": "<image>"}]})
    row = {"messages": [{"role": "user", "content": "<image>\nWho?"}, ANSWER], "images": ["a.png"]}
    assert RowConverter("here", ignore_columns=["images"])(row).messages is not None


# -- columns that affect training and must not be skipped silently
@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"messages": CHAT, "history": [["q", "a"]]}, "history"),
        ({"text": "t", "history": [["q", "a"]]}, "history"),
        ({"text": "t", "tools": [{"name": "f"}]}, "tools"),
        ({"text": "t", "rejected": 3}, "rejected"),
        ({"messages": CHAT, "reasoning_content": "hm"}, "reasoning_content"),
        ({"messages": [{**ASK, "tools": [{"name": "f"}]}, ANSWER]}, "tools"),
    ],
)
def test_unsupported_column_is_an_error_unless_ignored(row: dict[str, Any], name: str) -> None:
    with pytest.raises(Unsupported, match=f"`{name}`") as caught:
        RowConverter("here")(row)
    assert f"`ignore_columns: [{name}]`" in str(caught.value.fix)
    RowConverter("here", ignore_columns=[name])(row)


def test_unused_columns_are_listed_in_one_notice(tmp_path: Path) -> None:
    rows = [
        {"messages": CHAT, "id": 1, "source": None},
        {"messages": CHAT, "id": 2, "source": "web"},
    ]
    notices = [
        text for _, text in prepare(tmp_path / "a.jsonl", rows).notices if "unused columns" in text
    ]
    assert notices == [f"{tmp_path / 'a.jsonl'}: unused columns: `id`, `source`"]


def test_ignore_columns_of_config_and_source_are_combined(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        json.dumps({"messages": CHAT, "images": ["a"], "rejected": "b"})
    )
    source = {"path": str(tmp_path / "a.jsonl"), "ignore_columns": ["images"]}
    config = Config(
        model="builtin:qwen2-micro", dataset=source, ignore_columns=["rejected", "nothing"]
    )
    tokens = prepare_tokens(config, "sft", resolve_model)
    assert tokens.counts.kept == 1
    messages = [text.partition(": ")[2] for _, text in tokens.notices]
    assert "ignored by `ignore_columns`: `rejected`, `images`" in messages
    assert "no row has the columns `nothing` of `ignore_columns`" in messages
    other_config = Config(model="builtin:qwen2-micro", dataset=source, ignore_columns=["rejected"])
    assert prepare_tokens(other_config, "sft", resolve_model).train_folder != tokens.train_folder
    with raises_error(ConfigError, code="conflicting-settings", naming="ignore_columns"):
        RowConverter("here", columns={"text": "x"}, ignore_columns=["x"])


def test_mapped_column_that_no_row_has_is_reported(tmp_path: Path) -> None:
    """But a key of messages is no column."""
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b", "hint": "c"}))
    columns = {"prompt": "question", "system": "hint", "role": "speaker", "tools": ""}
    source = {"path": str(tmp_path / "a.jsonl"), "columns": columns}
    tokens = prepare_tokens(
        Config(model="builtin:qwen2-micro", dataset=source), "sft", resolve_model
    )
    warnings = [text.partition(": ")[2] for kind, text in tokens.notices if kind == "warning"]
    assert warnings == ["no row has the columns `question` of `columns`"]


def test_null_columns_of_arrow_are_ignored(tmp_path: Path) -> None:
    rows = [
        {
            "messages": [{**ASK, "weight": None}, {**ANSWER, "weight": 1}],
            "prompt": None,
            "completion": None,
            "rejected": None,
        },
        {"messages": None, "prompt": "q", "completion": "a", "rejected": None},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    tokens = prepare_tokens(
        Config(model="builtin:qwen2-micro", dataset=str(tmp_path / "a.parquet")),
        "sft",
        resolve_model,
    )
    assert (tokens.counts.kept, tokens.counts.excluded_turns) == (2, 0)


def test_pairs_with_equal_answers_are_reported(tmp_path: Path) -> None:
    rows = [
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"prompt": "q", "chosen": "a", "rejected": "a"},
        {"prompt": [ASK], "chosen": [ANSWER], "rejected": [ANSWER]},
        # They differ after `max_length`.
        {"prompt": "q", "chosen": "word " * 40 + "a", "rejected": "word " * 40 + "b"},
    ]

    def notices_of(name: str, rows: list[Any]) -> list[str]:
        tokens = prepare(tmp_path / name, rows, "pairs", train_args={"max_length": 16})
        assert tokens.num_train == len(rows)
        return [text for _, text in tokens.notices if "with the same tokens" in text]

    (text,) = notices_of("rows.jsonl", rows)
    assert text.startswith("3 pairs of answers with the same tokens (first: ")
    assert "line 2" in text
    (text,) = notices_of("two.jsonl", rows[:2])
    assert text.startswith("1 pair of answers")
    assert notices_of("one.jsonl", rows[:1]) == []
