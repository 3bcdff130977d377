"""Names of chat templates and roles, in the spellings of different tools."""

import re

#: Template → its other names in LLaMA-Factory, ms-swift and axolotl.
_NAMES: dict[str, str] = {
    "chatml": "yi hermes openhermes dolphin orca smollm",
    "qwen": "qwen2_5 qwen2.5 qwen_25 qwen25 qwen2_5_math",
    "qwen2": "qwen1half qwen1.5 qwen_1_5 qwen2_vl qwen2_5_vl",
    "qwen3": "qwen3_nothink qwen3_thinking qwen3_5 qwen3_8 qwen3_moe",
    "smollm2": "smol",
    "smollm3": "",
    "llama2": "llama codellama",
    "llama3": (
        "llama3_1 llama3_2 llama3_3 llama3.1 llama3.2 llama3.3 llama31 llama32 llama33 llama-3"
        " llama3_2_vision mllama"
    ),
    "llama4": "",
    "mistral": "mistral_v2v3 mistral_nemo mistral_small mistral_2410 mixtral",
    "mistral_v1": "mistral_v0.1",
    "mistral_v3_tekken": "mistral_tekken mistral_2407",
    "mistral_v7_tekken": "mistral_v7 mistral_2501",
    "gemma": "gemma2 gemma3 gemma3_text gemma3n",
    "phi3": "phi_3 phi_35 phi3_5 phi-3",
    "phi4": "phi_4 phi-4",
    "zephyr": "",
    "vicuna": "vicuna_v1 vicuna_v1.1",
    "alpaca": "",
    "deepseek": "deepseek_v1 deepseek_v2 deepseek2 deepseek_llm",
    "deepseek3": "deepseek_v3 deepseek_v2_5 deepseek25",
    "deepseekr1": "deepseek_r1 deepseek_r1_distill",
    "falcon": "",
    "falcon3": "",
    "cohere": "command_r command_r_plus aya command-r c4ai_command_r",
    "tulu": "tulu3 tulu_3",
    "olmo": "olmo2 olmo_2",
    "granite3": "granite granitemoe",
    "exaone": "exaone3 exaone3_5",
    "default": "",
    "empty": "",
}

TEMPLATE_NAMES = tuple(_NAMES)
_CANONICAL = {
    name: canonical for canonical, others in _NAMES.items() for name in (canonical, *others.split())
}
TOKENIZER_DEFAULT = "tokenizer_default"
FALLBACK = "tokenizer_default_fallback_"


def canonical_name(text: str) -> str | None:
    """Return Paceline's name of a template for any of its names, or None for other text."""
    name = text.strip().lower()
    return _CANONICAL.get(name) or _CANONICAL.get(name.replace("-", "_"))


def is_inline(text: str) -> bool:
    """Return whether the text is a template itself rather than a name."""
    return "{%" in text or "{{" in text


def is_path(text: str) -> bool:
    """Return whether the text looks like the path of a template file."""
    return re.search(r"[/\\]|\.(jinja2?|j2|txt|json)$", text) is not None


CALL = "tool_call"
ROLES = {
    "system": "system", "developer": "system", "user": "user", "human": "user", "prompter": "user",
    "assistant": "assistant", "gpt": "assistant", "bot": "assistant", "model": "assistant",
    "chatgpt": "assistant", "bing": "assistant", "bard": "assistant", "ai": "assistant",
    "tool": "tool", "observation": "tool", "ipython": "tool", "function": "tool",
    "tool_response": "tool", "tool-response": "tool", "function_response": "tool",
    "function-response": "tool", "tool_result": "tool", "function_call": CALL,
    "function-call": CALL, "tool_call": CALL, "tool-call": CALL, "function_calls": CALL,
    "tool_calls": CALL,
}  # fmt: skip
#: Roles that `roles` of a source may rename; LLaMA-Factory and axolotl have their own names for
#: them.
STANDARD_ROLES = ("system", "user", "assistant", "tool", CALL)
