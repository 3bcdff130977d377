"""Chats that end with a question, with its answer in another column; columns with images."""

import json
from typing import Any

import pytest

from paceline.data.sources.rows import MalformedRow, Unsupported
from paceline.data.text.formats import RowConverter
from paceline.data.text.preferences import AnswerConverter, PairConverter
from paceline.data.text.sample import ChatSample
from paceline.data.vision_language.rows import IMAGE_MARK, ImageRowConverter

QUESTION = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}
EXPECTED = [("user", "q"), ("assistant", "a")]


def turns(sample: ChatSample | None) -> list[tuple[str, str]]:
    assert sample is not None
    assert sample.messages is not None
    return [(message["role"], message["content"]) for message in sample.messages]


@pytest.mark.parametrize("column", ["completion", "response", "output", "answer"])
@pytest.mark.parametrize("answer", ["a", ANSWER, [ANSWER], json.dumps([ANSWER])])
def test_answer_in_another_column(column: str, answer: Any) -> None:
    converter = RowConverter("data")
    assert turns(converter({"messages": [QUESTION], column: answer})) == EXPECTED
    assert not converter.tally.unused
    shared = {"conversations": [{"from": "human", "value": "q"}], column: answer}
    assert turns(RowConverter("data")(shared)) == EXPECTED
    assert turns(RowConverter("data")({"messages": json.dumps([QUESTION]), column: answer})) == (
        EXPECTED
    )
    assert turns(RowConverter("data", "messages")({"messages": [QUESTION], column: answer})) == (
        EXPECTED
    )
    marked = AnswerConverter("data")({"messages": [QUESTION], column: answer, "label": True})
    assert turns(marked) == EXPECTED


def test_chat_of_several_turns_with_its_last_answer_in_another_column() -> None:
    chat = [QUESTION, ANSWER, {"role": "user", "content": "r"}]
    sample = RowConverter("data")({"messages": chat, "response": 7})
    assert turns(sample) == [*EXPECTED, ("user", "r"), ("assistant", "7")]
    assert sample.trailing_turns == 0
    called = [QUESTION, {"role": "tool", "content": "1"}]
    assert turns(RowConverter("data")({"messages": called, "answer": "a"})) == [
        ("user", "q"), ("tool", "1"), ("assistant", "a"),
    ]  # fmt: skip


def test_rejected_answer_beside_the_answer() -> None:
    row = {"messages": [QUESTION], "completion": "a", "rejected_response": "b"}
    sample = PairConverter("data")(row)
    assert turns(sample) == EXPECTED
    assert turns(sample.rejected) == [("user", "q"), ("assistant", "b")]


def test_images_of_a_chat_without_its_answer() -> None:
    row = {"messages": [QUESTION], "completion": "a", "images": ["a.png"]}
    sample = ImageRowConverter(RowConverter("data"))(row)
    assert len(turns(sample)) == 2
    assert sample.images == ("a.png",)


def test_answers_of_complete_chats_are_not_added() -> None:
    converter = RowConverter("data")
    assert turns(converter({"messages": [QUESTION, ANSWER], "answer": "42"})) == EXPECTED
    assert converter.tally.unused["answer"] == 1
    with pytest.raises(MalformedRow, match="no assistant turn"):
        RowConverter("data")({"messages": [QUESTION], "answer": None})
    with pytest.raises(MalformedRow, match="a message is not an object"):
        RowConverter("data")({"messages": [QUESTION], "answer": ["a", "b", "c"]})


IMAGE_PARTS = [{"type": "image"}, {"type": "text", "text": "q"}]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": json.dumps([{"role": "user", "content": IMAGE_PARTS}]), "completion": "a"},
        {"messages": json.dumps([{"role": "user", "content": IMAGE_PARTS}, ANSWER])},
        {"messages": json.dumps([{"role": "user", "content": "<image>q"}]), "answer": "a"},
    ],
)
def test_images_of_chats_in_json_text(row: dict[str, Any]) -> None:
    sample = ImageRowConverter(RowConverter("data"))({**row, "images": ["a.png"]})
    assert turns(sample) == [("user", f"{IMAGE_MARK}q"), ("assistant", "a")]
    assert sample.images == ("a.png",)


def test_list_of_messages_with_images() -> None:
    parts = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "q"}]
    sample = ImageRowConverter(RowConverter("data"))([{"role": "user", "content": parts}, ANSWER])
    assert turns(sample) == [("user", f"{IMAGE_MARK}q"), ("assistant", "a")]


@pytest.mark.parametrize("value", ["pictures/a.PNG", ["a.jpg", "b.jpg"]])
@pytest.mark.parametrize("name", ["image_path", "img", "Photo"])
def test_images_in_columns_of_other_names_are_not_left_out(name: str, value: Any) -> None:
    row = {"prompt": "q", "completion": "a", name: value}
    with pytest.raises(Unsupported, match=f"`{name}` has the path of an image") as caught:
        ImageRowConverter(RowConverter("data"))(row)
    assert f"`columns: {{image: {name}}}`" in str(caught.value.fix)
    mapped = ImageRowConverter(RowConverter("data", columns={"image": name}))(row)
    assert mapped.images[0] == (value if isinstance(value, str) else value[0])
    assert not ImageRowConverter(RowConverter("data", ignore_columns=[name]))(row).images
    assert not ImageRowConverter(RowConverter("data"))({**row, name: "a photo"}).images
