"""Conversion of rows to samples, and every reason for dropping a row."""

import json
from pathlib import Path
from typing import Any

import pytest
from prepared_tokens import prepare, save

from paceline.config.schema.data import DatasetSource
from paceline.core.errors import ConfigError
from paceline.data.sources.hub import HUB_NAMES, find_hub_name
from paceline.data.sources.resolve import open_source
from paceline.data.sources.rows import MalformedRow, Row, Unsupported
from paceline.data.text.formats import RowConverter
from paceline.data.text.sample import ChatSample


def convert(row: Any, **settings: Any) -> ChatSample:
    return RowConverter("here", **settings)(row)


def turns(sample: ChatSample) -> list[tuple[str, str]]:
    assert sample.messages is not None
    return [(message["role"], message["content"]) for message in sample.messages]


CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def test_alpaca_format() -> None:
    assert turns(convert({"instruction": "do", "input": "", "output": "done"})) == [
        ("user", "do"),
        ("assistant", "done"),
    ]
    with_input = convert({"instruction": "do", "input": "this", "output": "done"})
    assert turns(with_input) == [("user", "do\nthis"), ("assistant", "done")]
    dolly = convert({"instruction": "do", "context": "this", "response": "done", "category": "x"})
    assert turns(dolly) == turns(with_input)
    full = convert({"instruction": "do", "output": "done", "system": "be", "history": [["q", "a"]]})
    assert turns(full) == [
        ("system", "be"),
        ("user", "q"),
        ("assistant", "a"),
        ("user", "do"),
        ("assistant", "done"),
    ]


def test_messages_and_sharegpt_formats() -> None:
    assert turns(convert({"messages": CHAT})) == [("user", "q"), ("assistant", "a")]
    share = {
        "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}],
        "system": "be",
    }
    assert turns(convert(share)) == [("system", "be"), ("user", "q"), ("assistant", "a")]
    assert turns(convert({"conversations": CHAT})) == [("user", "q"), ("assistant", "a")]
    # as in a CSV file
    as_text = {
        "messages": '[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]'
    }
    assert turns(convert(as_text)) == [("user", "q"), ("assistant", "a")]
    parts = [{"role": "user", "content": [{"type": "text", "text": "q"}]}, CHAT[1]]
    assert turns(convert({"messages": parts})) == [("user", "q"), ("assistant", "a")]


def test_trailing_turns_without_answer_are_removed_and_counted() -> None:
    sample = convert({"messages": [*CHAT, {"role": "user", "content": "and?"}]})
    assert turns(sample) == [("user", "q"), ("assistant", "a")]
    assert sample.trailing_turns == 1


@pytest.mark.parametrize(
    "names",
    [
        ("prompt", "completion"),
        ("question", "answer"),
        ("query", "response"),
        ("prompt", "response"),
        ("input", "output"),
    ],
)
def test_prompt_completion_column_names(names: tuple[str, str]) -> None:
    assert convert({names[0]: "q", names[1]: "a"}).pair == ("q", "a")


def test_prompt_completion_as_messages_or_with_system_prompt() -> None:
    assert turns(convert({"prompt": CHAT[:1], "completion": CHAT[1:]})) == [
        ("user", "q"),
        ("assistant", "a"),
    ]
    orca = {"system_prompt": "be", "question": "q", "response": "a"}
    assert turns(convert(orca)) == [("system", "be"), ("user", "q"), ("assistant", "a")]


def test_numbers_become_text_and_nan_becomes_empty() -> None:
    assert convert({"question": "6 × 7?", "answer": 42}).pair == ("6 × 7?", "42")
    assert turns(convert({"instruction": "do", "input": float("nan"), "output": "done"}))[0] == (
        "user",
        "do",
    )


def test_text_column_has_lowest_priority_except_in_pretraining() -> None:
    assert convert({"text": "once"}).text == "once"
    both = {"instruction": "do", "output": "done", "text": "all of it"}
    assert convert(both).messages is not None
    assert convert(both, pretrain=True).text == "all of it"


def test_columns_setting_renames_columns() -> None:
    assert convert(
        {"frage": "q", "antwort": "a"}, columns={"prompt": "frage", "completion": "antwort"}
    ).pair == ("q", "a")
    rows = {"talk": [{"who": "human", "line": "q"}, {"who": "bot", "line": "a"}]}
    sample = convert(
        rows, columns={"messages": "talk", "role": "who", "content": "line"}, format="messages"
    )
    assert turns(sample) == [("user", "q"), ("assistant", "a")]
    with pytest.raises(ConfigError, match="did you mean `prompt`"):
        RowConverter("here", columns={"promt": "x"})


def test_loss_weights_are_read_from_the_column_that_is_named() -> None:
    converter = RowConverter("here", columns={"loss_weight": "w"})
    row = {"prompt": "q", "completion": "a", "w": "0.5"}
    assert converter(row).weight == 0.5
    assert converter({**row, "w": 0}).weight == 0.0
    assert not converter.tally.unused
    for value in (None, -1, "much", float("inf"), True):
        with pytest.raises(MalformedRow, match="the loss weight is not a number"):
            converter({**row, "w": value})
    converter = RowConverter("here")
    assert converter({**row, "loss_weight": 2}).weight is None
    assert converter.tally.unused == {"w": 1, "loss_weight": 1}


@pytest.mark.parametrize("name", ["alpaca", "messages", "prompt_completion", "text"])
def test_configured_format_must_match_columns(name: str) -> None:
    matching_rows = {
        "alpaca": {"instruction": "do", "output": "done"}, "messages": {"messages": CHAT},
        "prompt_completion": {"prompt": "q", "completion": "a"}, "text": {"text": "t"},
    }  # fmt: skip
    for kind, row in matching_rows.items():
        converter = RowConverter("rows", format=name)
        if kind == name:
            converter(row)
        else:
            with pytest.raises(MalformedRow, match=f"columns do not match `{name}`"):
                converter(row)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("just a string", "not an object with columns"),
        (None, "not an object with columns"),
        ({"foo": "x", "bar": "y"}, "columns match no format"),
        ({"instruction": "do", "output": ""}, "empty answer"),
        ({"instruction": "do", "output": None}, "empty answer"),
        ({"instruction": "", "output": "done"}, "empty prompt"),
        ({"instruction": "do", "output": ["done"]}, "answer is not text"),
        ({"prompt": "", "completion": "a"}, "empty prompt"),
        ({"prompt": "q", "completion": "  "}, "empty answer"),
        ({"prompt": {"a": 1}, "completion": "a"}, "prompt is not text"),
        ({"text": "\n"}, "empty text"),
        ({"messages": []}, "no messages"),
        ({"messages": None}, "no messages"),
        ({"messages": "hi"}, "messages are not a list"),
        ({"messages": ["hi"]}, "a message is not an object"),
        ({"messages": CHAT[:1]}, "no assistant turn"),
        ({"messages": [CHAT[0], {"role": "assistant", "content": ""}]}, "empty answer"),
        ({"messages": [CHAT[0], {"role": "assistant", "content": None}]}, "empty answer"),
        ({"messages": [{"role": "user", "content": ""}, CHAT[1]]}, "empty prompt"),
        ({"messages": [{"role": "wizard", "content": "q"}, CHAT[1]]}, "unknown role"),
        ({"messages": [{"content": "q"}, CHAT[1]]}, "unknown role"),
        (
            {"messages": [CHAT[0], {"role": "assistant", "content": {"a": 1}}]},
            "a message is not text",
        ),
        (
            {"messages": [{"role": "user", "content": {"text": "q"}}, CHAT[1]]},
            "a message is not text",
        ),
        (
            {"messages": [CHAT[0], {"role": "assistant", "content": "", "tool_calls": [{}]}]},
            "empty answer",
        ),
        (
            {"messages": [CHAT[0], {"role": "function_call", "content": "call f"}]},
            "a tool call that is not valid JSON",
        ),
        (
            {"query": "q", "response": "a", "history": "earlier"},
            r"history is not a list of \(question, answer\)",
        ),
    ],
)
def test_malformed_row_reports_reason(row: Any, reason: str) -> None:
    with pytest.raises(MalformedRow, match=f"^{reason}$"):
        convert(row)


def test_unused_columns_are_counted() -> None:
    converter = RowConverter("here")
    converter({"messages": [*CHAT[:1], {**CHAT[1], "id": 7}], "source": "web", "note": None})
    converter({"messages": CHAT, "source": "", "note": None})
    assert converter.tally.unused == {"source": 1, "id (of messages)": 1}
    converter = RowConverter("here")
    converter(
        {"instruction": "do", "output": "done", "response": "other", "context": "c", "input": ""}
    )
    # The converter uses the first non-empty answer and the context.
    assert converter.tally.unused == {"response": 1}


def test_hub_dataset_aliases() -> None:
    assert {
        find_hub_name(name) for name in ("alpaca-en", "ALPACA_EN", "alpaca en", "alpacaEn")
    } == {HUB_NAMES["alpaca-en"]}
    assert HUB_NAMES["alpaca-en"].repo == "tatsu-lab/alpaca"
    assert find_hub_name("alpaca-klingon") is None
    normalized = [name.replace("-", "").replace("_", "").lower() for name in HUB_NAMES]
    assert len(normalized) == len(set(normalized))


def test_renamed_column_is_not_counted_as_unused() -> None:
    converter = RowConverter(
        "here", format="alpaca", columns={"instruction": "question", "output": "answer"}
    )
    converter({"question": "q", "answer": "a", "other": "x"})
    assert set(converter.tally.unused) == {"other"}


def test_columns_setting_assigns_or_disables_column() -> None:
    row = {"input": "question", "target": "answer"}
    sample = convert(row, columns={"instruction": "input", "output": "target"}, format="alpaca")
    assert turns(sample) == [("user", "question"), ("assistant", "answer")]
    row = {"instruction": "question", "input": "unused", "output": "answer"}
    assert turns(convert(row, columns={"input": ""}, format="alpaca")) == [
        ("user", "question"),
        ("assistant", "answer"),
    ]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_rows_that_are_lists_of_messages(tmp_path: Path, name: str) -> None:
    shared = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    for chat in (CHAT, shared):
        assert turns(convert(chat)) == [("user", "q"), ("assistant", "a")]
    lines = [json.dumps(chat) for chat in (CHAT, shared)]
    text = "\n".join(lines) if name == "a.jsonl" else f"[{', '.join(lines)}]"
    (tmp_path / name).write_text(text)
    source = open_source(DatasetSource(path=str(tmp_path / name)))
    assert [len(turns(convert(row))) for _, row in source.rows(0)] == [2, 2]
    with pytest.raises(MalformedRow, match="not an object with columns"):
        convert(["a", "b"])


@pytest.mark.parametrize("row", [*CHAT, {"from": "human", "value": "q", "id": 1}])
def test_rows_that_are_single_messages_are_refused(row: Row) -> None:
    with pytest.raises(Unsupported, match="a single message and not a chat") as caught:
        convert(row)
    assert "write each chat as a row" in str(caught.value.fix)
    assert convert({**row, "text": "t", "role": "Hamlet", "from": "x"}).text is not None
    assert convert({"text": "t", **row, "content": "c"}, pretrain=True).text == "t"


def test_names_that_differ_in_case_are_suggested(tmp_path: Path) -> None:
    for columns, mapping in (
        (["Prompt", "Completion"], "{prompt: Prompt, completion: Completion}"),
        (["Question ", "ANSWER"], "{question: Question , answer: ANSWER}"),
        (["System Prompt", "Messages"], "{system_prompt: System Prompt, messages: Messages}"),
        (["Text"], "{text: Text}"),
        (["Text", "number"], "{prompt: YOURS, completion: YOURS}"),
    ):
        path = save(tmp_path / "a.jsonl", [dict.fromkeys(columns, "x")])
        with pytest.raises(ConfigError) as caught:
            prepare(path)
        assert f"columns: {mapping}" in str(caught.value)
