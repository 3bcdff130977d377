"""Convert rows with various columns to chats, prompt and completion pairs, or text."""

import contextlib
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from paceline.data.sources.readers import DOCUMENT
from paceline.data.sources.rows import (
    MalformedRow,
    Row,
    Unsupported,
    holds_nothing,
    is_missing,
    parse_cell,
)
from paceline.data.text.chat_template import ChatTemplate, given_arguments, listed_arguments
from paceline.data.text.chats.tool_calls import ChatMessage, read_tools
from paceline.data.text.chats.turns import TurnKeys, unpack_list
from paceline.data.text.columns import (
    ALPACA,
    ANSWER,
    CHAT,
    EXPECTED,
    INPUT,
    LOSS_WEIGHT,
    MUST_BE_USED,
    PAIRS,
    SYSTEM,
    TEMPLATE_ARGUMENTS,
    TEXT,
    TOOLS,
    Tally,
    chat_turns,
    check_columns,
    find_format,
    matching_formats,
    rename_columns,
)
from paceline.data.text.messages import (
    Chat,
    MessageReader,
    as_text,
    earlier_turns,
    read_optional_text,
    read_text,
    role_names,
    template_lacks,
)
from paceline.data.text.refused_rows import (
    MEDIA,
    RefusedColumns,
    check_text,
    check_without_format,
    find_refused_columns,
)
from paceline.data.text.sample import ChatSample, as_chat, exchange

#: Limit of the sets of columns that a converter remembers.
_MAX_PLANS = 4096


@dataclass(frozen=True)
class ColumnPlan:
    """What the names of columns determine, for rows with the same ones."""

    refused: RefusedColumns | None
    has_answer: bool
    must_be_used: tuple[str, ...]
    chat: tuple[str, ...]
    format: str | None  # the format, if the names determine it and no value is null


@dataclass
class RowConverter:
    """Convert the rows of one source to samples.

    Args:
        label: the name of the source, for messages.
        format: a format, or "auto" to detect it from each row's columns.
        columns: `{expected name: name in the data}`.
        system: system message for rows without one.
        pretrain: a text column takes precedence over all others, and every token carries loss.
        ignore_columns: columns and keys of messages to ignore.
        roles: `{role: names in the data}`: additional names of the roles in chats.
        template: the chat template, which determines whether tools and reasoning can be used.
        tally: counts the formats and the columns of the rows.
        check_text: refuses prompts with images, video or audio.
        plans: what is known about each set of columns, which several converters may share.
    """

    label: str
    format: str = "auto"
    columns: dict[str, str] = field(default_factory=dict)
    system: str | None = None
    pretrain: bool = False
    ignore_columns: Collection[str] = ()
    roles: Mapping[str, str | list[str]] = field(default_factory=dict)
    template: ChatTemplate | None = None
    tally: Tally = field(default_factory=Tally)
    check_text: Callable[[str], None] = check_text
    plans: dict[tuple[str, ...], ColumnPlan] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_columns(self.label, self.columns, self.ignore_columns, EXPECTED)
        self._read = MessageReader(
            self.columns,
            role_names(self.roles, self.label),
            self.ignore_columns,
            self._supports,
            self.tally,
            self.check_text,
        )
        self._reads_media = bool(MEDIA & set(self.ignore_columns))
        self._optional_columns = lru_cache(maxsize=_MAX_PLANS)(self._find_optional)

    def __call__(self, row: Any) -> ChatSample:
        """Convert one row.

        Raises:
            MalformedRow: the row cannot be used.
            Unsupported: the dataset needs another kind of training.
        """
        if self.turn_keys.are_messages(row):
            row = {"messages": row}
        if not isinstance(row, dict):
            raise MalformedRow("not an object with columns")
        weight = self.loss_weight(row)
        if DOCUMENT in row:
            self.tally.seen["text"] += 1
            return ChatSample(text=row[DOCUMENT], is_document=True)
        sample = self.convert(self.renamed(row))
        sample.weight = weight
        return sample

    def convert(self, row: Row) -> ChatSample:
        """Convert a row whose columns have the expected names, apart from the weight of its loss.

        Raises:
            MalformedRow: the row cannot be used.
            Unsupported: the dataset needs another kind of training.
        """
        names = tuple(row)
        plan = self.plans.get(names) or self._make_plan(names)
        kind = self._format_of(row, plan)
        self._check(row, plan, kind)
        if kind is None and self.format == "auto":
            kind = find_format(row, self.pretrain)
        if kind is None:
            self.tally.unmatched[tuple(map(str, row))] += 1
            raise MalformedRow(
                "columns match no format"
                if self.format == "auto"
                else f"columns do not match `{self.format}`"
            )
        if kind == "text" and not self.pretrain:
            self._check_not_message(row)
        self.tally.seen[kind] += 1
        used: tuple[str, ...]
        if kind == "text":
            sample = ChatSample(text=read_text(row, TEXT, "text"))
            used = TEXT
        elif kind == "prompt_completion":
            sample, used = self._pair(row)
        elif kind == "alpaca":
            chat = Chat(self._alpaca(row))
            self._add_reasoning(row, chat)
            sample, used = self._chat(chat, row), ALPACA
            self._check_prompts(row, ALPACA[:3])
        else:
            lists = (name for name in plan.chat if chat_turns(row[name]) is not None)
            key = plan.chat[0] if len(plan.chat) == 1 else next(lists, plan.chat[0])
            turns = unpack_list(row[key])
            if is_missing(turns):
                raise MalformedRow("no messages")
            if not isinstance(turns, list):
                raise MalformedRow("messages are not a list")
            turns, answers = self._with_answer(turns, row)
            sample, used = self._chat(self._read(turns), row), (key, *answers, *SYSTEM)
        self._finish(row, names, plan, sample, used)
        return sample

    def loss_weight(self, row: Row) -> float | None:
        """Return the weight of the row's loss, or None if no column has it."""
        if not self.columns.get(LOSS_WEIGHT):
            return None
        value: Any = row.get(self.columns[LOSS_WEIGHT])
        try:
            weight = math.nan if value is None or isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            weight = math.nan
        if not 0 <= weight < math.inf:
            raise MalformedRow("the loss weight is not a number of at least 0")
        return weight

    # -- columns
    def renamed(self, row: Row) -> Row:
        """Return the row under the expected names, without the columns to ignore."""
        return rename_columns(row, self.columns, self.ignore_columns, self.tally)

    def _make_plan(self, names: tuple[str, ...]) -> ColumnPlan:
        if len(self.plans) >= _MAX_PLANS:
            self.plans.clear()
        self.plans[names] = plan = ColumnPlan(
            refused=find_refused_columns(names),
            has_answer=any(name in names for name in ANSWER),
            must_be_used=tuple(name for name in names if name in MUST_BE_USED),
            chat=tuple(name for name in CHAT if name in names),
            format=find_format(dict.fromkeys(names, ""), self.pretrain),
        )
        return plan

    def _format_of(self, row: Row, plan: ColumnPlan) -> str | None:
        """Return the format of the columns that are not null, or None."""
        if self.format != "auto":
            is_chat = self.format in ("messages", "sharegpt") and bool(plan.chat)
            return self.format if is_chat or self.format in matching_formats(row) else None
        if None in row.values():
            row = {name: value for name, value in row.items() if value is not None}
        elif not plan.chat:
            return plan.format
        return find_format(row, self.pretrain)

    def _check(self, row: Row, plan: ColumnPlan, kind: str | None) -> None:
        """Reject data for another kind of training."""
        if plan.refused is not None:
            has_answer = plan.has_answer if kind is None else kind != "text"
            plan.refused.check(row, kind is not None, has_answer)
            for name in plan.refused.labels if has_answer else ():
                number = str(row[name]).strip().removesuffix(".0")
                if number.removeprefix("-").isdecimal():
                    self.tally.binary_labels[number if number in ("0", "1") else "other"] += 1
        if kind is None:
            self._check_not_message(row)
            check_without_format(row)

    def _check_not_message(self, row: Row) -> None:
        """Reject a row that is a message.

        Raises:
            Unsupported: the row has a role and a content.
        """
        if self.turn_keys.are_messages([row]) and self.turn_keys.role_of(row) is not None:
            raise Unsupported(
                "the row is a single message and not a chat: it has a role and a content",
                allowed="rows with a list of messages each",
                fix='write each chat as a row: `{"messages": [{"role": …, "content": …}, …]}`',
            )

    def _finish(
        self,
        row: Row,
        names: tuple[str, ...],
        plan: ColumnPlan,
        sample: ChatSample,
        used: tuple[str, ...],
    ) -> None:
        """Add the tools to the sample, reject columns that must be used but are not, and count the
        other unused columns."""
        for name in plan.must_be_used:
            if holds_nothing(row[name]) or name in used:
                continue
            if name not in TOOLS or sample.text is not None:
                raise Unsupported(
                    f"the rows have a column `{name}`, which their format does not use",
                    fix=(
                        f"set `ignore_columns: [{name}]` to train without it, or convert the rows"
                        " to chats that include it"
                    ),
                )
            if not self._supports("tools"):
                raise template_lacks("tools", name)
            sample.tools = [*(sample.tools or []), *read_tools(row[name])]
        if TEMPLATE_ARGUMENTS in names:
            self._add_arguments(sample, row[TEMPLATE_ARGUMENTS])
        if (sample.tools or sample.template_arguments) and sample.pair is not None:
            sample.messages, sample.pair = as_chat(sample, self.system), None
        for name, synonyms in self._optional_columns(names, used):
            if not is_missing(row[name]) and (
                not synonyms or any(not is_missing(row[synonym]) for synonym in synonyms)
            ):
                self.tally.unused[name] += 1

    def _add_arguments(self, sample: ChatSample, value: Any) -> None:
        """Add the variables of the chat template to a sample.

        Raises:
            MalformedRow: the column is not an object.
            Unsupported: the chat template does not read one of them.
        """
        arguments = _parsed(value)
        if is_missing(arguments):
            return
        if not isinstance(arguments, dict):
            raise MalformedRow(f"{TEMPLATE_ARGUMENTS} is not an object")
        arguments = given_arguments(arguments)
        has_template = self.template is not None and sample.text is None
        known = self.template.argument_names if self.template and has_template else []
        for name in arguments:
            if name not in known:
                raise Unsupported(
                    f"the rows have `{TEMPLATE_ARGUMENTS}: {{{name}: …}}`, but "
                    + (
                        f"the chat template does not read `{name}`"
                        if has_template
                        else "they are not rendered with a chat template"
                    ),
                    allowed=listed_arguments(known),
                    fix=f"set `ignore_columns: [{TEMPLATE_ARGUMENTS}]` to train without it, or use"
                    " a chat template that reads it",
                )
        sample.template_arguments = arguments

    def _find_optional(
        self, names: tuple[str, ...], used: tuple[str, ...]
    ) -> list[tuple[str, tuple[str, ...]]]:
        """Return the columns that may be unused, each with the columns of the same meaning that
        take precedence: it is used only if those are empty."""
        known = {*MUST_BE_USED, TEMPLATE_ARGUMENTS, *self.columns.values()}
        if LOSS_WEIGHT in self.columns:
            known.add(LOSS_WEIGHT)
        optional: list[tuple[str, tuple[str, ...]]] = [
            (name, ())
            for name in names
            if isinstance(name, str) and name not in used and name not in known
        ]
        for group in (SYSTEM, INPUT, ANSWER, TEXT):
            present = [name for name in group if name in names and name in used]
            optional += [
                (name, tuple(present[:index])) for index, name in enumerate(present) if index
            ]
        return optional

    def _supports(self, name: str) -> bool:
        # Without a template, `task: sft` rejects chats later, and `task: pretrain` joins the texts
        # of the turns.
        return not self.pretrain if self.template is None else self.template.uses(name)

    # -- formats
    def _pair(self, row: Row) -> tuple[ChatSample, tuple[str, ...]]:
        pairs = [pair for pair in PAIRS if pair[0] in row and pair[1] in row]
        prompt_key, answer_key = next(
            (pair for pair in pairs if row[pair[0]] is not None and row[pair[1]] is not None),
            pairs[0],
        )
        turns = self._turns_of_pair(row[prompt_key], row[answer_key])
        if turns is not None:
            chat = self._chat(self._read(turns), row)
            return chat, (prompt_key, answer_key, *SYSTEM)
        used = (prompt_key, answer_key, *SYSTEM, "history", "reasoning_content")
        pair = (read_text(row, (prompt_key,), "prompt"), read_text(row, (answer_key,), "answer"))
        self._check_prompts(row, (prompt_key,))
        exchanged = Chat([*earlier_turns(row, self.check_text), *exchange(*pair)])
        self._add_reasoning(row, exchanged)
        is_pair = len(exchanged.messages) == 2 and len(exchanged.messages[-1]) == 2
        if is_pair and all(is_missing(row.get(name)) for name in SYSTEM):
            return ChatSample(pair=pair), used
        return self._chat(exchanged, row), used

    def _alpaca(self, row: Row) -> list[ChatMessage]:
        instruction = read_optional_text(row, ("instruction",)) or ""
        context = read_optional_text(row, INPUT) or ""
        answer = read_text(row, ANSWER, "answer")
        question = "\n".join(part for part in (instruction, context) if part.strip())
        if not question:
            raise MalformedRow("empty prompt")
        return [*earlier_turns(row, self.check_text), *exchange(question, answer)]

    def _turns_of_pair(self, prompt: Any, answer: Any) -> list[Any] | None:
        """Return the turns of a prompt and an answer if one of them is a chat, else None."""
        keys = self.turn_keys
        prompt, answer = keys.unpack(as_text(prompt)), keys.unpack(as_text(answer))
        lists = [value for value in (prompt, answer) if isinstance(value, list) and value]
        if not lists or not all(isinstance(turn, dict) for turns in lists for turn in turns):
            return None
        if isinstance(prompt, str) and prompt.strip():
            prompt = [self.turn("user", prompt)]
        if isinstance(answer, str) and answer.strip():
            answer = [self.turn("assistant", answer)]
        if not isinstance(prompt, list) or not isinstance(answer, list):
            return None
        return keys.join(prompt, answer)

    def _with_answer(self, turns: list[Any], row: Row) -> tuple[list[Any], tuple[str, ...]]:
        """Return a chat that ends with a question together with its answer in another column, and
        the names of columns with an answer. A chat that has its answer is returned as is."""
        if self.turn_keys.role_of(turns[-1]) not in ("user", "tool"):
            return turns, ()
        name = next((name for name in ANSWER if not is_missing(row.get(name))), None)
        if name is None:
            return turns, ()
        answer = self.turn_keys.unpack(as_text(row[name]))
        if isinstance(answer, str):
            answer = [self.turn("assistant", answer)]
        if not isinstance(answer, list):
            answer = [answer]
        return self.turn_keys.join(turns, answer), ANSWER

    @property
    def turn_keys(self) -> TurnKeys:
        """The names of the keys and roles of turns."""
        return self._read.keys

    def turn(self, role: str, content: Any) -> Row:
        """Return a turn under the keys that the source's turns have."""
        return {self.turn_keys.role[0]: role, self.turn_keys.content[0]: content}

    def _check_prompts(self, row: Row, keys: tuple[str, ...]) -> None:
        for key in keys:
            if isinstance(value := row.get(key), str) and "<" in value and not self._reads_media:
                self.check_text(value)

    def _add_reasoning(self, row: Row, chat: Chat) -> None:
        reasoning = row.get("reasoning_content")
        is_empty = not reasoning.strip() if isinstance(reasoning, str) else holds_nothing(reasoning)
        if is_empty:
            return
        if not self._supports("reasoning_content"):
            raise template_lacks("reasoning_content")
        if not isinstance(reasoning, str):
            raise MalformedRow("reasoning_content is not text")
        chat.messages[-1]["reasoning_content"] = chat.messages[-1]["thinking"] = reasoning

    def _chat(self, chat: Chat, row: Row) -> ChatSample:
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
        if chat.excluded and self.pretrain:
            raise Unsupported(
                "turns without loss are not supported with `task: pretrain`: it trains on every"
                " token",
                fix="use `task: sft`, or add the key to `ignore_columns`",
            )
        excluded = frozenset(index for index in chat.excluded if index <= last)
        system = read_optional_text(row, SYSTEM)
        if used[0]["role"] != "system":
            system = system or self.system
            if system:
                used = [{"role": "system", "content": system}, *used]
                excluded = frozenset(index + 1 for index in excluded)
        elif system is not None and system != used[0]["content"]:
            self.tally.unused["system (of rows whose chat has a system turn)"] += 1
        return ChatSample(messages=used, trailing_turns=len(messages) - last - 1, excluded=excluded)


def _parsed(value: Any) -> Any:
    """Return the value of a cell that has an object as JSON text, as in CSV files."""
    with contextlib.suppress(ValueError, RecursionError):
        return parse_cell(value) if isinstance(value, str) and value.strip() else value
    return value
