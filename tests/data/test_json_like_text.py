"""Texts that look like JSON, null or a list stay texts; only messages are read from JSON text."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from prepared_tokens import MODEL, loss_segments, save

from paceline.config.schema import Config
from paceline.data.encoding.prepare import prepare_tokens
from paceline.data.kinds.label import LabelConverter
from paceline.data.text.formats import RowConverter
from paceline.data.text.preferences import AnswerConverter, PairConverter
from paceline.data.text.sample import ChatSample
from paceline.models.builtin import resolve_model

TEXTS = (
    "[3, 1]", "[]", "{}", "null", "None", "true", "[null]", '["a", "b"]', '{"a": 1}',
    '[{"name": "Ann", "age": 3}]', '[{"question": "q", "answer": "a"}]', '[["q", "a"]]',
    '[{"from": "here", "to": "there"}]', "[not JSON", "[1] see there",
)  # fmt: skip
CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def turns(sample: ChatSample | None) -> list[str]:
    assert sample is not None
    if sample.pair is not None:
        return list(sample.pair)
    return [str(message["content"]) for message in sample.messages or []]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(
    "names",
    [("prompt", "completion"), ("question", "answer"), ("instruction", "output"), ("x", "y")],
)
def test_prompt_and_answer_stay_texts(names: tuple[str, str], text: str) -> None:
    columns = {"prompt": "x", "completion": "y"} if names == ("x", "y") else {}
    for prompt, answer in ((text, text), ("q", text), (text, "a")):
        row = {names[0]: prompt, names[1]: answer}
        assert turns(RowConverter("data", columns=columns)(row)) == [prompt, answer]
        marked = AnswerConverter("data", columns=columns)({**row, "label": True})
        assert turns(marked) == [prompt, answer]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(
    "names",
    [
        ("prompt", "chosen", "rejected"),
        ("instruction", "chosen", "rejected"),
        ("input", "chosen_response", "rejected_response"),
        ("query", "response", "rejected_response"),
    ],
)
def test_answers_of_a_pair_stay_texts(names: tuple[str, str, str], text: str) -> None:
    for values in (("q", text, "b"), ("q", "a", text), (text, "a", "b"), (text, text, f"{text} ")):
        sample = PairConverter("data")(dict(zip(names, values, strict=True)))
        assert turns(sample) == [values[0], values[1]]
        assert turns(sample.rejected) == [values[0], values[2]]


@pytest.mark.parametrize("text", TEXTS)
def test_other_texts_stay_texts(text: str) -> None:
    assert RowConverter("data")({"text": text}).text == text
    assert RowConverter("data", pretrain=True)({"text": text}).text == text
    assert LabelConverter("data")({"text": text, "label": 1}).texts == (text,)
    assert LabelConverter("data")({"text": text, "label": text}).labels == (text,)
    chat = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
    assert turns(RowConverter("data")({"messages": chat})) == [text, text]
    row = {"prompt": "q", "completion": "a", "system": text, "history": [[text, text]]}
    assert turns(RowConverter("data")(row)) == [text, text, text, "q", "a"]
    reasons = RowConverter("data")({"prompt": "q", "completion": "a", "reasoning_content": text})
    assert (reasons.messages or [])[-1]["reasoning_content"] == text
    # A column of chats with another text is not a chat.
    transcript = {"dialogue": text, "summary": "s"}
    columns = {"prompt": "dialogue", "completion": "summary"}
    assert turns(RowConverter("data", columns=columns)(transcript)) == [text, "s"]


def test_messages_are_read_from_text() -> None:
    """As in a CSV file, with the keys of the source."""
    shared = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    renamed = [{"who": "user", "line": "q"}, {"who": "assistant", "line": "a"}]
    chats: list[tuple[list[dict[str, str]], dict[str, str]]] = [
        (CHAT, {}), (shared, {}), (renamed, {"role": "who", "content": "line"}),
    ]  # fmt: skip
    for chat, columns in chats:
        parts = [json.dumps(part) for part in (chat[:1], chat[1:])]
        row: dict[str, Any] = {"prompt": parts[0], "completion": parts[1]}
        assert turns(RowConverter("data", columns=columns)(row)) == ["q", "a"]
        row = {"prompt": parts[0], "chosen": parts[1], "rejected": parts[1].replace('"a"', '"b"')}
        sample = PairConverter("data", columns=columns)(row)
        assert (turns(sample), turns(sample.rejected)) == (["q", "a"], ["q", "b"])
        row = {"conversations": json.dumps(chat)}
        assert turns(RowConverter("data", columns=columns)(row)) == ["q", "a"]


def test_json_as_text_in_files(tmp_path: Path) -> None:
    rows = [
        {"prompt": "Sort [3, 1].", "completion": "[1, 3]"},
        {"prompt": "[]", "completion": "null"},
    ]
    with open(tmp_path / "a.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["prompt", "completion"])
        writer.writeheader()
        writer.writerows(rows)
    for path in (str(tmp_path / "a.csv"), save(tmp_path / "a.jsonl", rows)):
        tokens = prepare_tokens(Config(model=MODEL, dataset=path), "sft", resolve_model)
        assert tokens.counts.dropped == {}
        texts = ["".join(text for _, text in loss_segments(tokens, index)) for index in range(2)]
        for row, text in zip(rows, texts, strict=True):
            assert all(value in text for value in row.values())
