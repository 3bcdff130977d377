"""The columns of formats: their names, the format that matches them, and the mapping of columns to
these names."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.core.errors import ConfigError, did_you_mean
from paceline.data.sources.readers import DOCUMENT
from paceline.data.sources.rows import Row, is_missing
from paceline.data.text.chats.turns import unpack_list
from paceline.data.text.refused_rows import LABELS, MEDIA

#: Accepted names of each column, the usual one first.
CHAT = ("messages", "conversations", "conversation", "dialogue", "dialog", "chat")
SYSTEM = ("system", "system_prompt")
INPUT = ("input", "context")
ANSWER = ("output", "response", "completion", "answer")
PAIRS = (
    ("prompt", "completion"), ("question", "answer"), ("query", "response"), ("prompt", "response"),
    ("question", "response"),
    ("query", "answer"), ("prompt", "answer"), ("input", "output"), ("problem", "solution"),
    ("prompt", "output"), ("question", "completion"),
)  # fmt: skip
TEXT = ("text", "content", "story", "document")
TOOLS = ("tools", "functions")
ALPACA = ("instruction", *INPUT, *ANSWER, *SYSTEM, "history", "reasoning_content")
#: Columns that change the meaning of a row. It is an error if one is neither empty nor used, unless
#: `ignore_columns` lists it.
MUST_BE_USED = ("history", "reasoning_content", "rejected", "rejected_response", *TOOLS)

#: Formats, each with its columns.
FORMATS = {
    "alpaca": "instruction, output (and input, system, history)",
    "messages": "messages: a list of {role, content}",
    "sharegpt": "conversations: a list of {from, value}",
    "prompt_completion": (
        "prompt, completion (or question, answer; query, response; prompt, response)"
    ),
    "text": "text",
}
#: Expected name of the column with the weights of the rows' losses. It is read only if `columns`
#: names it, because messages may have a key of this name.
LOSS_WEIGHT = "loss_weight"
#: Column with variables of the chat template, as in TRL.
TEMPLATE_ARGUMENTS = "chat_template_kwargs"
#: Keys of messages, which `columns` maps as well.
MESSAGE_KEYS = {
    *("role", "content", "from", "value", "weight", "train_detail", "tool_calls", "tool_call_id"),
    "name",
}
EXPECTED = {
    LOSS_WEIGHT,
    TEMPLATE_ARGUMENTS,
    *CHAT,
    *SYSTEM,
    *INPUT,
    *ANSWER,
    *TEXT,
    *(name for pair in PAIRS for name in pair),
    *MUST_BE_USED,
    *MEDIA,
    *LABELS,
    *("instruction", "chosen", "rejected"),
    *MESSAGE_KEYS,
}


@dataclass
class Tally:
    """Counters of the rows of a source, for messages.

    Args:
        seen: number of rows by format.
        unused: number of rows by column or key that is not empty and not used.
        unmatched: number of rows that match no format, by their columns.
        ignored: occurrences of columns and keys of `ignore_columns`.
        mapped: number of rows by column of `columns`.
        binary_labels: number of rows with a whole number as `label` besides an answer: "0", "1",
            "other".
        facts: what else is reported, with its number.
        refusals: error messages of the chat template, with their numbers.
    """

    seen: Counter[str] = field(default_factory=Counter)
    unused: Counter[str] = field(default_factory=Counter)
    unmatched: Counter[tuple[str, ...]] = field(default_factory=Counter)
    ignored: Counter[str] = field(default_factory=Counter)
    mapped: Counter[str] = field(default_factory=Counter)
    binary_labels: Counter[str] = field(default_factory=Counter)
    facts: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)

    def add(self, other: "Tally") -> None:
        """Add the counters of later rows."""
        for name, counter in vars(other).items():
            getattr(self, name).update(counter)

    def take(self) -> "Tally":
        """Return the counters, and count from 0 again."""
        taken = Tally(*(counter.copy() for counter in vars(self).values()))
        for counter in vars(self).values():
            counter.clear()
        return taken


def find_format(columns: Row, pretrain: bool = False) -> str | None:
    """Return the format that matches a row's columns, or None. If several match, the order is
    chats, alpaca, prompt and completion, text; for pretraining text comes first."""
    names = set(columns)
    if DOCUMENT in names or (pretrain and "text" in names):
        return "text"
    for key in CHAT:
        if key in names and (turns := chat_turns(columns[key])) is not None:
            first = next(iter(turns), None)
            return "sharegpt" if isinstance(first, dict) and "from" in first else "messages"
    if "instruction" in names and names & set(ANSWER):
        return "alpaca"
    if any(prompt in names and answer in names for prompt, answer in PAIRS):
        return "prompt_completion"
    if names & set(CHAT):  # the column exists, but this row has no list in it
        return "messages"
    return "text" if names & set(TEXT) else None


def chat_turns(value: Any) -> list[Any] | None:
    """Return the turns in a column of chats, which may be JSON text, or None if it has another
    text, such as a transcript that begins with ``[``."""
    turns = unpack_list(value)
    if not isinstance(turns, list):
        return None
    return turns if turns is value or all(isinstance(turn, dict) for turn in turns) else None


def matching_formats(columns: Row) -> list[str]:
    """Return all formats that match the columns, for error messages."""
    names = set(columns)
    matches = {
        "alpaca": "instruction" in names and bool(names & set(ANSWER)),
        "prompt_completion": any(prompt in names and answer in names for prompt, answer in PAIRS),
        "text": bool(names & set(TEXT)) or DOCUMENT in names,
    }
    chats = [find_format({key: columns[key]}) for key in CHAT if key in names]
    return [
        *dict.fromkeys(chat for chat in chats if chat),
        *(name for name, is_match in matches.items() if is_match),
    ]


def check_columns(
    label: str,
    columns: Mapping[str, str],
    ignore_columns: Collection[str],
    expected: Collection[str],
) -> None:
    """Check ``columns`` and ``ignore_columns`` of a source.

    Args:
        label: the name of the source, for messages.
        columns: `{expected name: name in the data}`.
        expected: the expected names that there are.

    Raises:
        ConfigError: an expected name is unknown, or a column is mapped and ignored.
    """
    for name, column in columns.items():
        if name not in expected:
            raise ConfigError(
                "`columns: {{name}: {column}}` of {label}: unknown column `{name}`",
                code="unknown-column",
                allowed=("`{EXPECTED: YOURS}` with EXPECTED one of " + ", ".join(sorted(expected))),
                fix=did_you_mean(name, expected),
                name=name,
                column=column,
                label=label,
            )
        if column in ignore_columns:
            raise ConfigError(
                "`{column}` of {label} is in both `columns` and `ignore_columns`",
                code="conflicting-settings",
                fix="remove it from one of them",
                column=column,
                label=label,
            )


def rename_columns(
    row: Row, columns: Mapping[str, str], ignore_columns: Collection[str], tally: Tally
) -> Row:
    """Return a row under the expected names, without the columns to ignore. A column that is mapped
    to another name is not read under its usual name.

    Args:
        columns: `{expected name: name in the data}`.
    """
    if ignore_columns:
        tally.ignored.update(name for name in ignore_columns if name in row)
        row = {name: value for name, value in row.items() if name not in ignore_columns}
    if not columns:
        return row
    skipped = {expected for expected, name in columns.items() if name == ""}
    tally.unused.update(name for name in skipped if not is_missing(row.get(name)))
    skipped |= set(columns.values()) - set(columns)
    renamed = {expected: row[name] for expected, name in columns.items() if name in row}
    tally.mapped.update(columns[expected] for expected in renamed)
    return {**{key: value for key, value in row.items() if key not in skipped}, **renamed}


def mapping_of(*names: str) -> dict[str, str]:
    """Return the form of a mapping of columns to the expected names."""
    return dict.fromkeys(names, "YOURS")


def suggested_columns(names: Iterable[str]) -> dict[str, str]:
    """Return the mapping of columns whose names differ from expected ones only in upper and lower
    case and in white space, or nothing if fewer than two do."""
    known = EXPECTED | {"chosen", "rejected", "label"}
    simple = {name: re.sub(r"[\s_-]+", "_", name.strip().lower()) for name in names}
    mapping = {short: name for name, short in simple.items() if short != name and short in known}
    return mapping if len(mapping) > 1 or len(simple) == 1 else {}


def columns_fix(mapping: Mapping[str, str]) -> str:
    """Return how to name the columns of a source.

    Args:
        mapping: `{expected name: name in the data}`.
    """
    shown = ", ".join(f"{expected}: {name}" for expected, name in mapping.items())
    return f"map the columns: `dataset: {{path: ..., columns: {{{shown}}}}}`"
