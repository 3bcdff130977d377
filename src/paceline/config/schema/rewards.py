"""The list ``rewards`` of the schema: what is computed from the completions of a model."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BeforeValidator, JsonValue, SerializerFunctionWrapHandler, model_serializer

from paceline.config.schema.base import Section, Text
from paceline.core.texts import UserText

#: The built-in rewards, and the options of each.
REWARDS: dict[str, tuple[str, ...]] = {
    "math": ("column", "after"),
    "exact": ("column", "after"),
    "choice": ("column", "after"),
    "format": ("pattern",),
    "count": ("pattern", "count"),
    "tags": ("tags",),
    "soft_overlong": ("max_length", "cache"),
    "cosine": ("column", "after", "max_length", "unit", "correct", "wrong"),
    "length": ("column", "after"),
    "repetition": ("ngram_size", "max_penalty"),
    "environment": (),
}
#: The built-in reward that an environment computes.
OF_ENVIRONMENT = "environment"
#: The rewards that compare mathematical expressions.
MATH_REWARDS = ("math", "cosine", "length")
#: The options that a built-in reward cannot do without.
_REQUIRED = {
    "soft_overlong": {
        "cache": "the number of tokens before max_length within which the reward falls from 0 to -1"
    },
    "count": {"pattern": "the regular expression whose matches are counted"},
    "tags": {"tags": "the list of texts that must occur once"},
}
#: What an entry of ``rewards`` is, one key each.
_KINDS = ("function", "name", "model")
#: Reasoning in a single pair of tags at the start, then the answer.
THINK_PATTERN = r"<think>(?!.*<think>).*?</think>.*"


class RewardEntry(Section):
    """One entry of `rewards`. :func:`_check_entries` has checked its keys."""

    function: Text | None = None
    name: Text | None = None
    model: Text | None = None
    weight: float = 1.0
    column: Text | None = None
    pattern: Text | None = None
    after: Text | None = None
    max_length: int | None = None
    cache: int | None = None
    count: int | None = None
    tags: list[str] | None = None
    unit: Literal["tokens", "characters"] | None = None
    correct: list[float] | None = None
    wrong: list[float] | None = None
    ngram_size: int | None = None
    max_penalty: float | None = None

    @model_serializer(mode="wrap")
    def _without_nulls(self, serialize: SerializerFunctionWrapHandler) -> dict[str, JsonValue]:
        values: dict[str, JsonValue] = serialize(self)
        return {key: value for key, value in values.items() if value is not None}

    @property
    def answer_column(self) -> str | None:
        """The column with the right answer; None for a reward that reads none."""
        reads_answer = self.name is not None and "column" in REWARDS[self.name]
        return (self.column or "answer") if reads_answer else None

    @property
    def label(self) -> str:
        """The name of the reward in figures and messages."""
        if self.function is not None:
            return self.function.strip().rpartition(":")[2]
        return self.name or re.split(r"[/\\]", (self.model or "").rstrip("/\\"))[-1]


def reward_labels(rewards: list[RewardEntry]) -> list[str]:
    """Return a different name for each reward: its label, with a number if it occurs again."""
    labels: list[str] = []
    for reward in rewards:
        label, number = reward.label, 2
        while label in labels:
            label, number = f"{reward.label}_{number}", number + 1
        labels.append(label)
    return labels


def _check_entries(value: object) -> object:
    """Check the keys of the entries before pydantic does, which would not name the entry."""
    entries = [value] if isinstance(value, dict | RewardEntry) else value
    if not isinstance(entries, list):
        return entries
    return [
        entry if isinstance(entry, RewardEntry) else _check_entry(number, entry)
        for number, entry in enumerate(entries, 1)
    ]


def _check_entry(number: int, entry: object) -> dict[str, JsonValue]:
    if not isinstance(entry, dict):
        raise ValueError(
            UserText(
                "entry {number} is not a mapping; write {function: ./rewards.py:NAME},"
                " {name: NAME} or {model: FOLDER}",
                code="reward-not-a-mapping",
                number=number,
            )
        )
    fields = {str(key): value for key, value in entry.items() if value is not None}
    kinds = [kind for kind in _KINDS if kind in fields]
    if len(kinds) != 1:
        raise ValueError(
            UserText(
                "entry {number} must have exactly one of the keys function, name and model",
                code="reward-without-kind",
                number=number,
            )
        )
    _check_values(number, fields)
    if "name" in fields and fields["name"] not in REWARDS:
        raise ValueError(
            UserText(
                "entry {number}: there is no built-in reward `{name}`; choose from {known}, or name"
                " a function of your own: {function: ./rewards.py:NAME}",
                code="unknown-reward",
                number=number,
                name=fields["name"],
                known=", ".join(REWARDS),
            )
        )
    _check_options(number, kinds[0], fields)
    return fields


@dataclass(frozen=True)
class _OptionRule:
    """What the value of a key must be.

    Args:
        form: the form in words.
        accepts: whether a value has this form.
    """

    form: str
    accepts: Callable[[JsonValue], bool]


def _is_number(value: JsonValue) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_text(value: JsonValue) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_pair(value: JsonValue) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_number, value))


def _is_list_of_texts(value: JsonValue) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_text, value))


def _is_penalty(value: JsonValue) -> bool:
    return _is_number(value) and float(str(value)) <= 0


def _whole(lowest: int) -> _OptionRule:
    def accepts(value: JsonValue) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= lowest

    return _OptionRule(f"a whole number of at least {lowest}", accepts)


_TEXT = _OptionRule("text that is not empty", _is_text)
_PAIR = _OptionRule(
    "two numbers, the one of the shortest completion and the one at max_length", _is_pair
)
_RULES = {
    **dict.fromkeys((*_KINDS, "column", "pattern", "after"), _TEXT),
    "weight": _OptionRule("a finite number", _is_number),
    "max_length": _whole(1),
    "cache": _whole(0),
    "count": _whole(1),
    "ngram_size": _whole(1),
    "tags": _OptionRule("a list of texts that are not empty", _is_list_of_texts),
    "unit": _OptionRule("tokens or characters", lambda value: value in ("tokens", "characters")),
    "correct": _PAIR,
    "wrong": _PAIR,
    "max_penalty": _OptionRule("a number of at most 0", _is_penalty),
}


def _check_values(number: int, fields: Mapping[str, JsonValue]) -> None:
    for key, value in fields.items():
        if key in _RULES and not _RULES[key].accepts(value):
            raise _invalid(number, key, value, _RULES[key].form)
    if not names_object(str(fields.get("function", "./file.py:name"))):
        form = "./file.py:NAME or package.module:NAME"
        raise _invalid(number, "function", fields["function"], form)


def names_object(text: str) -> bool:
    """Return whether a text has the form ``LOCATION:NAME``."""
    location, _, name = text.strip().rpartition(":")
    return bool(location) and name.isidentifier()


def _check_options(number: int, kind: str, fields: Mapping[str, JsonValue]) -> None:
    options = REWARDS[str(fields["name"])] if kind == "name" else ()
    for key in fields:
        if key not in (kind, "weight", *options):
            raise ValueError(
                UserText(
                    "entry {number}: `{key}` is not an option of {kind}: {value}; its keys are"
                    " {accepted_keys}",
                    code="unknown-reward-option",
                    number=number,
                    key=key,
                    kind=kind,
                    value=fields[kind],
                    accepted_keys=", ".join((kind, "weight", *options)),
                )
            )
    for key, meaning in _REQUIRED.get(str(fields.get("name")), {}).items():
        if key not in fields:
            raise ValueError(
                UserText(
                    "entry {number}: {name} requires `{key}`, {meaning}",
                    code="reward-without-option",
                    number=number,
                    name=fields["name"],
                    key=key,
                    meaning=meaning,
                )
            )
    _check_pattern(number, fields.get("pattern"))


def _check_pattern(number: int, pattern: JsonValue) -> None:
    if not isinstance(pattern, str):
        return
    try:
        re.compile(pattern, re.DOTALL)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(
            UserText(
                "entry {number}: `pattern: {pattern}` is not a valid regular expression: {reason}",
                code="invalid-reward-pattern",
                number=number,
                pattern=pattern,
                reason=error,
            )
        ) from None


def _invalid(number: int, key: str, value: object, form: str) -> ValueError:
    return ValueError(
        UserText(
            "entry {number}: `{key}: {value}` is not accepted; it must be {form}",
            code="invalid-reward-option",
            number=number,
            key=key,
            value=value,
            form=form,
        )
    )


#: The rewards of a run; one may be written without a list.
Rewards = Annotated[list[RewardEntry], BeforeValidator(_check_entries)]
