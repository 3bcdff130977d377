"""Convert rows to pairs of answers, or to single answers that are marked as good or bad.

A pair is in the columns `chosen` and `rejected` (or the names of other tools), whose prompt is
explicit (`prompt`, `question`, `instruction`, `input`, `messages` or `conversations`) or implicit
(what both have in common); or the rejected answer is in `rejected_response` or `rejected_messages`,
beside a usual row. A chat that ends with an answer is not a prompt: many datasets have the entire
preferred chat in `messages` too. A single answer is a usual row with a `label` or `kto_tag`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from math import isfinite, nan
from typing import Any, ClassVar

from paceline.data.sources.rows import MalformedRow, Row, Unsupported, holds_nothing, is_missing
from paceline.data.text.chats.tool_calls import ChatMessage
from paceline.data.text.chats.turns import first_value
from paceline.data.text.columns import (
    CHAT,
    FORMATS,
    LOSS_WEIGHT,
    Tally,
    chat_turns,
    check_columns,
    mapping_of,
)
from paceline.data.text.formats import RowConverter
from paceline.data.text.messages import as_text
from paceline.data.text.refused_rows import TextChecks
from paceline.data.text.sample import ChatSample

_QUESTIONS = ("prompt", "question", "query")
#: Other names of `chosen` and `rejected`, in axolotl and in OpenAI's API.
_PAIRS = (("chosen_response", "rejected_response"), ("preferred_output", "non_preferred_output"))
_REJECTED = ("rejected_response", "rejected_messages")
_LABELS = ("label", "kto_tag", "kto_label")
#: Own columns that are not texts.
_VALUES = (*_LABELS, "margin")
_ANSWERS = ("response", "output", "completion", "answer")
_MARKS = {
    "true": True, "1": True, "desirable": True,
    "false": False, "0": False, "undesirable": False,
}  # fmt: skip


@dataclass
class RatedChat(ChatSample):
    """A chat, or a prompt with its completion, whose answer is preferred or marked.

    Args:
        rejected: the same prompt with the answer that the data prefers less, if it has one.
        is_desirable: whether the data marks the only answer as good, if it marks answers.
        margin: difference that the scores of the answers should have at least.
    """

    rejected: ChatSample | None = None
    is_desirable: bool | None = None
    margin: float = 0.0


class PreferenceConverter(RowConverter):
    """What :class:`PairConverter` and :class:`AnswerConverter` have in common: they take the
    columns with the preference out of a row, and read the rest as a row with one answer.

    Attributes:
        formats, mapping: as in :class:`paceline.data.kinds.base.SampleKind`.
    """

    formats: ClassVar[dict[str, str]]
    mapping: ClassVar[dict[str, str]]

    #: The columns with the preference.
    own_columns: ClassVar[tuple[str, ...]] = (
        "chosen", "chosen_response", *_REJECTED, "rejected", *_PAIRS[1], *_LABELS,
    )  # fmt: skip

    def __post_init__(self) -> None:
        self._names = {name: self.columns.get(name, name) for name in self.own_columns}
        taken = {name: of for name, of in self.columns.items() if name in self._names}
        check_columns(self.label, taken, self.ignore_columns, self.own_columns)
        self.columns = {name: of for name, of in self.columns.items() if name not in taken}
        self.check_text = self._checked_texts = TextChecks()
        super().__post_init__()

    def _take(self, row: Any) -> tuple[Row, Row]:
        """Return the values of :attr:`own_columns` that are not empty, and the other columns."""
        self._checked_texts.start_row()
        if not isinstance(row, dict):
            raise MalformedRow("not an object with columns")
        ignored = set(self.ignore_columns)
        marks = {
            name: row[column] if name in _VALUES else self.turn_keys.unpack(as_text(row[column]))
            for name, column in self._names.items()
            if column in row and column not in ignored and not _is_empty(row[column])
        }
        taken = set(self._names.values())
        return marks, {name: value for name, value in row.items() if name not in taken}

    def _check_not_empty(self, row: Row, marks: Row, names: Sequence[str]) -> None:
        """Raise MalformedRow if the row has columns for all of the names, and one is empty.

        Args:
            marks: the values of those that are not empty, from :meth:`_take`.
        """
        columns = {name: self._names[name] for name in names}
        if all(column in row for column in columns.values()):
            empty = [column for name, column in columns.items() if name not in marks]
            raise MalformedRow(f"`{empty[0]}` is empty")


class PairConverter(PreferenceConverter):
    """Convert the rows of one source to pairs: samples with :attr:`RatedChat.rejected`."""

    formats: ClassVar = {
        "chosen_rejected": "chosen, rejected (and prompt, instruction, messages or conversations)",
        "rejected_response": "a row with an answer, and rejected_response or rejected_messages",
    }
    mapping = mapping_of("prompt", "chosen", "rejected")

    def __post_init__(self) -> None:
        self.format = "auto"  # the rows with one answer have their own format
        super().__post_init__()
        # The second answer of a pair must not count the columns of a row again.
        settings = {item.name: getattr(self, item.name) for item in fields(self)}
        self._second = RowConverter(**{**settings, "tally": Tally()})

    def __call__(self, row: Any) -> RatedChat:
        marks, rest = self._take(row)
        _check_weight(self.loss_weight(rest))
        rest = self.renamed(rest)
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
            for names in (("chosen", "rejected"), *_PAIRS, *zip(_REJECTED, strict=True)):
                self._check_not_empty(row, marks, names)
            self.tally.unmatched[tuple(map(str, row))] += 1
            raise MalformedRow("the row has no pair of answers")
        preferred = _answered(self.convert(chosen))
        other = _answered(self._second.convert(rejected))
        _check_prompts(preferred.messages or [], other.messages or [])
        preferred.trailing_turns = max(preferred.trailing_turns, other.trailing_turns)
        return RatedChat(**vars(preferred), rejected=other)

    def _check_kind(self, marks: Row, rest: Row) -> None:
        """Reject data that marks single answers.

        Raises:
            Unsupported: the row has a mark.
        """
        for name in _LABELS:
            if _mark_of(marks.get(name)) is not None:
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
        chats = self._chats(rest)
        others = {name: value for name, value in rest.items() if name not in chats}
        has_instruction = "instruction" in rest
        question = self._question(others, has_instruction)
        named = self.columns
        candidates = chats
        if question in named:  # `columns` names the prompt
            candidates = {name: turns for name, turns in chats.items() if name in named}
        column, prompt, is_exact = self._prompt_chat(candidates, chosen, rejected)
        single = [] if question is None else [self.turn("user", others[question])]
        if isinstance(chosen, str) and self.turn_keys.are_same(prompt or [], single):
            is_exact = False  # the chat has only the text of the prompt
        if prompt is not None and (is_exact or (question is None and not has_instruction)):
            self._count_unused(name for name in chats if name != column)
            return lambda answer: {**others, "messages": self._join(prompt, answer)}
        self._count_unused(chats)
        if has_instruction and self._is_single(chosen) and self._is_single(rejected):
            return lambda answer: {**others, "output": self._text_of(answer)}
        if not isinstance(chosen, str):
            text = None if question is None else as_text(others.pop(question))
            return partial(self._after_question, others, text)
        if question is not None:
            prompt_text = others.pop(question)
            return lambda answer: {**others, "prompt": prompt_text, "completion": answer}
        start = _shared_start(chosen, rejected)
        return lambda answer: {
            **others,
            "prompt": answer[:start],
            "completion": answer[start:],
        }

    def _chats(self, rest: Row) -> dict[str, list[Any]]:
        """Return the columns with chats: those that `columns` names come first."""
        names = ("prompt", *CHAT)
        ordered = sorted(names, key=lambda name: name not in self.columns)
        chats: dict[str, list[Any]] = {}
        for name in ordered:
            value = self.turn_keys.unpack(rest.get(name))
            turns = chat_turns(value) if name in CHAT else value
            if isinstance(turns, list) and turns:
                chats[name] = turns
        return chats

    def _count_unused(self, names: Iterable[str]) -> None:
        self.tally.unused.update(self.columns.get(name, name) for name in names)

    def _prompt_chat(
        self, chats: dict[str, list[Any]], chosen: Any, rejected: Any
    ) -> tuple[str | None, list[Any] | None, bool]:
        """Return the column with the prompt among the chats of a row, the prompt, and whether it is
        known to be one; else it may precede another answer than the row's answers.

        A chat that ends with an answer is not a prompt, unless `columns` names it and its answer is
        not one of the row's. If the answers are no chats of their own, the prompt is what precedes
        its answer.
        """
        keys, named = self.turn_keys, self.columns
        answers = [self._turns(chosen), self._turns(rejected)]
        shared: list[tuple[str, list[Any], bool]] = []
        for name, turns in chats.items():
            has_answer = any(keys.are_same(turns[-1:], answer[-1:]) for answer in answers)
            if not keys.ends_with_answer(turns) or (name in named and not has_answer):
                return name, turns, True
            before = keys.without_answer(turns)
            if before and all(map(keys.are_answers, answers)):
                shared.append((name, before, has_answer))
        return max(shared, key=lambda candidate: candidate[2], default=(None, None, False))

    def _question(self, rest: Row, has_instruction: bool) -> str | None:
        """Return the column with the text of the prompt: the one that `columns` names comes
        first."""
        names = _QUESTIONS if has_instruction else (*_QUESTIONS, "input")
        ordered = sorted(names, key=lambda name: name not in self.columns)
        return next((name for name in ordered if _is_text(rest.get(name))), None)

    def _with_rejected(self, rest: Row, marks: Row) -> Row:
        """Return the row with its answer replaced by the rejected one."""
        keys = self.turn_keys
        chats = {
            name: turns for name, turns in self._chats(rest).items() if keys.ends_with_answer(turns)
        }
        if isinstance(messages := marks.get("rejected_messages"), list):
            others = {name: value for name, value in rest.items() if name not in self._chats(rest)}
            turns = next(iter(chats.values()), [])
            if keys.are_answers(messages):
                messages = [*keys.without_answer(turns), *messages]
            return {**others, "messages": messages}
        answer = marks.get("rejected_response")
        for name, turns in chats.items():
            return {**rest, name: [*turns[:-1], *self._turns(answer)]}
        for name in _ANSWERS:
            if name in rest:
                return {**rest, name: self._text_of(answer)}
        raise MalformedRow("the row has a rejected answer and no other answer")

    def _turns(self, answer: Any) -> list[Any]:
        """Return an answer as turns."""
        if isinstance(answer, str):
            return [self.turn("assistant", answer)]
        return answer if isinstance(answer, list) else [answer]

    def _is_single(self, answer: Any) -> bool:
        """Return whether an answer is a text or a single turn."""
        turns = self._turns(answer)
        return len(turns) == 1 and isinstance(turns[0], dict)

    def _text_of(self, answer: Any) -> Any:
        """Return the text of an answer that may be a single turn."""
        turn = self._turns(answer)[0]
        is_object = isinstance(turn, dict)
        return first_value(turn, self.turn_keys.content) if is_object else turn

    def _join(self, prompt: list[Any], answer: Any) -> list[Any]:
        return self.turn_keys.join(prompt, self._turns(answer))

    def _after_question(self, others: Row, question: str | None, answer: Any) -> Row:
        """Return a chat of the question and the answer, which may contain the question."""
        turns = self._turns(answer)
        if question is not None and self.turn_keys.are_answers(turns):
            turns = [self.turn("user", question), *turns]
        return {**others, "messages": turns}


class MarginConverter(PairConverter):
    """Convert the rows of one source to pairs, with the margin of each that has the column."""

    own_columns = (*PairConverter.own_columns, "margin")

    def __call__(self, row: Any) -> RatedChat:
        sample = super().__call__(row)
        margin: Any = self._take(row)[0].get("margin", 0.0)
        try:
            number = nan if isinstance(margin, bool) else float(margin)
        except (TypeError, ValueError):
            number = nan
        if not isfinite(number):
            raise MalformedRow("`margin` is not a number")
        sample.margin = number
        return sample


class AnswerConverter(PreferenceConverter):
    """Convert the rows of one source to answers that are marked as good or bad: samples with
    :attr:`RatedChat.is_desirable`."""

    formats: ClassVar = {
        "label": "a row with an answer, and a boolean `label` (or `kto_tag`)",
        **FORMATS,
    }
    mapping = mapping_of("prompt", "completion", "label")

    def __call__(self, row: Any) -> RatedChat:
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
            for label in _LABELS:
                self._check_not_empty(row, marks, (label,))
            self.tally.unmatched[tuple(map(str, row))] += 1
            raise MalformedRow("the row does not mark its answer as good or bad")
        value = marks[name]
        mark = _mark_of(value)
        if mark is None:
            raise MalformedRow(f"`{name}` is neither true nor false")
        _check_weight(self.loss_weight(rest))
        return RatedChat(**vars(_answered(super().__call__(rest))), is_desirable=mark)


def _answered(sample: ChatSample) -> ChatSample:
    if sample.text is not None:
        raise MalformedRow("a text without a prompt")
    return sample


def _check_weight(weight: float | None) -> None:
    if weight is not None:
        raise Unsupported(
            f"the rows have weights (`{LOSS_WEIGHT}`), which preference training does not support",
            fix=f"set `ignore_columns: [{LOSS_WEIGHT}]`",
        )


def _mark_of(value: Any) -> bool | None:
    """Return whether a label marks an answer as good, or None if it does neither."""
    return _MARKS.get(str(value).strip().lower().removesuffix(".0"))


def _check_prompts(chosen: list[ChatMessage], rejected: list[ChatMessage]) -> None:
    """Check that two chats first differ in an answer.

    Raises:
        MalformedRow: they differ in a question or a system message.
    """
    for turns in zip(chosen, rejected, strict=False):
        if turns[0] != turns[1]:
            if all(turn["role"] in ("user", "system") for turn in turns):
                raise MalformedRow("chosen and rejected have different prompts")
            return


def _is_text(value: Any) -> bool:
    return isinstance(as_text(value), str) and not is_missing(value)


def _is_empty(value: Any) -> bool:
    """Return whether a mark is empty. A text such as `[]` or `None` is an answer."""
    if isinstance(value, str):
        return not value.strip()
    if isinstance(value, bool | int | float):
        return value != value
    return holds_nothing(value)


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
