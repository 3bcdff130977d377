"""Turns with tool calls: read from tokens, and continued with the results of tools."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from raised import raises_error

from paceline.core.errors import ConfigError
from paceline.core.user_code import load_environment
from paceline.data.text.chat_template import ChatTemplate
from paceline.data.text.chats.environment_tools import environment_tools
from paceline.data.text.tokenizer import load_tokenizer
from paceline.models.builtin import CHAT_TEMPLATE, builtin_tokenizer
from paceline.tasks.grpo.tool_turns import ToolTurns

SOURCE = '''
class Env:
    def reset(self, **columns):
        pass

    def add(self, a: int, b: int = 1) -> int:
        """Add two numbers.

        Args:
            a: a number
            b: another number
        """
        return a + b

class NoTools:
    def reset(self, **columns):
        pass

class NoReset:
    def add(self, a: int) -> int:
        """Add.

        Args:
            a: a number
        """

class NeedsBoard(NoReset):
    def __init__(self, board):
        pass

    def reset(self, **columns):
        pass

class NoHint(NoTools):
    def add(self, a):
        """Add.

        Args:
            a: a number
        """

class NoDocstring(NoTools):
    def add(self, a: int):
        pass

def function():
    pass
'''
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
Make = Callable[..., ToolTurns]


@pytest.fixture
def env_file(tmp_path: Path) -> Path:
    file = tmp_path / "tool_environments.py"
    file.write_text(SOURCE)
    return file


@pytest.fixture
def make(env_file: Path) -> Make:
    def make_(source: str | None = CHAT_TEMPLATE) -> ToolTurns:
        folder = builtin_tokenizer()
        tokenizer = load_tokenizer(folder)
        template = source and ChatTemplate(
            source, tokenizer.special_tokens, control_tokens=tokenizer.control_tokens
        )
        tools = environment_tools(f"{env_file}:Env")
        return ToolTurns(folder, tokenizer, template or None, source, tools, [2])

    return make_


def test_turns_and_results_are_the_tokens_of_the_whole_chat(make: Make) -> None:
    turns = make()
    call: Any = {"name": "add", "arguments": {"a": 1, "b": 2}}
    question: Any = {"role": "user", "content": "1 + 2?"}
    answer: Any = {
        "role": "assistant",
        "content": "I add.",
        "tool_calls": [{"type": "function", "function": call}] * 2,
    }
    results: Any = [{"role": "tool", "name": "add", "content": text} for text in ("3", "4 <")]
    template = turns._template
    chats = [[question], [question, answer], [question, answer, *results]]
    prompt, with_call, whole = (
        turns.tokenizer.encode_batch(
            [template.render(chat, add_generation_prompt=at != 1, tools=turns.tools)], False
        )[0]
        for at, chat in enumerate(chats)
    )
    drawn = with_call[len(prompt) : with_call.index(2, len(prompt)) + 1]
    read = turns.read(prompt, drawn)
    assert (read["content"], read["tool_calls"]) == (answer["content"], answer["tool_calls"])
    assert prompt + drawn + turns.suffix(results) == whole


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("No.", "No."),
        ("<tool_call>add(1)</tool_call>", "<tool_call>add(1)</tool_call>"),
        ('<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>'),
        ('<tool_call>{"name": "add", "argu', '<tool_call>{"name": "add", "argu'),
    ],
)
def test_text_without_a_readable_call_is_content(make: Make, text: str, content: str) -> None:
    turns = make()
    (ids,) = turns.tokenizer.encode_batch([text], add_special_tokens=False)
    message = turns.read([1], [*ids, 2])
    assert message == {"role": "assistant", "content": content}


def test_arguments_that_are_no_mapping_are_kept(make: Make) -> None:
    turns = make()
    text = '<tool_call>{"name": "add", "arguments": "1, 2"}</tool_call>'
    (ids,) = turns.tokenizer.encode_batch([text], add_special_tokens=False)
    (call,) = turns.read([1], ids)["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": "1, 2"}


PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (None, "there is none"),
        (PLAIN, "does not describe tools"),
        ("{{ tools }}" + PLAIN, "not known how the model writes tool calls"),
        (
            "{{ tools }}<tool_call>{% for m in messages if m.role != 'tool' %}{{ m.content }}"
            "<|im_end|>{% endfor %}",
            "leaves out the results",
        ),
        (
            CHAT_TEMPLATE.replace("message.role + '\\n' }}", "message.role + undefined.name }}"),
            "does not accept the result",
        ),
        ("{{ tools }}<tool_call>{{ messages | length }}" + PLAIN, "changes the turns before it"),
    ],
    ids=range(6),
)
def test_templates_that_cannot_continue_are_refused(
    make: Make, source: str | None, text: str
) -> None:
    with raises_error(ConfigError, code="template-without-environment") as caught:
        make(source)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("Envy", "unknown-environment"),
        ("function", "unknown-environment"),
        ("NoTools", "not-an-environment"),
        ("NoReset", "not-an-environment"),
        ("NeedsBoard", "environment-with-arguments"),
        ("NoHint", "tool-without-description"),
        ("NoDocstring", "tool-without-description"),
    ],
)
def test_unusable_classes_are_refused(env_file: Path, name: str, code: str) -> None:
    with raises_error(ConfigError, code=code):
        environment_tools(f"{env_file}:{name}")


def test_descriptions_are_those_of_transformers(env_file: Path) -> None:
    from transformers.utils import get_json_schema

    environment: Any = load_environment(f"{env_file}:Env")
    assert environment_tools(f"{env_file}:Env") == (get_json_schema(environment.add),)
