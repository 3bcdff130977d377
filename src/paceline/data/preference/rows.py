"""Convert rows to pairs of answers, or to single answers that are marked as good or bad.

A pair is in the columns `chosen` and `rejected` (or the names of other tools), whose prompt is
explicit (`prompt`, `question`, `instruction`, `input`, `messages` or `conversations`) or implicit
(what both have in common); or the rejected answer is in `rejected_response` or `rejected_messages`,
beside a usual row. A single answer is a usual row with a `label` or `kto_tag`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import isinf
from typing import Any, ClassVar

from paceline.data.sources.rows import MalformedRow, Row, Unsupported, holds_nothing
from paceline.data.text.chat_template import ChatTemplate
from paceline.data.text.columns import check_columns
from paceline.data.text.formats import FORMATS, LOSS_WEIGHT, RowConverter
from paceline.data.text.messages import unpack_list
from paceline.data.text.sample import Sample

_PROMPT_CHATS = ("messages", "conversations", "prompt")
_QUESTIONS = ("prompt", "question", "query")
#: Other names of `chosen` and `rejected`: axolotl's, and those of OpenAI's API.
_PAIRS = (("chosen_response", "rejected_response"), ("preferred_output", "non_preferred_output"))
_REJECTED = ("rejected_response", "rejected_messages")
_LABELS = ("label", "kto_tag", "kto_label")
_ANSWERS = ("response", "output", "completion", "answer")
_MARKS = {
    "true": True, "1": True, "desirable": True,
    "false": False, "0": False, "undesirable": False,
}  # fmt: skip


@dataclass
class _PreferenceConverter:
    """What :class:`PairConverter` and :class:`AnswerConverter` have in common. The arguments and
    the attributes are those of :class:`paceline.data.text.formats.RowConverter`, which reads the
    rows after the columns with the preference have been taken out of them."""

    label: str
    format: str = "auto"
    columns: dict[str, str] = field(default_factory=dict)
    system: str | None = None
    pretrain: bool = False
    ignore_columns: Collection[str] = ()
    roles: Mapping[str, str | list[str]] = field(default_factory=dict)
    template: ChatTemplate | None = None
    unmatched: Counter[tuple[str, ...]] = field(default_factory=Counter)

    #: The columns with the preference.
    own_columns: ClassVar[tuple[str, ...]] = (
        "chosen", "chosen_response", *_REJECTED, "rejected", *_PAIRS[1], *_LABELS,
    )  # fmt: skip

    def __post_init__(self) -> None:
        self._names = {name: self.columns.get(name, name) for name in self.own_columns}
        taken = {name: of for name, of in self.columns.items() if name in self._names}
        check_columns(self.label, taken, self.ignore_columns, self.own_columns)
        columns = {name: of for name, of in self.columns.items() if name not in taken}
        make = partial(
            RowConverter,
            self.label,
            self.row_format,
            columns,
            self.system,
            ignore_columns=self.ignore_columns,
            roles=self.roles,
            template=self.template,
        )
        # The second answer of a pair must not count the columns of a row again.
        self._convert, self._convert_second = make(), make()
        self.seen = self._convert.seen
        self.unused = self._convert.unused
        self.ignored = self._convert.ignored
        self.binary_labels = self._convert.binary_labels

    @property
    def row_format(self) -> str:
        """The format of the rows without the preference."""
        return self.format

    def _take(self, row: Any) -> tuple[Row, Row]:
        """Return the values of :attr:`own_columns` that are not empty, and the other columns."""
        if not isinstance(row, dict):
            raise MalformedRow("not an object with columns")
        ignored = set(self.ignore_columns)
        marks = {
            name: unpack_list(row[column])
            for name, column in self._names.items()
            if column in row
            and column not in ignored
            and (isinstance(row[column], bool | int) or not holds_nothing(row[column]))
        }
        taken = set(self._names.values())
        return marks, {name: value for name, value in row.items() if name not in taken}

    def _column(self, name: str) -> str:
        return self._convert.columns.get(name, name)


class PairConverter(_PreferenceConverter):
    """Convert the rows of one source to pairs: samples with :attr:`Sample.rejected`."""

    formats: ClassVar = {
        "chosen_rejected": "chosen, rejected (and prompt, instruction, messages or conversations)",
        "rejected_response": "a row with an answer, and rejected_response or rejected_messages",
    }

    @property
    def row_format(self) -> str:
        return "auto"  # the rows with one answer have their own format

    def __call__(self, row: Any) -> Sample:
        """Convert one row.

        Raises:
            MalformedRow: the row cannot be used.
            Unsupported: the dataset needs another kind of training.
        """
        marks, rest = self._take(row)
        for good, bad in _PAIRS:
            if good in marks and bad in marks:
                marks = {"chosen": marks[good], "rejected": marks[bad]}
        prompt = rest.get("input")
        if isinstance(prompt, dict):  # OpenAI's prompt: `{messages: […], tools: […]}`
            rest = {**rest, "input": None, **prompt}
        if "chosen" in marks and "rejected" in marks:
            make = self._answer_rows(rest, marks["chosen"], marks["rejected"])
            chosen, rejected = make(marks["chosen"]), make(marks["rejected"])
        elif any(name in marks for name in _REJECTED):
            chosen, rejected = rest, self._with_rejected(rest, marks)
        else:
            self._check_kind(marks, rest)
            self.unmatched[tuple(map(str, row))] += 1
            raise MalformedRow("the row has no pair of answers")
        sample = _answered(self._convert(chosen))
        sample.rejected = _answered(self._convert_second(rejected))
        return sample

    def _check_kind(self, marks: Row, rest: Row) -> None:
        """Reject data that marks single answers.

        Raises:
            Unsupported: the row has a mark.
        """
        for name in _LABELS:
            if isinstance(marks.get(name), bool):
                raise Unsupported(
                    f"the rows mark single answers as good or bad (`{name}`), and this task trains"
                    " on pairs of answers",
                    allowed="; ".join(self.formats.values()),
                    fix="set `task: kto`",
                )

    def _answer_rows(self, rest: Row, chosen: Any, rejected: Any) -> Callable[[Any], Row]:
        """Return the function that makes a row with one answer from `chosen` or `rejected`."""
        if isinstance(chosen, str) != isinstance(rejected, str):
            raise MalformedRow("chosen and rejected are of different types")
        chat = next(
            (
                name
                for name in map(self._column, _PROMPT_CHATS)
                if isinstance(unpack_list(rest.get(name)), list)
            ),
            None,
        )
        has_instruction = self._column("instruction") in rest
        questions = _QUESTIONS if has_instruction else (*_QUESTIONS, "input")
        question = next(
            (name for name in map(self._column, questions) if isinstance(rest.get(name), str)),
            None,
        )
        others = {name: value for name, value in rest.items() if name not in (chat, question)}
        if chat is not None:
            return partial(_after_turns, others, unpack_list(rest[chat]))
        if has_instruction and isinstance(chosen, str | dict):
            return lambda answer: {**rest, self._column("output"): _text_of(answer)}
        if not isinstance(chosen, str):
            text = None if question is None else str(rest[question])
            return partial(_after_question, others, text)
        if question is not None:
            return lambda answer: {**others, "prompt": rest[question], "completion": answer}
        start = _shared_start(chosen, rejected)
        return lambda answer: {
            **others,
            "prompt": answer[:start],
            "completion": answer[start:],
        }

    def _with_rejected(self, rest: Row, marks: Row) -> Row:
        """Return the row with its answer replaced by the rejected one."""
        if isinstance(messages := marks.get("rejected_messages"), list):
            names = {self._column(name) for name in _PROMPT_CHATS}
            others = {name: value for name, value in rest.items() if name not in names}
            return {**others, "messages": messages}
        answer = marks.get("rejected_response")
        for name in map(self._column, _PROMPT_CHATS):
            turns = unpack_list(rest.get(name))
            if isinstance(turns, list) and turns and isinstance(turns[-1], dict):
                return {**rest, name: [*turns[:-1], *_turns_of(answer)]}
        for name in map(self._column, _ANSWERS):
            if name in rest:
                return {**rest, name: _text_of(answer)}
        raise MalformedRow("the row has a rejected answer and no other answer")


class MarginConverter(PairConverter):
    """Convert the rows of one source to pairs, with the margin of each that has the column."""

    own_columns = (*PairConverter.own_columns, "margin")

    def __call__(self, row: Any) -> Sample:
        """Convert one row.

        Raises:
            MalformedRow: the row cannot be used.
            Unsupported: the dataset needs another kind of training.
        """
        sample = super().__call__(row)
        margin = self._take(row)[0].get("margin", 0.0)
        if isinstance(margin, bool) or not isinstance(margin, int | float) or isinf(margin):
            raise MalformedRow("`margin` is not a number")
        sample.margin = float(margin)
        return sample


class AnswerConverter(_PreferenceConverter):
    """Convert the rows of one source to answers that are marked as good or bad: samples with
    :attr:`Sample.is_desirable`."""

    formats: ClassVar = {
        "label": "a row with an answer, and a boolean `label` (or `kto_tag`)",
        **FORMATS,
    }

    def __call__(self, row: Any) -> Sample:
        """Convert one row.

        Raises:
            MalformedRow: the row cannot be used.
            Unsupported: the dataset needs another kind of training.
        """
        marks, rest = self._take(row)
        name = next((name for name in _LABELS if name in marks), None)
        if name is None:
            if "rejected" in marks or any(name in marks for name in _REJECTED):
                raise Unsupported(
                    "the rows are preference pairs, and `task: kto` trains on single answers that"
                    " are marked as good or bad",
                    allowed="; ".join(self.formats.values()),
                    fix="set `task: dpo`, or divide each pair into two rows with a `label`",
                )
            self.unmatched[tuple(map(str, row))] += 1
            raise MalformedRow("the row does not mark its answer as good or bad")
        value = marks[name]
        mark = _MARKS.get(str(value).strip().lower())
        if mark is None:
            raise MalformedRow(f"`{name}` is neither true nor false")
        sample = _answered(self._convert(rest))
        sample.is_desirable = mark
        return sample


def _answered(sample: Sample) -> Sample:
    if sample.text is not None:
        raise MalformedRow("a text without a prompt")
    if sample.weight is not None:
        raise Unsupported(
            f"the rows have weights (`{LOSS_WEIGHT}`), which preference training does not support",
            fix=f"set `ignore_columns: [{LOSS_WEIGHT}]`",
        )
    return sample


def _text_of(answer: Any) -> Any:
    """Return the text of an answer that may be a message."""
    if isinstance(answer, list) and len(answer) == 1:
        answer = answer[0]
    if isinstance(answer, dict):
        return answer.get("content", answer.get("value"))
    return answer


def _turns_of(answer: Any) -> list[Any]:
    if isinstance(answer, str):
        return [{"role": "assistant", "content": answer}]
    return answer if isinstance(answer, list) else [answer]


def _after_turns(others: Row, prompt: list[Any], answer: Any) -> Row:
    """Return a chat of the prompt's turns and the answer, which may repeat the prompt."""
    turns = _turns_of(answer)
    if turns[: len(prompt)] != prompt or len(turns) <= len(prompt):
        turns = [*prompt, *turns]
    return {**others, "messages": turns}


def _after_question(others: Row, question: str | None, answer: Any) -> Row:
    """Return a chat of the question and the answer, which may contain the question."""
    turns = _turns_of(answer)
    if len(turns) == 1 and question is not None:
        turns = [{"role": "user", "content": question}, *turns]
    return {**others, "messages": turns}


def _shared_start(chosen: str, rejected: str) -> int:
    """Return the length of the prompt that both texts begin with, without a space before their
    answers, as TRL's ``extract_prompt`` does."""
    pairs = enumerate(zip(chosen, rejected, strict=False))
    shorter = min(len(chosen), len(rejected))
    length = next((number for number, (left, right) in pairs if left != right), shorter)
    if length and chosen[length - 1] == " ":
        length -= 1
    if not length:
        raise MalformedRow("chosen and rejected have no prompt in common")
    return min(length, len(chosen) - 1, len(rejected) - 1)
