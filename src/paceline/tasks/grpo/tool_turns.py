"""Read tool calls from what a model has written, and write their results as its chat template does.

The tokens that the model has drawn are kept: only what the template adds between two of its turns
is rendered and tokenized.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.errors import ConfigError
from paceline.data.sources.rows import Row
from paceline.data.text.chat_template import ChatTemplate, TemplateRefused
from paceline.data.text.chats.message_parser import (
    CalledTool,
    MessageParser,
    MessagePart,
    ResponseFormatting,
    response_template,
)
from paceline.data.text.chats.tool_calls import (
    ChatMessage,
    ToolCall,
    ToolCallArguments,
    name_calls,
    with_arguments_as_text,
)
from paceline.data.text.tokenizer import LoadedTokenizer

if TYPE_CHECKING:
    from pydantic import JsonValue

_PROBE = "12345"


class ToolTurns:
    """Converts between tokens and the messages of chats with tools.

    Args:
        folder: folder of the tokenizer.
        template: the chat template; None without one.
        source: its Jinja source.
        tools: descriptions of the tools.
        end_ids: token ids that end a turn.

    Raises:
        ConfigError: the template supports no tools, or its tool calls or the results of tools are
            written in a way that is not known.
    """

    def __init__(
        self,
        folder: Path,
        tokenizer: LoadedTokenizer,
        template: ChatTemplate | None,
        source: str | None,
        tools: Sequence[Row],
        end_ids: Collection[int],
    ) -> None:
        self.tokenizer, self.tools = tokenizer, list(tools)
        self.end_ids = frozenset(end_ids)
        self._special = {
            text for each in tokenizer.special_ids if (text := tokenizer.token(each)) is not None
        }
        self._form = response_template(_own_response_template(folder), source, has_tools=True)
        if template is None or not template.uses("tools"):
            what = "does not describe tools to the model"
            raise _unusable("there is none" if template is None else f"the template {what}")
        if self._form is None or "tool_calls" not in self._form["fields"]:
            raise _unusable("it is not known how the model writes tool calls with it")
        self._template = template
        self._check_results()

    def _check_results(self) -> None:
        result: ChatMessage = {"role": "tool", "name": "probe", "content": _PROBE}
        try:
            text = self.tokenizer.decode(self.suffix([result]))
        except (TemplateRefused, ValueError) as error:
            reason = f"it does not accept the result of a tool ({error})"
            raise _unusable(reason) from error
        if _PROBE not in text.replace(" ", ""):
            raise _unusable("it leaves out the results of tools")

    def read(self, earlier: Sequence[int], ids: Sequence[int]) -> ChatMessage:
        """Return the message of a turn that the model has written, with its tool calls.

        Args:
            earlier: token ids of the prompt and of the turns before it.
            ids: token ids of the turn.
        """
        prompt = self.tokenizer.decode(list(earlier))
        parser = MessageParser(self._form, self._special, prompt, self.tools)
        kept = [
            token
            for token in ids
            if token not in self.tokenizer.special_ids | self.end_ids
            or self.tokenizer.token(token) in parser.kept_tokens
        ]
        message = MessagePart()
        for part in (parser.push(self.tokenizer.decode(kept)), parser.finish()):
            message.content += part.content
            message.reasoning += part.reasoning
            message.tool_calls += part.tool_calls
        read: ChatMessage = {"role": "assistant", "content": message.content}
        if message.reasoning:
            read["reasoning_content"] = message.reasoning
        if message.tool_calls:
            read["tool_calls"] = [_call_of(call) for call in message.tool_calls]
        return read

    def suffix(self, results: Sequence[ChatMessage]) -> list[int]:
        """Return the token ids between a turn with tool calls and the model's next turn.

        Args:
            results: a message with the role ``tool`` and a name for each call.

        Raises:
            TemplateRefused: the template raised an error.
            ValueError: the results change the tokens of the turns before them.
        """
        calls: list[ToolCall] = [
            {
                "type": "function",
                "function": {"name": str(each["name"]), "arguments": ToolCallArguments()},
            }
            for each in results
        ]
        chat: list[ChatMessage] = [
            {"role": "user", "content": "."},
            {"role": "assistant", "content": "", "tool_calls": calls},
            *(each.copy() for each in results),
        ]
        name_calls(chat)
        before, whole = self._rendered(chat)
        ends = [at for at, token in enumerate(before) if token in self.end_ids]
        before = before[: ends[-1] + 1] if ends else before
        if whole[: len(before)] != before:
            raise ValueError("the result changes the turns before it")
        return whole[len(before) :]

    def _rendered(self, chat: list[ChatMessage]) -> list[list[int]]:
        """Return the tokens of a chat up to its tool calls, and of the whole chat with the
        beginning of the next turn."""
        for messages in (chat, with_arguments_as_text(chat)):
            with contextlib.suppress(TemplateRefused):
                return self._tokens(messages)
        return self._tokens(chat)

    def _tokens(self, chat: list[ChatMessage]) -> list[list[int]]:
        texts = [
            self._template.render(chat[:2], tools=self.tools),
            self._template.render(chat, add_generation_prompt=True, tools=self.tools),
        ]
        return self.tokenizer.encode_batch(texts, add_special_tokens=False)


def _own_response_template(folder: Path) -> ResponseFormatting | None:
    """Return the response template of a tokenizer; None if it has none."""
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    own: Any = settings.get("response_template") if isinstance(settings, dict) else None
    return own if isinstance(own, dict) else None  # type: ignore[return-value]


def _call_of(call: CalledTool) -> ToolCall:
    arguments: JsonValue = call.arguments
    with contextlib.suppress(ValueError, RecursionError):
        arguments = json.loads(call.arguments)
    if isinstance(arguments, dict):
        arguments = ToolCallArguments(arguments)
    return {"type": "function", "function": {"name": call.name, "arguments": arguments}}


def _unusable(reason: str) -> ConfigError:
    return ConfigError(
        "`grpo.environment` needs a chat template with tools: {reason}",
        code="template-without-environment",
        allowed="a chat template that describes tools, such as the templates of Qwen models",
        fix="set `chat_template` to one, or use a model whose template supports tools",
        reason=reason,
    )
