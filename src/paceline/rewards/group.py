"""The completions of one prompt, which rewards compare."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import JsonValue

#: A text, or the messages of a chat.
Content = str | Sequence[JsonValue]


@dataclass
class CompletionGroup:
    """A prompt with its completions.

    Args:
        number: index of the prompt in the dataset.
        place: file and row of the prompt, for messages.
        prompt: text of the prompt, or its chat messages.
        completions: completions of the prompt; texts, or ``[{"role": "assistant", "content": …}]``
            each if the prompt is a chat.
        completion_ids: token ids of each completion.
        columns: other columns of the row.
        prompts: prompt of each completion, if an environment has added to them.
        session: number of the group for its environments; None without an environment.
    """

    number: int
    place: str
    prompt: Content
    completions: list[Content]
    completion_ids: list[list[int]]
    columns: dict[str, JsonValue] = field(default_factory=dict)
    prompts: list[Content] | None = None
    session: int | None = None


def text_of(completion: Content) -> str:
    """Return the text of a completion: the last message of the assistant if it is a chat."""
    if isinstance(completion, str):
        return completion
    for message in reversed(completion):
        if isinstance(message, dict) and message.get("role", "assistant") == "assistant":
            return _text_of_content(message.get("content"))
    return ""


def _text_of_content(content: JsonValue) -> str:
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        return "".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else ""
