"""The prompts of pairs of answers: which columns are one, and what two chats have in common."""

import json
from pathlib import Path
from typing import Any

import pytest
from prepared_tokens import MODEL, loss_segments, save
from raised import raises_error

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.data.encoding.prepare import prepare_tokens
from paceline.data.sources.rows import MalformedRow
from paceline.data.text.formats import RowConverter
from paceline.data.text.preferences import AnswerConverter, MarginConverter, PairConverter
from paceline.data.text.sample import ChatSample
from paceline.models.builtin import resolve_model


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


SYSTEM, QUESTION = turn("system", "be"), turn("user", "q")
GOOD, BAD = turn("assistant", "good"), turn("assistant", "bad")
FIRST, NEXT = turn("assistant", "a"), turn("user", "r")


def turns(sample: ChatSample | None) -> list[str]:
    assert sample is not None
    if sample.pair is not None:
        return list(sample.pair)
    return [str(message["content"]) for message in sample.messages or []]


def shared_gpt(chat: list[dict[str, str]]) -> list[dict[str, str]]:
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    return [{"from": names[item["role"]], "value": item["content"]} for item in chat]


FULL = {"chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]}
TEXTS = {"chosen": "good", "rejected": "bad"}
SINGLE = {"chosen": [GOOD], "rejected": [BAD]}


@pytest.mark.parametrize("column", ["messages", "conversations", "conversation", "prompt", "chat"])
@pytest.mark.parametrize("answers", [FULL, TEXTS, SINGLE, {"chosen": GOOD, "rejected": BAD}])
@pytest.mark.parametrize("answer", [GOOD, BAD])
@pytest.mark.parametrize("kind", [PairConverter, MarginConverter])
def test_chat_that_ends_with_an_answer_is_not_the_prompt(
    column: str, answers: dict[str, Any], answer: dict[str, str], kind: type[PairConverter]
) -> None:
    row = {column: [QUESTION, answer], **answers}
    for variant in (row, {**row, column: json.dumps(row[column])}):
        sample = kind("data")(variant)
        assert turns(sample) == ["q", "good"]
        assert turns(sample.rejected) == ["q", "bad"]


def test_layout_of_ultrafeedback() -> None:
    converter = PairConverter("data")
    sample = converter({"prompt": "q", "messages": [QUESTION, GOOD], **FULL, "score_chosen": 8.0})
    assert turns(sample) == ["q", "good"]
    assert turns(sample.rejected) == ["q", "bad"]
    assert {"messages", "score_chosen"} <= set(converter.tally.unused)
    sample = PairConverter("data")({"prompt": "q", "messages": [QUESTION, GOOD], **TEXTS})
    assert sample.pair is not None  # texts need no chat template
    assert (turns(sample), turns(sample.rejected)) == (["q", "good"], ["q", "bad"])


def test_layout_of_sharegpt_with_other_keys() -> None:
    chats = {name: shared_gpt(chat) for name, chat in FULL.items()}
    sample = PairConverter("data")({"conversations": shared_gpt([QUESTION, GOOD]), **chats})
    assert (turns(sample), turns(sample.rejected)) == (["q", "good"], ["q", "bad"])
    # The chat has other keys than the answers.
    sample = PairConverter("data")({"conversations": shared_gpt([QUESTION]), **FULL})
    assert turns(sample) == ["q", "good"]
    renamed = [{"who": item["role"], "line": item["content"]} for item in (QUESTION, GOOD)]
    columns = {"role": "who", "content": "line"}
    assert turns(PairConverter("data", columns=columns)({"messages": renamed, **TEXTS})) == [
        "q",
        "good",
    ]


@pytest.mark.parametrize(
    ("row", "columns", "expected"),
    [
        # A column that is named comes before one that is found.
        ({"messages": [turn("user", "other")], "x": "q", **TEXTS}, {"prompt": "x"}, ["q"]),
        ({"messages": [turn("user", "other")], "x": [QUESTION], **TEXTS}, {"prompt": "x"}, ["q"]),
        ({"messages": [turn("user", "other")], "x": [QUESTION], **SINGLE},
         {"messages": "x"}, ["q"]),
        ({"messages": [QUESTION, GOOD], "prompt": "other", "x": "q", **TEXTS},
         {"question": "x"}, ["q"]),
        ({"messages": [QUESTION, GOOD], "y": [QUESTION, GOOD], "z": [QUESTION, BAD]},
         {"chosen": "y", "rejected": "z"}, ["q"]),
        # A prompt that ends with another answer is one if it is named.
        ({"x": [QUESTION, FIRST], **SINGLE}, {"prompt": "x"}, ["q", "a"]),
        ({"x": [QUESTION, FIRST], **SINGLE}, {"messages": "x"}, ["q", "a"]),
        ({"x": [QUESTION, GOOD], **SINGLE}, {"prompt": "x"}, ["q"]),
        ({"x": [QUESTION, GOOD], **FULL}, {"prompt": "x"}, ["q"]),
        # Without a name, it is what precedes its answer.
        ({"messages": [QUESTION, FIRST], **SINGLE}, {}, ["q"]),
        # The chat has turns that the text of the prompt lacks.
        ({"messages": [SYSTEM, QUESTION, FIRST, NEXT, GOOD], "prompt": "q", **SINGLE}, {},
         ["be", "q", "a", "r"]),
        ({"instruction": "q", **SINGLE}, {}, ["q"]),
        ({"instruction": "ignored", **FULL}, {}, ["q"]),
        # An answer may repeat the prompt, with or without the system message.
        ({"prompt": [SYSTEM, QUESTION], **FULL}, {}, ["be", "q"]),
        ({"messages": [QUESTION], "chosen": [SYSTEM, QUESTION, GOOD],
          "rejected": [SYSTEM, QUESTION, BAD]}, {}, ["be", "q"]),
        ({"prompt": [turn("user", "q ")], **FULL}, {}, ["q"]),
        ({"prompt": [turn("user", "other")], **FULL}, {}, ["q"]),
        ({"prompt": [SYSTEM], **FULL}, {}, ["be", "q"]),
        ({"prompt": "q", "chosen": [SYSTEM, QUESTION, GOOD], "rejected": [SYSTEM, QUESTION, BAD]},
         {}, ["be", "q"]),
    ],
)  # fmt: skip
def test_prompt_of_a_pair(
    row: dict[str, Any], columns: dict[str, str], expected: list[str]
) -> None:
    sample = PairConverter("data", columns=columns)(row)
    assert turns(sample) == [*expected, "good"]
    assert turns(sample.rejected) == [*expected, "bad"]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [QUESTION, GOOD], "rejected_messages": [BAD]},
        {"messages": [SYSTEM, QUESTION, GOOD], "rejected_messages": [SYSTEM, QUESTION, BAD]},
        {"prompt": [QUESTION], "response": "good", "rejected_response": "bad"},
        {"prompt": [QUESTION], "completion": [GOOD], "rejected_response": [BAD]},
        {"conversation": [QUESTION, GOOD], "rejected_response": "bad"},
    ],
)
def test_rejected_answer_replaces_the_answer_only(row: dict[str, Any]) -> None:
    sample = PairConverter("data")(row)
    assert turns(sample)[-2:] == ["q", "good"]
    assert turns(sample.rejected)[-2:] == ["q", "bad"]
    assert len(turns(sample)) == len(turns(sample.rejected))


@pytest.mark.parametrize("mark", [True, False])
def test_marked_answer_may_repeat_the_prompt(mark: bool) -> None:
    for row in (
        {"prompt": [QUESTION], "completion": [QUESTION, GOOD]},
        {"prompt": [QUESTION, GOOD], "completion": [GOOD]},
        {"prompt": [QUESTION], "completion": "good"},
        {"prompt": "q", "completion": [GOOD]},
        {"messages": [QUESTION, GOOD], "prompt": "q", "completion": "good"},
    ):
        assert turns(AnswerConverter("data")({**row, "label": mark})) == ["q", "good"]
        assert turns(RowConverter("data")(row)) == ["q", "good"]


@pytest.mark.parametrize("answers", [FULL, TEXTS, SINGLE])
def test_columns_that_are_not_read(answers: dict[str, Any]) -> None:
    row = {"messages": [turn("user", "other")], "prompt": "q", **answers}
    for settings in ({"columns": {"messages": ""}}, {"ignore_columns": ["messages"]}):
        converter = PairConverter("data", **settings)  # type: ignore[arg-type]
        sample = converter(row)
        assert (turns(sample), turns(sample.rejected)) == (["q", "good"], ["q", "bad"])
        assert converter.tally.ignored.keys() == set(settings.get("ignore_columns", ()))
    row = {"prompt": "other", "messages": [QUESTION], **answers}
    sample = PairConverter("data", ignore_columns=["prompt"])(row)
    assert (turns(sample), turns(sample.rejected)) == (["q", "good"], ["q", "bad"])


def test_loss_of_a_pair_with_its_chat(tmp_path: Path) -> None:
    """Only the answers carry loss, once in each sequence."""
    rows = [{"prompt": "q", "messages": [QUESTION, GOOD], **FULL}]
    data = save(tmp_path / "a.jsonl", rows)
    tasks: tuple[tuple[str, str], ...] = (("pairs", "dpo"), ("reward", "reward"))
    for task, name in tasks:
        config = Config(model=MODEL, dataset=data, task=name)
        segments = loss_segments(prepare_tokens(config, task, resolve_model))
        assert [text.rstrip("\n") for carries_loss, text in segments if carries_loss] == [
            "good<|im_end|>",
            "bad<|im_end|>",
        ]


def test_answer_that_is_no_message_is_dropped() -> None:
    for answers in (
        {"chosen": ["a"], "rejected": ["b"]},
        {"chosen": {"a": 1}, "rejected": {"a": 2}},
    ):
        for prompt in ({"prompt": "q"}, {"instruction": "q"}, {"messages": [QUESTION]}):
            with pytest.raises(MalformedRow):
                PairConverter("data")({**prompt, **answers})


MAPPED: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({"messages": [QUESTION]}, {"prompt": "messages"}),
    ({"messages": "q"}, {"prompt": "messages"}),
    ({"conversations": shared_gpt([QUESTION])}, {"prompt": "conversations"}),
    ({"prompt": [QUESTION]}, {"messages": "prompt"}),
    ({"prompt": "q"}, {"question": "prompt"}),
    ({"prompt": "q"}, {"instruction": "prompt"}),
    ({"completion": "q"}, {"prompt": "completion"}),
    ({"completion": "q"}, {"instruction": "completion"}),
    ({"output": "q"}, {"prompt": "output"}),
    ({"input": "q", "messages": [NEXT]}, {"prompt": "input"}),
    ({"text": "q"}, {"prompt": "text"}),
]


@pytest.mark.parametrize(("row", "columns"), MAPPED)
@pytest.mark.parametrize("answers", [TEXTS, SINGLE])
def test_prompts_that_are_mapped_from_names_of_answers(
    row: dict[str, Any], columns: dict[str, str], answers: dict[str, Any]
) -> None:
    converter = PairConverter("data", columns=columns)
    sample = converter({**row, **answers})
    assert (turns(sample), turns(sample.rejected)) == (["q", "good"], ["q", "bad"])
    assert set(converter.tally.unused) <= {"messages"} & set(row)


def test_unused_chat_is_counted_under_its_name_in_the_data() -> None:
    converter = PairConverter("data", columns={"messages": "log"}, ignore_columns=["output"])
    sample = converter({"question": "q", "log": [QUESTION, GOOD], "output": "x", **TEXTS})
    assert turns(sample) == ["q", "good"]
    assert (converter.tally.unused, converter.tally.ignored) == ({"log": 1}, {"output": 1})


def test_columns_that_the_error_for_pairs_suggests(tmp_path: Path) -> None:
    path = save(tmp_path / "a.jsonl", [{"question": "q", "response_j": "a", "response_k": "b"}])
    for task, columns in (
        ("pairs", "{prompt: YOURS, chosen: YOURS, rejected: YOURS}"),
        ("answers", "{prompt: YOURS, completion: YOURS, label: YOURS}"),
        ("classify", "{text: YOURS, label: YOURS}"),
    ):
        with pytest.raises(ConfigError) as caught:
            prepare_tokens(Config(model=MODEL, dataset=path), task, resolve_model)
        assert f"columns: {columns}" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        prepare_tokens(Config(model=MODEL, dataset=path), "sft", resolve_model)
    columns = "{chosen: response_j, rejected: response_k}"
    assert f"set `task: dpo` or `reward` with `columns: {columns}`" in str(caught.value)


@pytest.mark.parametrize("empty", ["", "  ", None, [], float("nan")])
def test_empty_answers_and_marks_are_named(tmp_path: Path, empty: Any) -> None:
    for row, columns, reason in (
        ({"prompt": "q", "chosen": empty, "rejected": "b"}, {}, "`chosen` is empty"),
        ({"prompt": "q", "chosen": "a", "rejected": empty}, {}, "`rejected` is empty"),
        ({"prompt": "q", "good": "a", "bad": empty}, {"chosen": "good", "rejected": "bad"},
         "`bad` is empty"),
        ({"prompt": "q", "chosen_response": empty, "rejected_response": empty}, {},
         "`chosen_response` is empty"),
        ({"prompt": "q", "completion": "a", "rejected_response": empty}, {},
         "`rejected_response` is empty"),
    ):  # fmt: skip
        converter = PairConverter("data", columns=columns)
        with pytest.raises(MalformedRow, match=reason):
            converter(row)
        assert not converter.tally.unmatched
    answers = AnswerConverter("data")
    with pytest.raises(MalformedRow, match="`label` is empty"):
        answers({"prompt": "q", "completion": "a", "label": empty})
    assert not answers.tally.unmatched
    path = save(tmp_path / "a.jsonl", [{"prompt": "q", "chosen": "a", "rejected": empty}])
    with raises_error(ConfigError, code="no-usable-rows"):
        prepare_tokens(Config(model=MODEL, dataset=path), "pairs", resolve_model)
