"""A row with a chat or a text in its canonical form, which every format is converted to."""

from dataclasses import dataclass, field

from pydantic import JsonValue

from paceline.data.sources.rows import Row
from paceline.data.text.chats.tool_calls import ChatMessage


@dataclass
class ChatSample:
    """A row in its canonical form: exactly one of ``messages``, ``pair`` (prompt, completion) and
    ``text`` is set.

    Args:
        is_document: the text is an entire file, to be cut into samples.
        trailing_turns: number of turns after the last answer, which are removed.
        tools: passed to the chat template as `tools`.
        excluded: indices of the messages whose loss the data disables.
        weight: factor of the loss, if a column has it.
        template_arguments: variables of the chat template for this row.
    """

    messages: list[ChatMessage] | None = None
    pair: tuple[str, str] | None = None
    text: str | None = None
    is_document: bool = False
    trailing_turns: int = 0
    tools: list[Row] | None = None
    excluded: frozenset[int] = frozenset()
    weight: float | None = None
    template_arguments: dict[str, JsonValue] = field(default_factory=dict)


def as_chat(sample: ChatSample, system: str | None) -> list[ChatMessage]:
    """Return a prompt and its completion as a chat of two turns, after the system message if there
    is one."""
    assert sample.pair is not None
    start: list[ChatMessage] = [{"role": "system", "content": system}] if system else []
    return [*start, *exchange(*sample.pair)]


def exchange(prompt: str, answer: str) -> list[ChatMessage]:
    """Return the two turns of a question and its answer."""
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
