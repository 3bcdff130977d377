"""Named chat templates. Each marks the answers (content and end of turn) with ``{% generation %}``.
The formats are those that the model families document in the `chat_template` of their tokenizers.
"""

import json
import re
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

BOS, EOS = "{bos}", "{eos}"


@dataclass(frozen=True)
class Format:
    """One family's chat format. ``{}`` stands for the content of a message, ``{bos}`` and ``{eos}``
    for the tokenizer's tokens.

    Args:
        user, header, answer: a user turn, the text before an answer, and the answer with its end of
            turn.
        after: the text after an answer, which carries no loss.
        system: a system turn; empty if the system message precedes the next user's content, as
            ``system_in_user``.
        prefix: the start of a chat.
        default_system: the system message of chats without one.
        tool: a tool's result; by default a user turn.
        before_user: inserted before each user turn except the first.
        prefers_tokenizer: use the tokenizer's template if it has the family's marks, because it
            also supports reasoning and tools.
        marks: special tokens by which a template of the family is recognized.
    """

    user: str
    header: str
    answer: str
    after: str = ""
    system: str = ""
    system_in_user: str = "{}\n\n"
    prefix: str = ""
    default_system: str = ""
    tool: str = ""
    before_user: str = ""
    prefers_tokenizer: bool = False
    marks: tuple[str, ...] = ()


_TOKENS = re.compile(r"<[|\w]+>")


def _by_role(
    turn: str,
    after: str = "",
    assistant: str = "assistant",
    system: str = "system",
    tool: str = "",
    **settings: Any,
) -> Format:
    """Return a format whose turns differ only in the name of the role.

    Args:
        turn: a turn without ``after``, with ``ROLE`` for the name of the role.
        assistant, system, tool: names of the roles; empty for a role without turns of its own.
        settings: further arguments of :class:`Format`.
    """
    user, header, system, tool = (
        turn.replace("ROLE", role) + after if role else ""
        for role in ("user", assistant, system, tool)
    )
    header, end = header.removesuffix(after).split("{}")
    marks = _TOKENS.findall(f"{user.partition('{}')[0]}{header}{end}")
    settings = {"marks": tuple(dict.fromkeys(marks)), **settings}
    return Format(user, header, "{}" + end, after, system, tool=tool, **settings)


_chatml = partial(_by_role, "<|im_start|>ROLE\n{}<|im_end|>", "\n", tool="tool")


def _bars(prefix: str = "") -> Format:
    """Return a format with ``<|user|>`` etc. on separate lines; answers end with the end-of-text
    token."""
    system = "<|system|>\n{}\n"
    return Format(
        "<|user|>\n{}\n", "<|assistant|>\n", "{}{eos}", "\n", system=system, prefix=prefix
    )


def _deepseek3(prefers_tokenizer: bool) -> Format:
    return Format(
        "<｜User｜>{}", "<｜Assistant｜>", "{}<｜end▁of▁sentence｜>", system="{}", prefix=BOS,
        prefers_tokenizer=prefers_tokenizer,
        marks=("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
    )  # fmt: skip


_VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives"
    " helpful, detailed, and polite answers to the user's questions."
)
_ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes"
    " the request."
)
_COHERE = (
    "<|START_OF_TURN_TOKEN|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|USER_TOKEN|>",
    "<|CHATBOT_TOKEN|>",
)

FORMATS: dict[str, Format] = {
    "chatml": _chatml(),
    "qwen": _chatml(
        default_system="You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
    ),
    "qwen2": _chatml(default_system="You are a helpful assistant."),
    "qwen3": _chatml(prefers_tokenizer=True),
    "smollm2": _chatml(
        default_system="You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    ),
    "smollm3": _chatml(prefers_tokenizer=True),
    "llama2": Format(
        "[INST] {} [/INST]",
        "",
        " {} {eos}",
        system_in_user="<<SYS>>\n{}\n<</SYS>>\n\n",
        prefix=BOS,
        before_user=BOS,
    ),
    "llama3": _by_role(
        "<|start_header_id|>ROLE<|end_header_id|>\n\n{}<|eot_id|>", tool="ipython", prefix=BOS
    ),
    "llama4": _by_role(
        "<|header_start|>ROLE<|header_end|>\n\n{}<|eot|>", tool="ipython", prefix=BOS
    ),
    "mistral": Format("[INST] {}[/INST]", "", " {}{eos}", prefix=BOS, marks=("[INST]", "[/INST]")),
    "mistral_v1": Format("[INST] {} [/INST]", "", "{}{eos}", prefix=BOS),
    "mistral_v3_tekken": Format(
        "[INST]{}[/INST]", "", "{}{eos}", prefix=BOS, marks=("[INST]", "[/INST]")
    ),
    "mistral_v7_tekken": Format(
        "[INST]{}[/INST]",
        "",
        "{}{eos}",
        system="[SYSTEM_PROMPT]{}[/SYSTEM_PROMPT]",
        prefix=BOS,
        marks=("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    ),
    "gemma": _by_role("<start_of_turn>ROLE\n{}<end_of_turn>", "\n", "model", system="", prefix=BOS),
    "phi3": _by_role("<|ROLE|>\n{}<|end|>", "\n"),
    "phi4": _by_role("<|im_start|>ROLE<|im_sep|>{}<|im_end|>"),
    "zephyr": _by_role("<|ROLE|>\n{}{eos}", "\n", marks=()),
    "vicuna": Format(
        "USER: {} ", "ASSISTANT:", " {}{eos}", system="{} ", prefix=BOS, default_system=_VICUNA
    ),
    "alpaca": Format(
        "### Instruction:\n{}\n\n",
        "### Response:\n",
        "{}{eos}",
        "\n\n",
        system="{}\n\n",
        default_system=_ALPACA,
    ),
    "deepseek": Format("User: {}\n\n", "Assistant:", " {}{eos}", system="{}\n\n", prefix=BOS),
    "deepseek3": _deepseek3(prefers_tokenizer=False),
    "deepseekr1": _deepseek3(prefers_tokenizer=True),
    "falcon": Format("User: {}\n", "Falcon:", " {}{eos}", "\n", system="{}\n"),
    "falcon3": _bars(),
    "cohere": Format(
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>{}<|END_OF_TURN_TOKEN|>",
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        "{}<|END_OF_TURN_TOKEN|>",
        system="<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>{}<|END_OF_TURN_TOKEN|>",
        prefix=BOS,
        marks=_COHERE,
    ),
    "tulu": _bars(),
    "olmo": _bars(BOS),
    "granite3": _by_role("<|start_of_role|>ROLE<|end_of_role|>{}<|end_of_text|>", "\n"),
    "exaone": Format(
        "[|user|]{}\n",
        "[|assistant|]",
        "{}[|endofturn|]",
        "\n",
        system="[|system|]{}[|endofturn|]\n",
        marks=("[|user|]", "[|assistant|]", "[|endofturn|]"),
    ),
    "default": Format(
        "Human: {}{eos}\n", "Assistant:", "{}{eos}", "\n", system="System: {}{eos}\n"
    ),
    "empty": Format("{}", "", "{}{eos}", system="{}\n"),
}


@cache
def template_source(name: str) -> str:
    """Return the Jinja source of a named template."""
    form = FORMATS[name]
    before = f"{{% if state.turns > 0 %}}{_output(form.before_user)}{{% endif %}}"
    system = _output(form.system)
    if not form.system:
        system = f"{{% set state.system = {_expression(form.system_in_user)} %}}"
    default = _output(form.system, json.dumps(form.default_system, ensure_ascii=False))
    has_system = "{% if not messages or messages[0]['role'] != 'system' %}"
    lines = [
        "{% set state = namespace(system='', turns=0) %}",
        _output(form.prefix) if form.prefix else "",
        f"{has_system}{default}{{% endif %}}" if form.default_system else "",
        "{% for message in messages %}",
        f"{{% if message['role'] == 'system' %}}{system}",
        f"{{% elif message['role'] == 'user' %}}{before if form.before_user else ''}",
        _output(form.user, "state.system + message['content']"),
        "{% set state.system = '' %}{% set state.turns = 1 %}",
        f"{{% elif message['role'] == 'tool' %}}{_output(form.tool or form.user)}",
        f"{{% elif message['role'] == 'assistant' %}}{_output(form.header)}{{% generation %}}",
        f"{_output(form.answer)}{{% endgeneration %}}{_output(form.after)}",
        "{% else %}{{ raise_exception('the chat template does not support the role ' +"
        " message['role']) }}{% endif %}",
        "{% endfor %}",
        f"{{% if add_generation_prompt %}}{_output(form.header)}{{% endif %}}",
    ]
    return "".join(lines)


def _output(text: str, content: str = "message['content']") -> str:
    """Return the Jinja statement that writes a format."""
    return f"{{{{ {_expression(text, content)} }}}}"


def _expression(text: str, content: str = "message['content']") -> str:
    """Return a format as a Jinja expression: literals joined with the content and the tokenizer's
    tokens."""
    variables = {"{}": content, BOS: "bos_token", EOS: "eos_token"}
    parts = [part for part in re.split(f"({'|'.join(map(re.escape, variables))})", text) if part]
    return (
        " + ".join(variables.get(part) or json.dumps(part, ensure_ascii=False) for part in parts)
        or "''"
    )
