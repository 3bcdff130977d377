"""Labels, numbers and truth values in the forms that JSON and CSV files give them, and pairs whose
prompts differ."""

import json
from pathlib import Path
from typing import Any

import pytest
from prepared_tokens import MODEL, PAIRS, notice_text, save

from paceline.config.schema import Config
from paceline.data.encoding.prepare import prepare_tokens
from paceline.data.kinds.base import Encoded
from paceline.data.kinds.label import LabelConverter, LabeledText, LabelKind
from paceline.data.sources.rows import MalformedRow, Unsupported
from paceline.data.text.formats import RowConverter
from paceline.data.text.preferences import AnswerConverter, MarginConverter, PairConverter
from paceline.data.text.sample import ChatSample
from paceline.models.builtin import resolve_model
from paceline.tasks import load_task


def turns(sample: ChatSample | None) -> list[str]:
    assert sample is not None
    if sample.pair is not None:
        return list(sample.pair)
    return [str(message["content"]) for message in sample.messages or []]


# -- marks and margins
@pytest.mark.parametrize("name", ["label", "kto_tag", "kto_label", "x"])
@pytest.mark.parametrize(
    ("value", "mark"),
    [
        (True, True), (1, True), (1.0, True), ("1.0", True), ("1", True), ("True", True),
        (False, False), (0, False), (0.0, False), ("0.0", False), ("undesirable", False),
    ],
)  # fmt: skip
def test_marks_of_answers(name: str, value: Any, mark: bool) -> None:
    columns = {"label": "x"} if name == "x" else {}
    row = {"prompt": "q", "completion": "a", name: value}
    assert AnswerConverter("data", columns=columns)(row).is_desirable is mark


@pytest.mark.parametrize("value", [2, -1, 0.5, "0.5", "maybe", float("nan"), None, "10"])
def test_other_marks_are_dropped(value: Any) -> None:
    with pytest.raises(MalformedRow, match=r"neither true nor false|`label` is empty"):
        AnswerConverter("data")({"prompt": "q", "completion": "a", "label": value})


@pytest.mark.parametrize("value", [True, 0, 1.0, "0.0", "desirable"])
def test_marked_answers_are_no_pairs(value: Any) -> None:
    with pytest.raises(Unsupported, match="single answers"):
        PairConverter("data")({"prompt": "q", "completion": "a", "label": value})


@pytest.mark.parametrize("value", [0.5, "0.5", " 0.5 "])
def test_margins(value: Any) -> None:
    row = {"prompt": "q", "chosen": "a", "rejected": "b", "margin": value}
    assert MarginConverter("data")(row).margin == 0.5
    for bad in (True, "large", float("inf"), "nan", [1]):
        with pytest.raises(MalformedRow, match="`margin` is not a number"):
            MarginConverter("data")({**row, "margin": bad})


@pytest.mark.parametrize("values", [(0, 1), (0.0, 1.0), ("0", "1"), ("0.0", "1.0")])
def test_fine_tuning_on_marked_answers_is_reported(values: tuple[Any, Any], tmp_path: Path) -> None:
    rows = [{**row, "label": values[number % 2]} for number, row in enumerate(PAIRS)]
    for extra, is_reported in ((values[0], True), (2, False), ("2", False)):
        data = save(tmp_path / "a.jsonl", [*rows, {**PAIRS[0], "label": extra}])
        tokens = prepare_tokens(Config(model=MODEL, dataset=data), "sft", resolve_model)
        assert ("has only the values 0 and 1" in notice_text(tokens)) is is_reported


# -- classes
def classify(path: Path, labels: list[Any], **settings: Any) -> Any:
    rows = [{"text": f"text {number}", "label": label} for number, label in enumerate(labels)]
    keys = {"model": MODEL, "task": "classify", "dataset": save(path, rows), **settings}
    task = load_task(Config.model_validate(keys))
    task.check()
    task.prepared = task.prepare()
    return task


def targets(task: Any) -> list[int]:
    dataset, _ = task.build_datasets()
    return [dataset[index]["classes"].tolist()[0] for index in range(len(dataset))]


@pytest.mark.parametrize("labels", [[-1, 1, 1, -1], [-1.0, 1.0, 1.0, -1.0], ["-1", "1", "1", "-1"]])
def test_classes_minus_one_and_one(labels: list[Any], tmp_path: Path) -> None:
    task = classify(tmp_path / "a.jsonl", labels)
    assert task.prepared.counts.dropped == {}
    assert task.prepared.handle.classes == ["-1", "1"]
    assert targets(task) == [0, 1, 1, 0]


def test_classes_minus_one_and_one_are_tokenized_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[int] = []
    encode = LabelKind.encode

    def count(self: LabelKind, samples: list[LabeledText]) -> list[Encoded | str]:
        encoded.append(len(samples))
        return encode(self, samples)

    monkeypatch.setattr(LabelKind, "encode", count)
    for labels in ([-1, 1] * 40, [1] * 40 + [-1] * 40, [0, 1, 2, 1]):
        classify(tmp_path / "a.jsonl", labels)
        assert sum(encoded) == len(labels)
        encoded.clear()


def test_minus_one_as_text_stands_for_a_missing_label_too(tmp_path: Path) -> None:
    task = classify(tmp_path / "a.jsonl", ["0", "-1", "1", "2"])
    assert list(task.prepared.counts.dropped.values()) == [1]
    assert task.prepared.handle.classes == ["0", "1", "2"]


def test_negative_labels_among_other_classes(tmp_path: Path) -> None:
    """They stand for missing labels, unless the config lists them."""
    task = classify(tmp_path / "a.jsonl", [0, -1, 1, 2])
    assert list(task.prepared.counts.dropped.values()) == [1]
    assert "`classify.labels` makes it a class" in next(iter(task.prepared.counts.dropped))
    assert task.prepared.handle.classes == ["0", "1", "2"]
    task = classify(tmp_path / "a.jsonl", [0, -1, 1], classify={"labels": ["-1", "0", "1"]})
    assert (task.prepared.counts.dropped, targets(task)) == ({}, [1, 0, 2])
    # The first label that is not -1 or 1 comes last.
    task = classify(tmp_path / "a.jsonl", [1, -1] * 20 + [3])
    assert list(task.prepared.counts.dropped.values()) == [20]
    assert set(targets(task)) == {1, 3}
    task = classify(tmp_path / "a.jsonl", [-2, 1, 0, 1])
    assert targets(task) == [1, 0, 1]
    with pytest.raises(MalformedRow, match="negative label"):
        LabelConverter("data")({"text": "a", "labels": [1, -1]})


# -- numbers and truth values as texts
@pytest.mark.parametrize(
    ("value", "text"), [(True, "true"), (False, "false"), (42, "42"), (0, "0"), (3.5, "3.5")]
)
def test_numbers_and_truth_values_are_texts(value: Any, text: str) -> None:
    for names in (("prompt", "completion"), ("instruction", "output"), ("question", "answer")):
        for prompt, answer in ((value, value), ("q", value), (value, "a")):
            row = {names[0]: prompt, names[1]: answer}
            expected = [text if prompt is value else "q", text if answer is value else "a"]
            assert turns(RowConverter("data")(row)) == expected
            assert turns(AnswerConverter("data")({**row, "label": True})) == expected
    chat = [{"role": "user", "content": value}, {"role": "assistant", "content": value}]
    assert turns(RowConverter("data")({"messages": chat})) == [text, text]
    shared = [{"from": "human", "value": value}, {"from": "gpt", "value": value}]
    assert turns(RowConverter("data")({"conversations": shared})) == [text, text]
    exchange = [{"human": value, "assistant": value}]
    assert turns(RowConverter("data")({"conversation": exchange})) == [text, text]
    row = {"prompt": "q", "completion": "a", "history": [[value, value]], "system": value}
    assert turns(RowConverter("data")(row)) == [text, text, text, "q", "a"]
    assert RowConverter("data")({"text": value}).text == text
    assert LabelConverter("data")({"text": value, "label": 1}).texts == (text,)


@pytest.mark.parametrize(("value", "text"), [(True, "true"), (42, "42"), (3.5, "3.5")])
def test_numbers_and_truth_values_in_pairs(value: Any, text: str) -> None:
    for row in (
        {"prompt": value, "chosen": value, "rejected": "bad"},
        {"instruction": value, "chosen": value, "rejected": "bad"},
        {"question": value, "response": value, "rejected_response": "bad"},
        {"prompt": [{"role": "user", "content": value}], "chosen": value, "rejected": "bad"},
        {"prompt": value, "chosen": [{"role": "assistant", "content": value}],
         "rejected": [{"role": "assistant", "content": "bad"}]},
    ):  # fmt: skip
        sample = PairConverter("data")(row)
        assert (turns(sample), turns(sample.rejected)) == ([text, text], [text, "bad"])


# -- pairs with different prompts
def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


QUESTION, OTHER = turn("user", "q"), turn("user", "other")
GOOD, BAD = turn("assistant", "good"), turn("assistant", "bad")


@pytest.mark.parametrize(
    ("chosen", "rejected"),
    [
        ([QUESTION, GOOD], [OTHER, BAD]),
        ([turn("system", "be"), QUESTION, GOOD], [turn("system", "do"), QUESTION, BAD]),
        ([turn("system", "be"), QUESTION, GOOD], [QUESTION, BAD]),
        ([QUESTION, GOOD, QUESTION, GOOD], [QUESTION, GOOD, OTHER, BAD]),
    ],
)
def test_pairs_with_different_prompts(chosen: Any, rejected: Any, tmp_path: Path) -> None:
    reason = "chosen and rejected have different prompts"
    for row in (
        {"chosen": chosen, "rejected": rejected},
        {"messages": chosen, "rejected_messages": rejected},
        {"chosen": json.dumps(chosen), "rejected": json.dumps(rejected)},
    ):
        with pytest.raises(MalformedRow, match=reason):
            PairConverter("data")(row)
    good = {"chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]}
    data = save(tmp_path / "a.jsonl", [good, {"chosen": chosen, "rejected": rejected}])
    for name in ("dpo", "reward"):
        task = load_task(Config(model=MODEL, dataset=data, task=name))
        prepared = task.prepare()
        assert prepared.counts.dropped == {reason: 1}
        assert f"first: line 2 of {data}" in "\n".join(text for _, text in prepared.notices)


def test_answers_of_several_turns_may_differ() -> None:
    follow = [QUESTION, GOOD, OTHER, GOOD]
    sample = PairConverter("data")({"chosen": follow, "rejected": [QUESTION, BAD, QUESTION, BAD]})
    assert turns(sample) == ["q", "good", "other", "good"]


# -- texts of classes
CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": 7}]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": CHAT},
        {"messages": json.dumps(CHAT)},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "7"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, CHAT[1]]},
        {"text": None, "messages": CHAT},
        {"text": "", "sentence": "q\n7"},
        {"text": "q\n7", "messages": None},
    ],
)
def test_labeled_chats_and_texts(row: dict[str, Any]) -> None:
    sample = LabelConverter("data")({**row, "label": 1})
    assert (sample.texts, sample.labels) == (("q\n7",), (1,))


@pytest.mark.parametrize(
    "names",
    [("prompt", "response"), ("question", "answer"), ("question", "passage"),
     ("instruction", "output"), ("prompt", "completion"), ("query", "document")],
)  # fmt: skip
def test_labeled_pairs_of_prompts_and_answers(names: tuple[str, str]) -> None:
    converter = LabelConverter("data")
    assert converter({names[0]: "q", names[1]: 7, "label": "x"}).texts == ("q", "7")
    assert not converter.tally.unused
    with pytest.raises(MalformedRow, match="empty text_pair"):
        converter({names[0]: "q", names[1]: None, "label": "x"})
    assert converter({names[0]: None, names[1]: None, "text": "t", "label": "x"}).texts == ("t",)


def test_label_is_the_first_column_that_is_not_empty() -> None:
    assert LabelConverter("data")({"text": "a", "label": None, "category": "x"}).labels == ("x",)
    with pytest.raises(MalformedRow, match="no label"):
        LabelConverter("data")({"text": "a", "label": None})


@pytest.mark.parametrize("labels", [[0, 0, 1], [1.0, 0.0, 1.0], [False, True, True, False]])
def test_a_zero_or_one_for_each_class_is_refused(labels: list[Any]) -> None:
    with pytest.raises(Unsupported, match="a 0 or 1 for each class"):
        LabelConverter("data")({"text": "a", "labels": labels})
    assert LabelConverter("data")({"text": "a", "labels": [0, 1]}).labels == (0, 1)
    assert LabelConverter("data")({"text": "a", "labels": []}).labels == ()
