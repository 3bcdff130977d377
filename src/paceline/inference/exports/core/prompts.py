"""The prompts of a proof."""

from __future__ import annotations

from typing import Any

from pydantic import JsonValue

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


def proof_prompts(tokenizer: Any) -> list[ProofPrompt]:
    """Return four prompts for a tokenizer of transformers: with thinking and with tools if its chat
    template has them."""
    source = tokenizer.chat_template
    template = ChatTemplate(source, tokenizer.special_tokens_map) if source else None
    names = () if template is None else template.argument_names
    thinking: dict[str, JsonValue] = {name: True for name in _THINKING if name in names}
    has_tools = template is not None and template.uses("tools")
    return [
        _prompt(_QUESTION),
        ProofPrompt([PromptTurn(role=role, content=text) for role, text in _CHAT], {}, []),
        _prompt(_CODE, thinking),
        _prompt(_WEATHER, tools=_TOOLS if has_tools else []),
    ]


def _prompt(
    text: str,
    template_args: dict[str, JsonValue] | None = None,
    tools: list[JsonValue] | None = None,
) -> ProofPrompt:
    return ProofPrompt([PromptTurn(role="user", content=text)], template_args or {}, tools or [])
