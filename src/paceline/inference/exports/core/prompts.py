"""The prompts of a proof."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pydantic import JsonValue

from paceline.core.errors import ConfigError
from paceline.data.text.chat_template import ChatTemplate
from paceline.inference.chat_encoder import PromptTurn
from paceline.inference.exports.core.forms import ProofPrompt

#: Variables by which templates let a model think before it answers.
_THINKING = ("enable_thinking", "thinking")
_TOOLS: list[JsonValue] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Return the weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Name of the city."}},
                "required": ["city"],
            },
        },
    }
]
_QUESTION = "What is 48 + 37? Explain it in one sentence."
_CHAT = (
    ("user", "Translate to French: “The naïve café costs 3.50 €.”"),
    ("assistant", "« Le café naïf coûte 3,50 €. »"),
    ("user", "现在翻译成中文，并解释每个词。"),
)
_CODE = "Why does this fail?\n\n```python\nfor i in range(10):\n\tprint(i  /  0)\n```\n"
_WEATHER = "Is it raining in Kraków right now?"


_SYSTEM = PromptTurn(role="system", content="You answer briefly.")


def proof_prompts(tokenizer: Any) -> list[ProofPrompt]:
    """Return four prompts for a tokenizer of transformers: with thinking and with tools if its chat
    template has them. A template that refuses a prompt gets a simpler one."""
    names, has_tools = _template_inputs(tokenizer)
    thinking: dict[str, JsonValue] = {name: True for name in _THINKING if name in names}
    prompts = [
        _prompt(_QUESTION),
        ProofPrompt([PromptTurn(role=role, content=text) for role, text in _CHAT], {}, []),
        _prompt(_CODE, thinking),
        _prompt(_WEATHER, tools=_TOOLS if has_tools else []),
    ]
    if tokenizer.chat_template is None:
        return prompts
    return [_accepted(tokenizer, prompt) for prompt in prompts]


def _template_inputs(tokenizer: Any) -> tuple[list[str], bool]:
    """Return the variables that a chat template reads, and whether it takes tools."""
    source = tokenizer.chat_template
    sources = [*source.values()] if isinstance(source, dict) else [source] if source else []
    try:
        templates = [ChatTemplate(each, tokenizer.special_tokens_map) for each in sources]
    except ConfigError:  # not Jinja: no prompt is rendered
        return [], False
    names = [name for template in templates for name in template.argument_names]
    return names, any(template.uses("tools") for template in templates)


def _prompt(
    text: str,
    template_args: dict[str, JsonValue] | None = None,
    tools: list[JsonValue] | None = None,
) -> ProofPrompt:
    return ProofPrompt([PromptTurn(role="user", content=text)], template_args or {}, tools or [])


def rendered(tokenizer: Any, prompt: ProofPrompt) -> str:
    """Return the text of a prompt and of the beginning of its answer, by the chat template."""
    text: str = tokenizer.apply_chat_template(
        prompt.messages,
        tools=prompt.tools or None,
        tokenize=False,
        add_generation_prompt=True,
        **prompt.template_args,
    )
    return text


def _accepted(tokenizer: Any, prompt: ProofPrompt) -> ProofPrompt:
    """Return the first of a prompt and simpler ones that the chat template writes."""
    for simpler in _simpler(prompt):
        try:
            text = rendered(tokenizer, simpler)
        except Exception:  # a template raises errors of Jinja and of Python
            continue
        if simpler.turns[-1]["content"].strip() in text:
            return simpler
    return replace(prompt, content="plain")


def _simpler(prompt: ProofPrompt) -> Iterator[ProofPrompt]:
    """Yield a prompt; as parts; with a system message; without what is special about it; and its
    last turn alone."""
    without = replace(prompt, template_args={}, tools=[])
    last = replace(without, turns=prompt.turns[-1:])
    for each in (prompt, without, last):
        for turns in (each.turns, [_SYSTEM, *each.turns]):
            yield replace(each, turns=turns)
            yield replace(each, turns=turns, content="parts")
