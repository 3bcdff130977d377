"""From a row, whatever its columns, to a chat, a prompt with its completion, or text."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.core.errors import ConfigError, nearest
from paceline.data.readers import DOCUMENT

Message = dict[str, str]


@dataclass
class Sample:
    """A row in its canonical shape: exactly one of ``messages``, ``pair`` (prompt, completion) and ``text`` is set.

    ``is_document``: the text is a whole file, to be cut into samples. ``left_off``: turns after the last answer.
    """

    messages: list[Message] | None = None
    pair: tuple[str, str] | None = None
    text: str | None = None
    is_document: bool = False
    left_off: int = 0


class Malformed(Exception):
    """A row that cannot be used; the text is the reason it is counted under."""


#: Names a column goes by, the usual one first.
_CHAT = ("messages", "conversations", "conversation", "dialogue", "dialog", "chat")
_SYSTEM = ("system", "system_prompt")
_INPUT = ("input", "context")
_ANSWER = ("output", "response", "completion", "answer")
_PAIRS = (
    ("prompt", "completion"), ("question", "answer"), ("query", "response"), ("prompt", "response"), ("question", "response"),
    ("query", "answer"), ("prompt", "answer"), ("input", "output"), ("problem", "solution"), ("prompt", "output"),
)  # fmt: skip
_TEXT = ("text", "content", "story", "document")
_ROLES = {
    "system": "system", "developer": "system", "user": "user", "human": "user", "prompter": "user", "assistant": "assistant",
    "gpt": "assistant", "bot": "assistant", "model": "assistant", "chatgpt": "assistant", "bing": "assistant",
    "bard": "assistant", "tool": "tool", "observation": "tool", "ipython": "tool",
}  # fmt: skip
_UNUSED = ("tools", "functions", "images", "image", "videos", "audios", "weight", "rejected", "rejected_response")

FORMATS = {
    "alpaca": "instruction, output (and input, system, history)",
    "messages": "messages: a list of {role, content}",
    "sharegpt": "conversations: a list of {from, value}",
    "prompt_completion": "prompt, completion (or question, answer; query, response; prompt, response)",
    "text": "text",
}
_EXPECTED = {*_CHAT, *_SYSTEM, *_INPUT, *_ANSWER, *_TEXT, *(one for pair in _PAIRS for one in pair), "instruction", "history",
             "role", "content", "from", "value"}  # fmt: skip


def find_format(columns: Mapping[str, Any], pretrain: bool = False) -> str | None:
    """The format that a row's columns fit, or None. Where several fit: chats, alpaca, prompt and completion, text;
    for pretraining text comes first."""
    names = set(columns)
    if DOCUMENT in names or (pretrain and "text" in names):
        return "text"
    for key in _CHAT:
        if key in names and isinstance(_unpacked(columns[key]), list):
            first = next(iter(_unpacked(columns[key])), None)
            return "sharegpt" if isinstance(first, dict) and "from" in first else "messages"
    if "instruction" in names and names & set(_ANSWER):
        return "alpaca"
    if any(prompt in names and answer in names for prompt, answer in _PAIRS):
        return "prompt_completion"
    if names & set(_CHAT):  # the column is there, this row's value is none
        return "messages"
    return "text" if names & set(_TEXT) else None


def fits_as(columns: Mapping[str, Any]) -> list[str]:
    """All formats whose columns these are, for a message."""
    names = set(columns)
    fitting = {
        "alpaca": "instruction" in names and bool(names & set(_ANSWER)),
        "prompt_completion": any(prompt in names and answer in names for prompt, answer in _PAIRS),
        "text": bool(names & set(_TEXT)) or DOCUMENT in names,
    }
    chats = [find_format({key: columns[key]}) for key in _CHAT if key in names]
    return [*dict.fromkeys(one for one in chats if one), *(name for name, fits in fitting.items() if fits)]


@dataclass
class Converter:
    """Turns rows of one source into samples.

    Args:
        label: the source, for messages.
        named: a format, or "auto" to find it from each row's columns.
        columns: `{expected: theirs}`.
        system: system message for rows that have none.
        pretrain: a text column comes before all others.

    Attributes:
        seen: formats met, with how many rows.
        unused: columns and keys that hold something which is not used, with how many rows.
    """

    label: str
    named: str = "auto"
    columns: dict[str, str] = field(default_factory=dict)
    system: str | None = None
    pretrain: bool = False
    seen: Counter[str] = field(default_factory=Counter)
    unused: Counter[str] = field(default_factory=Counter)
    misfits: Counter[tuple[str, ...]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        for name in self.columns:
            if name not in _EXPECTED:
                near = nearest(name, _EXPECTED)
                raise ConfigError(
                    f"`columns: {{{name}: {self.columns[name]}}}` of {self.label}: no format has a column `{name}`",
                    allowed="the expected name on the left, yours on the right; expected are " + ", ".join(sorted(_EXPECTED)),
                    fix=f"write `{near}`" if near else None,
                )

    def __call__(self, row: Any) -> Sample:
        """One row's sample.

        Raises:
            Malformed: the row cannot be used.
        """
        if not isinstance(row, dict):
            raise Malformed("not an object with columns")
        row = self._renamed(row)
        kind = find_format(row, self.pretrain) if self.named == "auto" else self.named
        if kind is None or (self.named != "auto" and DOCUMENT not in row and not self._fits(row, kind)):
            self.misfits[tuple(map(str, row))] += 1
            raise Malformed("columns fit no format" if self.named == "auto" else f"columns do not fit `{self.named}`")
        self.unused.update(key for key in _UNUSED if not _is_missing(row.get(key)))
        self.seen[kind] += 1
        if DOCUMENT in row:
            return Sample(text=row[DOCUMENT], is_document=True)
        if kind == "text":
            return Sample(text=_text(row, _TEXT, "text"))
        if kind == "prompt_completion":
            return self._pair(row)
        return self._chat(_alpaca(row) if kind == "alpaca" else self._turns(row), row)

    def _renamed(self, row: dict[str, Any]) -> dict[str, Any]:
        """The row under the expected names; an optional column that is read under another name is not read under its own."""
        if not self.columns:
            return row
        left_out = {expected for expected, theirs in self.columns.items() if theirs == ""}
        left_out |= set(self.columns.values()) & {*_INPUT, *_SYSTEM, "history"} - set(self.columns)
        named = {expected: row[theirs] for expected, theirs in self.columns.items() if theirs in row}
        return {**{key: value for key, value in row.items() if key not in left_out}, **named}

    def _fits(self, row: dict[str, Any], kind: str) -> bool:
        fitting = fits_as(row)
        return kind in fitting or (kind in ("messages", "sharegpt") and bool(set(row) & set(_CHAT)))

    def _pair(self, row: dict[str, Any]) -> Sample:
        prompt_key, answer_key = next(pair for pair in _PAIRS if pair[0] in row and pair[1] in row)
        prompt, answer = _unpacked(row[prompt_key]), _unpacked(row[answer_key])
        if isinstance(prompt, list) and isinstance(answer, list):  # both as chats
            return self._chat([self._message(one) for one in [*prompt, *answer]], row)
        pair = (_text(row, (prompt_key,), "prompt"), _text(row, (answer_key,), "answer"))
        system = _optional(row, _SYSTEM)
        if system is not None:
            return self._chat(
                [
                    {"role": "system", "content": system},
                    {"role": "user", "content": pair[0]},
                    {"role": "assistant", "content": pair[1]},
                ],
                row,
            )
        return Sample(pair=pair)

    def _turns(self, row: dict[str, Any]) -> list[Message]:
        key = next(one for one in _CHAT if one in row)
        turns = _unpacked(row[key])
        if _is_missing(turns) or turns == []:
            raise Malformed("no messages")
        if not isinstance(turns, list):
            raise Malformed("messages are no list")
        return [self._message(one) for one in turns]

    def _message(self, turn: Any) -> Message:
        if not isinstance(turn, dict):
            raise Malformed("a message is no object")
        role = turn.get(self.columns.get("role", "role"), turn.get(self.columns.get("from", "from")))
        content = turn.get(self.columns.get("content", "content"), turn.get(self.columns.get("value", "value")))
        if turn.get("tool_calls") or role in ("function_call", "function"):
            raise Malformed("tool calls")
        if not isinstance(role, str) or role.lower() not in _ROLES:
            raise Malformed("unknown role")
        if isinstance(content, list):  # the parts of a multi-modal message
            parts = [one.get("text") if isinstance(one, dict) and one.get("type") == "text" else None for one in content]
            if not all(isinstance(one, str) for one in parts):
                raise Malformed("a message that is not text")
            content = "".join(parts)
        if not isinstance(content, str) and not _is_missing(content):
            raise Malformed("a message that is not text")
        return {"role": _ROLES[role.lower()], "content": "" if _is_missing(content) else content}

    def _chat(self, messages: list[Message], row: dict[str, Any]) -> Sample:
        last = max((index for index, one in enumerate(messages) if one["role"] == "assistant"), default=-1)
        if last < 0:
            raise Malformed("no assistant turn")
        used = messages[: last + 1]
        for one in used:
            if not one["content"].strip() and one["role"] in ("assistant", "user"):
                raise Malformed("empty answer" if one["role"] == "assistant" else "empty prompt")
        if used[0]["role"] != "system":
            system = _optional(row, _SYSTEM) or self.system
            if system:
                used = [{"role": "system", "content": system}, *used]
        return Sample(messages=used, left_off=len(messages) - last - 1)


def as_chat(sample: Sample, system: str | None) -> list[Message]:
    """A prompt and its completion as a chat of two turns, the system message before them where there is one."""
    assert sample.pair is not None
    start = [{"role": "system", "content": system}] if system else []
    return [*start, {"role": "user", "content": sample.pair[0]}, {"role": "assistant", "content": sample.pair[1]}]


def _alpaca(row: dict[str, Any]) -> list[Message]:
    instruction = _optional(row, ("instruction",)) or ""
    more = _optional(row, _INPUT) or ""
    answer = _text(row, _ANSWER, "answer")
    question = "\n".join(one for one in (instruction, more) if one.strip())
    if not question:
        raise Malformed("empty prompt")
    messages = []
    history = _unpacked(row.get("history"))
    for turn in history if isinstance(history, list) else []:
        if not (isinstance(turn, list | tuple) and len(turn) == 2 and all(isinstance(one, str) for one in turn)):
            raise Malformed("history is no list of (question, answer)")
        messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    return [*messages, {"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _unpacked(value: Any) -> Any:
    """A list that a CSV file had to carry as JSON text."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _is_missing(value: Any) -> bool:
    return value is None or value != value or value == "" or value == []  # NaN is how tables spell a gap


def _text(row: dict[str, Any], keys: tuple[str, ...], what: str) -> str:
    """The first of the columns that is there, as text; a number counts as its digits."""
    value = next((row[key] for key in keys if key in row and not _is_missing(row[key])), None)
    if value is None:
        raise Malformed(f"empty {what}")
    if isinstance(value, int | float):
        value = str(value)
    if not isinstance(value, str):
        raise Malformed(f"{what} is not text")
    if not value.strip():
        raise Malformed(f"empty {what}")
    return value


def _optional(row: dict[str, Any], keys: tuple[str, ...]) -> str | None:
    value = next((row[key] for key in keys if not _is_missing(row.get(key))), None)
    if value is None:
        return None
    if not isinstance(value, str | int | float):
        raise Malformed(f"{keys[0]} is not text")
    return str(value)
