"""The text of answers, token by token, and their parts."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from transformers import AutoTokenizer

from paceline.data.text.chats.message_parser import MessagePart
from paceline.inference.chat_encoder import ChatEncoder
from paceline.inference.engine.answer_text import AnswerDecoder, TokenSpelling
from paceline.inference.engine.engine import GeneratedToken
from paceline.models.builtin import builtin_tokenizer

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(builtin_tokenizer())


def decode(tokenizer: Any, ids: Sequence[int], **settings: Any) -> tuple[list[str], list[int]]:
    """Return the texts of the parts, and the ids of their tokens."""
    decoder = AnswerDecoder(tokenizer, **settings)
    parts = [decoder.push(GeneratedToken(id)) for id in ids if not decoder.is_stopped]
    found = [part for part in [*parts, decoder.finish()] if part is not None]
    return [part.text for part in found], [token.id for part in found for token in part.tokens]


def test_parts_have_whole_characters(tokenizer: Any) -> None:
    text = "naïve 你好 🙂🙂 end"
    ids = tokenizer(text)["input_ids"]
    texts, tokens = decode(tokenizer, ids)
    assert "".join(texts) == text
    assert len(texts) < len(ids)  # characters of several tokens arrive at once
    assert not any("\ufffd" in part for part in texts)
    assert tokens == ids


def test_incomplete_character_at_the_end_is_not_lost(tokenizer: Any) -> None:
    ids = tokenizer("ab 🙂")["input_ids"][:-1]
    assert "".join(decode(tokenizer, ids)[0]) == tokenizer.decode(ids)


def test_special_tokens_are_hidden_unless_they_are_kept(tokenizer: Any) -> None:
    ids = [*tokenizer("one")["input_ids"], 1, *tokenizer("two")["input_ids"], 2]
    assert "".join(decode(tokenizer, ids, end_ids=[2])[0]) == "onetwo"
    kept = decode(tokenizer, ids, end_ids=[2], kept_tokens=["<|im_start|>"])[0]
    assert "".join(kept) == "one<|im_start|>two"


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (["two th"], "one "),
        (["three", "two"], "one "),
        (["four"], "one two three"),
        (["one two three "], "one two three"),
        (["o"], ""),
    ],
    ids=str,
)
def test_stop_texts_are_cut(tokenizer: Any, stop: list[str], expected: str) -> None:
    ids = tokenizer("one two three")["input_ids"]
    texts, tokens = decode(tokenizer, ids, stop=stop)
    assert "".join(texts) == expected
    assert tokens == ids[: len(tokens)]
    shown = tokenizer.decode(tokens)
    assert shown.startswith(expected)


def test_spelling_has_the_bytes_of_tokens(tokenizer: Any) -> None:
    text = "def f(): 你🙂"
    spelling = TokenSpelling(tokenizer)
    ids = tokenizer(text)["input_ids"]
    assert b"".join(map(spelling.bytes, ids)) == text.encode()
    assert spelling.bytes(2) == b"<|im_end|>"


def parse(
    tokenizer: Any, text: str, tools: Sequence[Any] = (), prompt: str = "", size: int = 1
) -> MessagePart:
    """Return the message of an answer that arrives in parts of ``size`` characters."""
    template = "{{ tools }} <tool_call> {{ messages }}"
    changed = AutoTokenizer.from_pretrained(builtin_tokenizer(), chat_template=template)
    parser = ChatEncoder(changed).parser(prompt, tools)
    whole = MessagePart()
    texts = [text[start : start + size] for start in range(0, len(text), size)]
    for part in [*map(parser.push, texts), parser.finish()]:
        whole.content += part.content
        whole.reasoning += part.reasoning
        whole.tool_calls += part.tool_calls
    return whole


def test_reasoning_content_and_calls_are_separated(tokenizer: Any) -> None:
    message = parse(tokenizer, f"<think>\nSo.\n</think>\n\nI add.\n{CALL}\n{CALL}", TOOLS)
    assert (message.reasoning, message.content) == ("So.", "I add.")
    assert [call.name for call in message.tool_calls] == ["add", "add"]
    assert json.loads(message.tool_calls[0].arguments) == {"a": 1}


def test_prompt_may_begin_the_reasoning(tokenizer: Any) -> None:
    for prompt in ("<|im_start|>assistant\n<think>\n", "[ASSISTANT] <think>\n"):
        message = parse(tokenizer, "So.</think> Yes", prompt=prompt)
        assert (message.reasoning, message.content) == ("So.", "Yes")


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\nnot JSON\n</tool_call> after",
        '<tool_call>\n{"name": 3}\n</tool_call>',
        '<tool_call>\n{"name": "add", "argum',
        "plain <tool",
        '<tool_call>{"name": "add", "arguments": ' + "[" * 3000 + "</tool_call> after",
        '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>',
    ],
    ids=range(7),
)
def test_calls_that_cannot_be_read_are_content(tokenizer: Any, text: str) -> None:
    message = parse(tokenizer, text, TOOLS)
    assert message.content == text
    assert message.tool_calls == []


@pytest.mark.parametrize("size", [1, 4, 7, 1000])
def test_unreadable_call_after_others_is_whole(tokenizer: Any, size: int) -> None:
    bad = "<tool_call>\n{bad}\n</tool_call> after"
    message = parse(tokenizer, f"I add. {CALL}\n{bad}", TOOLS, size=size)
    assert message.content.startswith("I add.")
    assert message.content.endswith(bad)


def test_calls_without_tools_are_content(tokenizer: Any) -> None:
    assert parse(tokenizer, CALL).content == CALL
