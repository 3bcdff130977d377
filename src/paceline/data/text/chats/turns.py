"""Turns of a chat as they are in a row: find their roles, join a prompt with an answer, and tell a
list that is stored as JSON text from a text that looks like one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.config.chat_names import CALL
from paceline.data.sources.rows import RepeatedKey, parse_cell, parse_json, repeated_in_cell

#: Keys of turns with a question and its answer, as ms-swift allows.
ASKS = ("human", "user", "query", "instruction", "question", "prompt")
ANSWERS = ("assistant", "gpt", "response", "output", "answer", "bot")
_CALL_KEYS = ("tool_calls", "function_call")
_ANSWER_ROLES = ("assistant", CALL)


@dataclass(frozen=True)
class TurnKeys:
    """The keys and the roles of a source's turns.

    Args:
        role, content: the names of the keys, the first one that a turn has counts.
        roles: name in the data, in lower case, to role.
    """

    role: tuple[str, ...]
    content: tuple[str, ...]
    roles: Mapping[str, str]

    def role_of(self, turn: Any) -> str | None:
        """Return the role of a turn, or None if it has none that is known."""
        name = first_value(turn, self.role) if isinstance(turn, dict) else None
        return self.roles.get(name.lower()) if isinstance(name, str) else None

    def are_messages(self, value: Any) -> bool:
        """Return whether a value is a list of messages: objects with a role and a content."""
        return isinstance(value, list) and bool(value) and all(map(self._is_message, value))

    def _is_message(self, turn: Any) -> bool:
        return (
            isinstance(turn, dict)
            and any(isinstance(turn.get(key), str) for key in self.role)
            # `text` beside a role is a content only in a column of chats.
            and any(key in turn for key in (*self.content, *_CALL_KEYS) if key != "text")
        )

    def unpack(self, value: Any) -> Any:
        """Parse messages that are stored as JSON text, as in CSV files. Any other text is a text,
        such as ``[3, 1]`` or a list of other objects, and is returned as is.

        Raises:
            Unsupported: one of the messages has a key twice.
        """
        if not _looks_like_list(value):
            return value
        try:
            parsed = parse_json(value, checks_text=False)
        except RepeatedKey as error:
            if self.are_messages(json.loads(value)):
                raise repeated_in_cell(error) from error
            return value
        except (ValueError, RecursionError):
            return value
        return parsed if self.are_messages(parsed) else value

    def ends_with_answer(self, turns: list[Any]) -> bool:
        """Return whether the last turn is an answer or a tool call."""
        last = turns[-1] if turns else None
        if self.role_of(last) is not None:
            return self.role_of(last) in _ANSWER_ROLES
        return isinstance(last, dict) and any(key in last for key in ANSWERS)

    def without_answer(self, turns: list[Any]) -> list[Any]:
        """Return the turns before the answer, or the call, that they end with."""
        end = len(turns)
        while end and self.role_of(turns[end - 1]) in _ANSWER_ROLES:
            end -= 1
        return turns[:end]

    def are_answers(self, turns: list[Any]) -> bool:
        """Return whether no turn is a question or a system message: the turns need a prompt."""
        return all(self.role_of(turn) in (*_ANSWER_ROLES, "tool") for turn in turns)

    def are_same(self, first: list[Any], second: list[Any]) -> bool:
        """Return whether turns have the same roles and contents, whatever their keys are."""
        return [self._identity(turn) for turn in first] == [self._identity(turn) for turn in second]

    def _identity(self, turn: Any) -> tuple[str | None, Any]:
        content = first_value(turn, self.content) if isinstance(turn, dict) else turn
        is_text = isinstance(content, str) and content.strip()
        return self.role_of(turn), content.strip() if is_text else turn

    def join(self, prompt: list[Any], answer: list[Any]) -> list[Any]:
        """Return the turns of a prompt and an answer. The answer may repeat the prompt, with or
        without its system message, and the prompt may already end with the answer. A chat of its
        own, which begins with a question although the prompt ends with one, has its prompt."""
        if self.ends_with_answer(prompt) and self.are_same(prompt[-len(answer) :], answer):
            return prompt
        start, system = self._split_system(prompt)
        rest, own_system = self._split_system(answer)
        repeats = len(rest) > len(start) and self.are_same(rest[: len(start)], start)
        begins_anew = (
            bool(start and rest)
            and self.role_of(start[-1]) == self.role_of(rest[0]) == "user"
            and self.ends_with_answer(rest)
        )
        if start and (repeats or begins_anew):
            return [*(system or own_system), *rest]
        if system and self.are_same(system, own_system):
            return [*prompt, *rest]
        return [*prompt, *answer]

    def _split_system(self, turns: list[Any]) -> tuple[list[Any], list[Any]]:
        """Return the turns after the system message, and the system message as a list."""
        has_system = bool(turns) and self.role_of(turns[0]) == "system"
        return turns[has_system:], turns[:has_system]


def first_value(turn: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    """Return the value of the first of the keys whose value is not null."""
    for key in keys:
        value = turn.get(key)
        if value is not None:
            return value
    return None


def unpack_list(value: Any) -> Any:
    """Parse a list that is stored as JSON text, as in CSV files, of a column that has only lists.
    Other values are returned as is.

    Raises:
        Unsupported: an object of the list has a key twice.
    """
    if not _looks_like_list(value):
        return value
    try:
        return parse_cell(value)
    except (ValueError, RecursionError):
        return value


def _looks_like_list(value: Any) -> bool:
    return isinstance(value, str) and value.lstrip().startswith("[")
