"""From a row, whatever its columns, to a chat, a prompt with its completion, or text."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.core.errors import ConfigError, did_you_mean
from paceline.data.sources.readers import DOCUMENT
from paceline.data.sources.rows import MalformedRow, Row, Unsupported, holds_nothing, is_missing
from paceline.data.text.chat_template import ChatTemplate
from paceline.data.text.messages import (
    Chat,
    MessageReader,
    earlier_turns,
    read_optional_text,
    read_text,
    role_names,
    template_lacks,
    unpack_list,
)
from paceline.data.text.refused_rows import (
    LABELS,
    MEDIA,
    REJECTED,
    check_column,
    check_label,
    check_pairs,
    check_text,
    check_without_format,
)
from paceline.data.text.tool_calls import Message, read_tools


@dataclass
class Sample:
    """A row in its canonical shape: exactly one of ``messages``, ``pair`` (prompt, completion) and
    ``text`` is set.

    Args:
        is_document: the text is a whole file, to be cut into samples.
        left_off: turns after the last answer.
        tools: what the chat template gets as `tools`.
        off: indices of the messages on which the data switches the loss off.
    """

    messages: list[Message] | None = None
    pair: tuple[str, str] | None = None
    text: str | None = None
    is_document: bool = False
    left_off: int = 0
    tools: list[Row] | None = None
    off: frozenset[int] = frozenset()


#: Names a column goes by, the usual one first.
_CHAT = ("messages", "conversations", "conversation", "dialogue", "dialog", "chat")
_SYSTEM = ("system", "system_prompt")
_INPUT = ("input", "context")
_ANSWER = ("output", "response", "completion", "answer")
_PAIRS = (
    ("prompt", "completion"), ("question", "answer"), ("query", "response"), ("prompt", "response"),
    ("question", "response"),
    ("query", "answer"), ("prompt", "answer"), ("input", "output"), ("problem", "solution"),
    ("prompt", "output"),
)  # fmt: skip
_TEXT = ("text", "content", "story", "document")
_TOOLS = ("tools", "functions")
_ALPACA = ("instruction", *_INPUT, *_ANSWER, *_SYSTEM, "history", "reasoning_content")
#: Columns that change what a row means: one that is not empty and not used is an error, unless
#: `ignore_columns` lists it.
MUST_BE_USED = ("history", "reasoning_content", "rejected", "rejected_response", *_TOOLS)

FORMATS = {
    "alpaca": "instruction, output (and input, system, history)",
    "messages": "messages: a list of {role, content}",
    "sharegpt": "conversations: a list of {from, value}",
    "prompt_completion": (
        "prompt, completion (or question, answer; query, response; prompt, response)"
    ),
    "text": "text",
}
_EXPECTED = {
    *_CHAT,
    *_SYSTEM,
    *_INPUT,
    *_ANSWER,
    *_TEXT,
    *(name for pair in _PAIRS for name in pair),
    *MUST_BE_USED,
    *MEDIA,
    *LABELS,
    *("instruction", "chosen", "rejected", "role", "content", "from", "value", "weight"),
    *("train_detail", "tool_calls", "tool_call_id", "name"),
}


def find_format(columns: Row, pretrain: bool = False) -> str | None:
    """The format that a row's columns fit, or None. Where several fit: chats, alpaca, prompt and
    completion, text; for pretraining text comes first."""
    names = set(columns)
    if DOCUMENT in names or (pretrain and "text" in names):
        return "text"
    for key in _CHAT:
        if key in names and isinstance(turns := unpack_list(columns[key]), list):
            first = next(iter(turns), None)
            return "sharegpt" if isinstance(first, dict) and "from" in first else "messages"
    if "instruction" in names and names & set(_ANSWER):
        return "alpaca"
    if any(prompt in names and answer in names for prompt, answer in _PAIRS):
        return "prompt_completion"
    if names & set(_CHAT):  # the column is there, this row's value is none
        return "messages"
    return "text" if names & set(_TEXT) else None


def fits_as(columns: Row) -> list[str]:
    """All formats whose columns these are, for a message."""
    names = set(columns)
    fitting = {
        "alpaca": "instruction" in names and bool(names & set(_ANSWER)),
        "prompt_completion": any(prompt in names and answer in names for prompt, answer in _PAIRS),
        "text": bool(names & set(_TEXT)) or DOCUMENT in names,
    }
    chats = [find_format({key: columns[key]}) for key in _CHAT if key in names]
    return [
        *dict.fromkeys(chat for chat in chats if chat),
        *(name for name, fits in fitting.items() if fits),
    ]


@dataclass(frozen=True)
class _Watched:
    """Columns of rows with the same names that need a look at their value."""

    rejected: tuple[str, ...]
    labels: tuple[str, ...]
    media: tuple[str, ...]
    must_be_used: tuple[str, ...]
    chat: tuple[str, ...]
    kind: str | None  # the format, if these names decide it and no value is null


@dataclass
class RowConverter:
    """Turns rows of one source into samples.

    Args:
        label: the source, for messages.
        named: a format, or "auto" to find it from each row's columns.
        columns: `{expected: theirs}`.
        system: system message for rows that have none.
        pretrain: a text column comes before all others, and every token carries loss.
        ignore_columns: columns and keys of messages that are left out.
        roles: `{role: theirs}`: more names of the roles in chats.
        template: the chat template, which decides whether tools and reasoning can be used.

    Attributes:
        seen: formats met, with how many rows.
        unused: columns and keys that hold something which is not used, with how many rows.
        misfits: columns of rows that fit no format.
        ignored: columns and keys of `ignore_columns` that were met.
        binary_labels: rows with an integer `label` beside an answer: 0, 1, or another number.
    """

    label: str
    named: str = "auto"
    columns: dict[str, str] = field(default_factory=dict)
    system: str | None = None
    pretrain: bool = False
    ignore_columns: Collection[str] = ()
    roles: Mapping[str, str | list[str]] = field(default_factory=dict)
    template: ChatTemplate | None = None
    seen: Counter[str] = field(default_factory=Counter)
    unused: Counter[str] = field(default_factory=Counter)
    misfits: Counter[tuple[str, ...]] = field(default_factory=Counter)
    ignored: Counter[str] = field(default_factory=Counter)
    binary_labels: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        for name in self.columns:
            if name not in _EXPECTED:
                raise ConfigError(
                    f"`columns: {{{name}: {self.columns[name]}}}` of {self.label}: no format has a"
                    f" column `{name}`",
                    allowed="the expected name on the left, yours on the right; expected are "
                    + ", ".join(sorted(_EXPECTED)),
                    fix=did_you_mean(name, _EXPECTED),
                )
            if self.columns[name] in self.ignore_columns:
                raise ConfigError(
                    f"`{self.columns[name]}` of {self.label} is in `columns` and in"
                    " `ignore_columns`",
                    fix="keep one of them",
                )
        self._read = MessageReader(
            self.columns,
            role_names(self.roles, self.label),
            self.ignore_columns,
            self._supports,
            self.unused,
            self.ignored,
        )
        self._reads_media = bool(MEDIA & set(self.ignore_columns))
        self._plans: dict[tuple[str, ...], _Watched] = {}
        self._extra: dict[
            tuple[tuple[str, ...], tuple[str, ...]], tuple[tuple[str, tuple[str, ...]], ...]
        ] = {}

    def __call__(self, row: Any) -> Sample:
        """One row's sample.

        Raises:
            MalformedRow: the row cannot be used.
            Unsupported: the dataset must be refused: it asks for another kind of training.
        """
        if not isinstance(row, dict):
            raise MalformedRow("not an object with columns")
        if DOCUMENT in row:
            self.seen["text"] += 1
            return Sample(text=row[DOCUMENT], is_document=True)
        row = self._renamed(row)
        names = tuple(row)
        watched = self._plans.get(names) or self._watch(names)
        kind = self._kind(row, watched)
        self._check(row, watched, kind)
        if kind is None:
            kind = find_format(row, self.pretrain) if self.named == "auto" else None
        if kind is None:
            self.misfits[tuple(map(str, row))] += 1
            raise MalformedRow(
                "columns fit no format"
                if self.named == "auto"
                else f"columns do not fit `{self.named}`"
            )
        self.seen[kind] += 1
        used: tuple[str, ...]
        if kind == "text":
            sample = Sample(text=read_text(row, _TEXT, "text"))
            used = _TEXT
        elif kind == "prompt_completion":
            sample, used = self._pair(row)
        elif kind == "alpaca":
            chat = Chat(_alpaca(row))
            self._reasoning(row, chat)
            sample, used = self._chat(chat, row), _ALPACA
            self._check_prompts(row, _ALPACA[:3])
        else:
            key = _chat_column(row, watched.chat)
            sample, used = self._chat(self._turns(row, key), row), (key, *_SYSTEM)
        self._account(row, names, watched, sample, used)
        return sample

    # -- columns
    def _renamed(self, row: Row) -> Row:
        """The row under the expected names; an optional column that is read under another name is
        not read under its own."""
        if not self.columns and not self.ignore_columns:
            return row
        if self.ignore_columns:
            for name in self.ignore_columns:
                if name in row:
                    self.ignored[name] += 1
            row = {name: value for name, value in row.items() if name not in self.ignore_columns}
        if not self.columns:
            return row
        left_out = {expected for expected, theirs in self.columns.items() if theirs == ""}
        self.unused.update(name for name in left_out if not is_missing(row.get(name)))
        left_out |= set(self.columns.values()) & {*_INPUT, *_SYSTEM, "history"} - set(self.columns)
        named = {
            expected: row[theirs] for expected, theirs in self.columns.items() if theirs in row
        }
        return {**{key: value for key, value in row.items() if key not in left_out}, **named}

    def _watch(self, names: tuple[str, ...]) -> _Watched:
        mapped = set(self.columns.values()) - set(self.columns)
        free = [name for name in names if isinstance(name, str) and name not in mapped]
        self._plans[names] = watched = _Watched(
            rejected=tuple(name for name in free if name in REJECTED),
            labels=tuple(name for name in free if name in LABELS),
            media=tuple(name for name in free if name in MEDIA),
            must_be_used=tuple(name for name in free if name in MUST_BE_USED),
            chat=tuple(name for name in _CHAT if name in names),
            kind=find_format(dict.fromkeys(names, ""), self.pretrain),
        )
        return watched

    def _kind(self, row: Row, watched: _Watched) -> str | None:
        """The format of the columns that hold something, or None."""
        if self.named != "auto":
            return self.named if self._fits(row, self.named) else None
        if None in row.values():
            row = {name: value for name, value in row.items() if value is not None}
        elif not watched.chat:
            return watched.kind
        return find_format(row, self.pretrain)

    def _fits(self, row: Row, kind: str) -> bool:
        fitting = fits_as(row)
        return kind in fitting or (kind in ("messages", "sharegpt") and bool(set(row) & set(_CHAT)))

    def _check(self, row: Row, watched: _Watched, kind: str | None) -> None:
        """Refuse what another kind of training is for."""
        if watched.rejected:
            check_pairs(row, watched.rejected, kind is not None)
        for name in watched.labels:
            if kind not in (None, "text") or (
                kind is None and any(answer in row for answer in _ANSWER)
            ):
                check_label(row, name)
                if isinstance(row[name], int):
                    self.binary_labels[str(row[name]) if row[name] in (0, 1) else "other"] += 1
        for name in watched.media:
            check_column(name, row[name])
        if kind is None:
            check_without_format(row)

    def _account(
        self,
        row: Row,
        names: tuple[str, ...],
        watched: _Watched,
        sample: Sample,
        used: tuple[str, ...],
    ) -> None:
        """Take in the tools, refuse what must not be left out, and count the other columns that are
        not used."""
        for name in watched.must_be_used:
            if holds_nothing(row[name]) or name in used:
                continue
            if name not in _TOOLS or sample.text is not None:
                raise Unsupported(
                    f"the rows have `{name}`, which rows of their format do not use",
                    fix=(
                        f"set `ignore_columns: [{name}]` to train without it, or give the rows as"
                        " chats with it in place"
                    ),
                )
            if not self._supports("tools"):
                raise template_lacks("tools", name)
            sample.tools = [*(sample.tools or []), *read_tools(row[name])]
        if sample.tools and sample.pair is not None:
            sample.messages, sample.pair = as_chat(sample, self.system), None
        extra = self._extra.get((names, used))
        if extra is None:
            extra = self._extra[names, used] = self._extras(names, used)
        for name, before in extra:
            if not is_missing(row[name]) and (
                not before or any(not is_missing(row[other]) for other in before)
            ):
                self.unused[name] += 1

    def _extras(
        self, names: tuple[str, ...], used: tuple[str, ...]
    ) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Columns that may be unused, each with those of the same meaning that come before it: it
        is used if they are empty."""
        known = {*MUST_BE_USED, *self.columns.values()}
        found: list[tuple[str, tuple[str, ...]]] = [
            (name, ())
            for name in names
            if isinstance(name, str) and name not in used and name not in known
        ]
        # used, under the name that is expected
        renamed = set(self.columns.values()) - set(self.columns)
        for group in (_SYSTEM, _INPUT, _ANSWER, _TEXT):
            there = [
                name for name in group if name in names and name in used and name not in renamed
            ]
            found += [(name, tuple(there[:number])) for number, name in enumerate(there) if number]
        return tuple(found)

    def _supports(self, name: str) -> bool:
        # Without a template, `task: sft` refuses chats by itself; `task: pretrain` joins the texts
        # of the turns.
        return not self.pretrain if self.template is None else self.template.uses(name)

    # -- formats
    def _pair(self, row: Row) -> tuple[Sample, tuple[str, ...]]:
        pairs = [pair for pair in _PAIRS if pair[0] in row and pair[1] in row]
        prompt_key, answer_key = next(
            (pair for pair in pairs if row[pair[0]] is not None and row[pair[1]] is not None),
            pairs[0],
        )
        prompt, answer = unpack_list(row[prompt_key]), unpack_list(row[answer_key])
        if isinstance(prompt, list) and isinstance(answer, list):  # both as chats
            return self._chat(self._read([*prompt, *answer]), row), (
                prompt_key,
                answer_key,
                *_SYSTEM,
            )
        used = (prompt_key, answer_key, *_SYSTEM, "history", "reasoning_content")
        pair = (read_text(row, (prompt_key,), "prompt"), read_text(row, (answer_key,), "answer"))
        self._check_prompts(row, (prompt_key,))
        chat = Chat(
            [
                *earlier_turns(row),
                {"role": "user", "content": pair[0]},
                {"role": "assistant", "content": pair[1]},
            ]
        )
        self._reasoning(row, chat)
        has_more = len(chat.messages) > 2 or len(chat.messages[-1]) > 2
        if has_more or any(not is_missing(row.get(name)) for name in _SYSTEM):
            return self._chat(chat, row), used
        return Sample(pair=pair), used

    def _check_prompts(self, row: Row, keys: tuple[str, ...]) -> None:
        for key in keys:
            if isinstance(value := row.get(key), str) and "<" in value and not self._reads_media:
                check_text(value)

    def _reasoning(self, row: Row, chat: Chat) -> None:
        if "reasoning_content" not in row:
            return
        thoughts = row["reasoning_content"]
        if holds_nothing(thoughts) or "reasoning_content" in set(self.columns.values()) - set(
            self.columns
        ):
            return
        if not self._supports("reasoning_content"):
            raise template_lacks("reasoning_content")
        if not isinstance(thoughts, str):
            raise MalformedRow("reasoning_content is not text")
        chat.messages[-1]["reasoning_content"] = chat.messages[-1]["thinking"] = thoughts

    def _turns(self, row: Row, key: str) -> Chat:
        turns = unpack_list(row[key])
        if is_missing(turns):
            raise MalformedRow("no messages")
        if not isinstance(turns, list):
            raise MalformedRow("messages are no list")
        return self._read(turns)

    def _chat(self, chat: Chat, row: Row) -> Sample:
        messages = chat.messages
        last = max(
            (index for index, message in enumerate(messages) if message["role"] == "assistant"),
            default=-1,
        )
        if last < 0:
            raise MalformedRow("no assistant turn")
        used = messages[: last + 1]
        for message in used:
            if message["content"].strip():
                continue
            if message["role"] == "user":
                raise MalformedRow("empty prompt")
            if message["role"] == "assistant" and "tool_calls" not in message:
                raise MalformedRow("empty answer")
        if chat.off and self.pretrain:
            raise Unsupported(
                "the messages switch the loss of some turns off, and `task: pretrain` trains on"
                " every token",
                fix="use `task: sft`, or list the key in `ignore_columns`",
            )
        off = frozenset(index for index in chat.off if index <= last)
        system = read_optional_text(row, _SYSTEM)
        if used[0]["role"] != "system":
            system = system or self.system
            if system:
                used = [{"role": "system", "content": system}, *used]
                off = frozenset(index + 1 for index in off)
        elif system is not None and system != used[0]["content"]:
            self.unused["system (of rows whose chat has a system turn)"] += 1
        return Sample(messages=used, left_off=len(messages) - last - 1, off=off)


def as_chat(sample: Sample, system: str | None) -> list[Message]:
    """A prompt and its completion as a chat of two turns, the system message before them where
    there is one."""
    assert sample.pair is not None
    start: list[Message] = [{"role": "system", "content": system}] if system else []
    return [
        *start,
        {"role": "user", "content": sample.pair[0]},
        {"role": "assistant", "content": sample.pair[1]},
    ]


def _chat_column(row: Row, there: tuple[str, ...]) -> str:
    if len(there) == 1:
        return there[0]
    return next((name for name in there if isinstance(unpack_list(row[name]), list)), there[0])


def _alpaca(row: Row) -> list[Message]:
    instruction = read_optional_text(row, ("instruction",)) or ""
    context = read_optional_text(row, _INPUT) or ""
    answer = read_text(row, _ANSWER, "answer")
    question = "\n".join(part for part in (instruction, context) if part.strip())
    if not question:
        raise MalformedRow("empty prompt")
    return [
        *earlier_turns(row),
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
    ]
