"""A row of text in its canonical form, which every format is converted to."""

from dataclasses import dataclass

from paceline.data.sources.rows import Row
from paceline.data.text.token_dataset import Label
from paceline.data.text.tool_calls import ChatMessage


@dataclass
class Sample:
    """A row in its canonical form: exactly one of ``messages``, ``pair`` (prompt, completion) and
    ``text`` is set.

    Args:
        is_document: the text is an entire file, to be cut into samples.
        trailing_turns: number of turns after the last answer, which are removed.
        tools: passed to the chat template as `tools`.
        excluded: indices of the messages whose loss the data disables.
        labels: classes of a text or a pair of texts, which has no answer then.
        has_list: the labels are a list, of any length.
        images: paths or contents of the images of a chat, in the order of their places in it.
        weight: factor of the loss, if a column has it.
        rejected: the same prompt with the answer that the data prefers less, if it has one.
        is_desirable: whether the data marks the only answer as good, if it marks answers.
        margin: difference that the scores of the answers should have at least.
    """

    messages: list[ChatMessage] | None = None
    pair: tuple[str, str] | None = None
    text: str | None = None
    is_document: bool = False
    trailing_turns: int = 0
    tools: list[Row] | None = None
    excluded: frozenset[int] = frozenset()
    labels: tuple[Label, ...] = ()
    has_list: bool = False
    images: tuple[str | bytes, ...] = ()
    weight: float | None = None
    rejected: "Sample | None" = None
    is_desirable: bool | None = None
    margin: float = 0.0


def as_chat(sample: Sample, system: str | None) -> list[ChatMessage]:
    """Return a prompt and its completion as a chat of two turns, after the system message if there
    is one."""
    assert sample.pair is not None
    start: list[ChatMessage] = [{"role": "system", "content": system}] if system else []
    return [*start, *exchange(*sample.pair)]


def exchange(prompt: str, answer: str) -> list[ChatMessage]:
    """Return the two turns of a question and its answer."""
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
