"""Convert the turns of a chat, with various names of keys and roles, to messages for chat
templates."""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.config.chat_names import CALL, ROLES, STANDARD_ROLES
from paceline.core.errors import ConfigError
from paceline.data.sources.rows import MalformedRow, Row, Unsupported, holds_nothing, is_missing
from paceline.data.text.chats.tool_calls import ChatMessage, name_calls, read_calls
from paceline.data.text.chats.turns import ANSWERS, ASKS, TurnKeys, first_value, unpack_list
from paceline.data.text.columns import Tally
from paceline.data.text.refused_rows import (
    MEDIA,
    TEXT_PARTS,
    check_column,
    check_text,
    other_part,
    two_answers,
)

#: Keys of a message that enable or disable the loss of a turn.
_SWITCHES = ("weight", "loss", "train", "training", "trainable", "loss_weight", "loss_scale")
_USER_SWITCHES = ("train", "training", "trainable")
_DETAILS = ("train_detail", "training_detail")
_REASONING = ("reasoning_content", "thinking", "reasoning")
_NOT_TEXT = "a message is not text"
#: Limit of the sets of keys that a reader remembers.
_MAX_SHAPES = 4096


@dataclass
class Chat:
    """Messages, and the indices of the assistant turns whose loss the data disables."""

    messages: list[ChatMessage]
    excluded: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class _TurnShape:
    """The form of turns with the same keys.

    Args:
        role, content: their keys, for turns without other keys; else None.
        extra: the other keys.
        is_exchange: the turn is a question with its answer, ``{"human": ..., "assistant": ...}``,
            as ms-swift allows.
    """

    role: str | None
    content: str | None
    extra: tuple[str, ...]
    is_exchange: bool


@dataclass
class MessageReader:
    """Read the turns of one source.

    Args:
        columns: `{expected name: name in the data}`; entries for keys of a message are used.
        roles: additional names of roles: name in the data to one of :data:`STANDARD_ROLES`.
        ignored: keys to ignore.
        supports: returns whether the chat template uses `tool_calls` or `reasoning_content`.
        tally: counts the unused and the ignored keys of messages.
        check_text: refuses prompts with images, video or audio.

    Attributes:
        keys: the names of the keys and roles of turns.
    """

    columns: Mapping[str, str]
    roles: Mapping[str, str]
    ignored: Collection[str]
    supports: Callable[[str], bool]
    tally: Tally = field(default_factory=Tally)
    check_text: Callable[[str], None] = check_text
    _shapes: dict[tuple[str, ...], _TurnShape] = field(default_factory=dict)

    def __post_init__(self) -> None:
        name = self.columns.get
        self.keys = TurnKeys(
            tuple(dict.fromkeys((name("role", "role"), name("from", "from")))),
            tuple(dict.fromkeys((name("content", "content"), name("value", "value"), "text"))),
            {**ROLES, **{name.lower(): role for name, role in self.roles.items()}},
        )
        mapped = {name: expected for expected, name in self.columns.items()}
        self._meaning = {**{key: key for key in (*_SWITCHES, *_DETAILS, *_REASONING)}, **mapped}
        self._checks_text = not MEDIA & set(self.ignored)

    def __call__(self, turns: list[Any]) -> Chat:
        """Read the turns of a row.

        Raises:
            MalformedRow: the row cannot be used.
            Unsupported: the dataset needs another kind of training.
        """
        chat, roles = Chat([]), self.keys.roles
        has_calls = False
        previous_was_call = False
        for turn in turns:
            if not isinstance(turn, dict):
                raise MalformedRow("a message is not an object")
            keys = tuple(turn)
            shape = self._shapes.get(keys) or self._shape(keys)
            if shape.role is not None:  # the fast path: only a role and a content
                role_name, content = turn[shape.role], turn[shape.content]
                role = roles.get(role_name) if role_name.__class__ is str else None
                if role is not None and role != CALL and content.__class__ is str:
                    if self._checks_text and role != "assistant" and "<" in content:
                        self.check_text(content)
                    chat.messages.append({"role": role, "content": content})
                    previous_was_call = False
                    continue
            if shape.is_exchange:
                self._add_exchange(turn, chat)
                continue
            message, trains, is_call = self._message(turn, shape.extra)
            has_calls |= "tool_calls" in message
            last = chat.messages[-1] if chat.messages else None
            is_excluded = message["role"] == "assistant" and trains is False
            # Parallel calls, and an answer followed by a call, form one assistant turn.
            joins = (
                is_call
                and last is not None
                and last["role"] == "assistant"
                and is_excluded == (len(chat.messages) - 1 in chat.excluded)
            )
            if joins and last is not None and ("tool_calls" not in last or previous_was_call):
                last.setdefault("tool_calls", []).extend(message["tool_calls"])
            else:
                if is_excluded:
                    chat.excluded.add(len(chat.messages))
                chat.messages.append(message)
            previous_was_call = is_call
        if has_calls:
            name_calls(chat.messages)
        return chat

    # -- one turn
    def _shape(self, keys: tuple[str, ...]) -> _TurnShape:
        roles = [key for key in self.keys.role if key in keys]
        contents = [key for key in self.keys.content if key in keys]
        # `text` is the content only if there is no other content.
        used = contents if contents[1:] != ["text"] else contents[:1]
        extra = tuple(key for key in keys if key not in (*roles, *used) and key not in self.ignored)
        self.tally.ignored.update(key for key in keys if key in self.ignored)
        is_plain = len(roles) == len(contents) == 1 and not extra
        shape = _TurnShape(
            roles[0] if is_plain else None,
            contents[0] if is_plain else None,
            extra,
            not roles and any(key in keys for key in ANSWERS),
        )
        if len(self._shapes) >= _MAX_SHAPES:
            self._shapes.clear()
        self._shapes[keys] = shape
        return shape

    def _message(self, turn: Row, extra: tuple[str, ...]) -> tuple[ChatMessage, bool | None, bool]:
        """Return the message, whether the data enables its loss (None: not specified), and whether
        the turn is only a tool call."""
        role = self.keys.role_of(turn)
        if role is None:
            raise MalformedRow("unknown role")
        content = first_value(turn, self.keys.content)
        if role == CALL:
            self._require("tool_calls")
            calls = read_calls(content)
            message: ChatMessage = {"role": "assistant", "content": "", "tool_calls": calls}
        else:
            text = content if isinstance(content, str) else _as_text(content, role)
            message = {"role": role, "content": text}
            if self._checks_text and role != "assistant" and "<" in message["content"]:
                self.check_text(message["content"])
        trains = None
        for key in extra:
            value = turn[key]
            if value is not None and value != "" and value != []:
                switch = self._add_extra(message, key, value)
                trains = switch if switch is not None else trains
        return message, trains, role == CALL

    def _add_extra(self, message: ChatMessage, key: str, value: Any) -> bool | None:
        """Add an extra key to a message. Return whether it enables the loss, or None."""
        name = self._meaning.get(key, key)
        if name in _SWITCHES:
            return _switch(message["role"], key, name, value)
        if name in _DETAILS:
            if not holds_nothing(value):
                raise Unsupported(
                    f"the messages select parts of a turn to train on (`{key}`), which is not"
                    " supported: Paceline trains on entire turns",
                    allowed="true or false for an entire turn (`weight`, `loss`, `train`)",
                    fix=(
                        f"split these turns, or set `ignore_columns: [{key}]` to train on entire"
                        " turns"
                    ),
                )
        elif name in ("tool_calls", "function_call"):
            if not holds_nothing(value) and message["role"] == "assistant":
                self._require("tool_calls")
                message["tool_calls"] = read_calls(value)
        elif name in _REASONING and message["role"] == "assistant":
            if isinstance(value, str):
                self._require("reasoning_content", key)
                message["reasoning_content"] = message["thinking"] = value
        elif name == "name":
            message["name"] = value
        elif name == "tool_call_id":
            message["tool_call_id"] = value
        elif name in MEDIA:
            check_column(key, value)
        elif not holds_nothing(value):
            if name in ("tools", "functions"):
                raise Unsupported(
                    f"a message has the key `{key}`, which is supported only as a column of the"
                    " row",
                    fix=f"move it to a column `tools`, or set `ignore_columns: [{key}]`",
                )
            self.tally.unused[f"{key} (of messages)"] += 1
        return None

    def _require(self, name: str, key: str | None = None) -> None:
        if not self.supports(name):
            raise template_lacks(name, key)

    def _add_exchange(self, turn: Row, chat: Chat) -> None:
        for keys, role in ((ASKS, "user"), (ANSWERS, "assistant")):
            text = as_text(first_value(turn, keys))
            if not isinstance(text, str) and not is_missing(text):
                raise MalformedRow(_NOT_TEXT)
            if role == "user" and self._checks_text and text:
                self.check_text(text)
            chat.messages.append({"role": role, "content": "" if is_missing(text) else text})


def _as_text(content: Any, role: str) -> str:
    """Return the text of a content that is not a string: an empty value, the parts of a multimodal
    message, or the result of a tool."""
    if is_missing(content):
        return ""
    if isinstance(text := as_text(content), str):
        return text
    if isinstance(content, list) and all(
        isinstance(part, dict) and "type" in part for part in content
    ):
        for part in content:
            if part["type"] not in TEXT_PARTS:
                raise other_part(part["type"])
        texts = [part.get("text", part.get("value")) for part in content]  # LLaMA-Factory v1
        if not all(isinstance(text, str) or text is None for text in texts):
            raise MalformedRow(_NOT_TEXT)
        return "".join(text or "" for text in texts)
    if role == "tool":
        return json.dumps(content, ensure_ascii=False)
    if isinstance(content, list) and all(isinstance(part, str) for part in content):
        return "".join(content)
    raise MalformedRow(_NOT_TEXT)


def _switch(role: str, key: str, name: str, value: Any) -> bool | None:
    if value != value:  # NaN, an empty cell of a table
        return None
    number = (
        {"true": 1, "false": 0, "1": 1, "0": 0}.get(value.strip().lower(), value)
        if isinstance(value, str)
        else value
    )
    if number not in (0, 1):
        raise Unsupported(
            f"the messages have `{key}: {value}`; loss weights of turns are not supported",
            allowed="0 or false to exclude a turn from the loss, 1 or true to include it",
            fix=f"round the weights to 0 and 1, or set `ignore_columns: [{key}]`",
        )
    if role != "assistant":
        if number and name in _USER_SWITCHES:
            raise Unsupported(
                f"the messages enable the loss for a turn of the role `{role}` (`{key}:"
                f" {value}`), which is not supported: Paceline trains on assistant turns",
                fix=(
                    f"set `ignore_columns: [{key}]`, or `train_args.train_on_inputs: true` to train"
                    " on every token"
                ),
            )
        return None
    return bool(number)


def template_lacks(name: str, key: str | None = None) -> Unsupported:
    """Return the error for data that the chat template would omit."""
    column = key or name
    fix = "use a chat template that supports it (`chat_template: FILE.jinja`)"
    if name != "tool_calls":
        fix += f", or set `ignore_columns: [{column}]` to train without it"
    return Unsupported(
        f"the rows have `{column}`, but the chat template does not use `{name}`", fix=fix
    )


def role_names(roles: Mapping[str, str | list[str]], label: str) -> dict[str, str]:
    """Return the inverse of `{role: names in the data}`.

    Raises:
        ConfigError: a role is unknown.
    """
    role_by_name: dict[str, str] = {}
    for role, names in roles.items():
        if role not in STANDARD_ROLES:
            raise ConfigError(
                "`roles: {{role}: ...}` of {label}: unknown role `{role}`",
                code="unknown-role",
                allowed=", ".join(STANDARD_ROLES),
                role=role,
                label=label,
            )
        role_by_name.update(dict.fromkeys([names] if isinstance(names, str) else names, role))
    return role_by_name


def earlier_turns(row: Row, check_text: Callable[[str], None]) -> list[ChatMessage]:
    """Return the turns of the column `history`: a list of (question, answer), or of messages, whose
    texts ``check_text`` refuses or accepts."""
    history = unpack_list(row.get("history"))
    if holds_nothing(history):
        return []
    malformed = MalformedRow("history is not a list of (question, answer)")
    if not isinstance(history, list):
        raise malformed
    messages: list[ChatMessage] = []
    for turn in history:
        if isinstance(turn, dict):
            reader = MessageReader({}, {}, (), lambda name: False, check_text=check_text)
            messages += reader([turn]).messages
        elif (
            isinstance(turn, list | tuple)
            and len(turn) == 2
            and all(isinstance(as_text(text), str) for text in turn)
        ):
            messages += [
                {"role": "user", "content": as_text(turn[0])},
                {"role": "assistant", "content": as_text(turn[1])},
            ]
        else:
            raise malformed
    return messages


def as_text(value: Any) -> Any:
    """Return a number or a truth value as the text that JSON has for it; other values as is."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int | float) else value


def read_text(row: Row, keys: tuple[str, ...], what: str) -> str:
    """Return the first of the columns that is not empty, as text. Numbers are converted.

    Raises:
        MalformedRow: all columns are empty, or the value is not text; ``what`` names it.
    """
    key = next((key for key in keys if key in row and not is_missing(row[key])), None)
    if key is None:
        raise MalformedRow(f"empty {what}")
    value = as_text(row[key])
    if not isinstance(value, str):
        if (
            what == "answer"
            and isinstance(value, list)
            and len(value) == 2
            and all(isinstance(text, str) for text in value)
        ):
            raise two_answers(f"`{key}` is a list of two")
        raise MalformedRow(f"{what} is not text")
    if not value.strip():
        raise MalformedRow(f"empty {what}")
    return value


def read_optional_text(row: Row, keys: tuple[str, ...]) -> str | None:
    """Return the first of the columns that is not empty, as text, or None."""
    value = next((row[key] for key in keys if not is_missing(row.get(key))), None)
    if value is None:
        return None
    text = as_text(value)
    if not isinstance(text, str):
        raise MalformedRow(f"{keys[0]} is not text")
    return text
