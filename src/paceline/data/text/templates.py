"""Named chat templates, and the choice between one of them, the user's and the tokenizer's.

Each named template marks the answers (content and end of turn) with ``{% generation %}``. The
formats are those that the model families document in the `chat_template` of their tokenizers.
"""

import json
import re
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from paceline.config.chat_names import (
    FALLBACK,
    TEMPLATE_NAMES,
    TOKENIZER_DEFAULT,
    canonical_name,
    is_inline,
    is_path,
)
from paceline.config.schema import Config
from paceline.core.errors import ConfigError, did_you_mean
from paceline.core.log import Notice
from paceline.core.texts import UserText
from paceline.data.text.chat_template import ChatTemplate, TemplateRefused
from paceline.data.text.chats.tool_calls import ChatMessage
from paceline.data.text.qwen_tokenizer import folder_template
from paceline.data.text.tokenizer import LoadedTokenizer, load_tokenizer

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


@dataclass(frozen=True)
class TemplateChoice:
    """The chat template that a config selects.

    Args:
        source: its Jinja source; None for the tokenizer's template.
        name: its name, if it is a named template.
        is_fallback: use it only for tokenizers without a template.
        key: identifies it in the cache.
    """

    source: str | None = None
    name: str | None = None
    is_fallback: bool = False

    @property
    def key(self) -> str | None:
        return self.source if self.name is None else f"{self.name} {self.is_fallback} {self.source}"

    def choose(self, tokenizer: LoadedTokenizer) -> tuple[str | None, list[Notice]]:
        """Return the source to use with a tokenizer, and messages to log."""
        built_in = tokenizer.chat_template
        if self.source is None or (self.is_fallback and built_in):
            return built_in, []
        if self.name is None:
            return self.source, []
        if built_in and _same_text(self.source, built_in, tokenizer):
            text = UserText(
                "chat template: the tokenizer's template, which produces the same text as `{name}`",
                code="template-of-tokenizer-same",
                name=self.name,
            )
            return built_in, [Notice("info", text)]
        form = FORMATS[self.name]
        if form.prefers_tokenizer and _has_marks(built_in, form):
            text = UserText(
                "chat template: the tokenizer's template, which is of the family `{name}`",
                code="template-of-family",
                name=self.name,
            )
            return built_in, [Notice("info", text)]
        notice = Notice(
            "info", UserText("chat template: `{name}`", code="template", name=self.name)
        )
        if built_in:
            notice = Notice(
                "warning",
                UserText(
                    "chat template: `{name}`; the tokenizer's template produces different text"
                    " (`chat_template: {tokenizer_default}`)",
                    code="template-differs",
                    name=self.name,
                    tokenizer_default=TOKENIZER_DEFAULT,
                ),
            )
        return self.source, [notice, *_token_notices(self.name, form, tokenizer)]

    def for_tools(self, tokenizer: LoadedTokenizer) -> str | None:
        """Return the tokenizer's template for chats with tools, which named templates do not
        support; None if it is of another family."""
        built_in = tokenizer.chat_template
        if self.name is None or self.choose(tokenizer)[0] == built_in:
            return None
        return built_in if _has_marks(built_in, FORMATS[self.name]) else None


def _has_marks(template: str | None, form: Format) -> bool:
    """Return whether a template contains the special tokens of a family."""
    if template is None or not form.marks:
        return False
    return all(mark in template for mark in form.marks)


def _token_notices(name: str, form: Format, tokenizer: LoadedTokenizer) -> list[Notice]:
    """Return warnings about tokens of a template that the tokenizer does not have."""
    notices: list[Notice] = []
    if tokenizer.backend is not None:
        missing = [mark for mark in form.marks if tokenizer.backend.token_to_id(mark) is None]
        if missing:
            listed = ", ".join(f"`{mark}`" for mark in missing)
            text = UserText(
                "the tokenizer has no token {listed}; `{name}` encodes it as several text tokens",
                code="no-token-for-template",
                listed=listed,
                name=name,
            )
            notices.append(Notice("warning", text))
    if EOS in form.answer and not tokenizer.special_tokens.get("eos_token"):
        text = UserText(
            "the tokenizer has no end-of-text token, which `{name}` adds after an answer",
            code="no-end-of-text-token",
            name=name,
        )
        notices.append(Notice("warning", text))
    return notices


_PROBES: tuple[list[ChatMessage], ...] = (
    [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Two."}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": "Three?"},
        {"role": "assistant", "content": "Four."},
    ],
)


def _same_text(source: str, other_source: str, tokenizer: LoadedTokenizer) -> bool:
    """Return whether two templates produce the same text for chats with and without a system
    message."""
    try:
        template = ChatTemplate(source, tokenizer.special_tokens)
        other = ChatTemplate(other_source, tokenizer.special_tokens)
        return all(template.render(chat) == other.render(chat) for chat in _PROBES) and (
            template.render(_PROBES[0][:1], add_generation_prompt=True)
            == other.render(_PROBES[0][:1], add_generation_prompt=True)
        )
    except (TemplateRefused, ConfigError):
        return False


def template_choice(config: Config) -> TemplateChoice:
    """Return the chat template that the config selects.

    Raises:
        ConfigError: the name or file is unknown, or the file cannot be read.
    """
    value = config.chat_template
    if value is None or value == TOKENIZER_DEFAULT:
        return TemplateChoice()
    if is_inline(value):
        return TemplateChoice(value)
    path = Path(value).expanduser()
    is_fallback = value.startswith(FALLBACK)
    name = canonical_name(value.removeprefix(FALLBACK))
    if name is not None and not path.is_file():
        return TemplateChoice(template_source(name), name, is_fallback)
    return TemplateChoice(_read(value, path))


def _read(value: str, path: Path) -> str:
    try:
        template = folder_template(path) if path.is_dir() else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        what = (
            f"cannot be read ({reason})"
            if is_path(value)
            else f"is neither the name of a template nor a file ({reason})"
        )
        raise ConfigError(
            "`chat_template: {value}` {subject}",
            code="unknown-template",
            allowed="{template_names}, {tokenizer_default}, a file with a Jinja template, or the"
            " template itself",
            fix=did_you_mean(
                value.lower(),
                [] if is_path(value) else TEMPLATE_NAMES,
                "check the name or the path, or remove the key to use the tokenizer's template",
            ),
            value=value,
            subject=what,
            template_names=", ".join(TEMPLATE_NAMES),
            tokenizer_default=TOKENIZER_DEFAULT,
        ) from error
    if template is None:
        raise ConfigError(
            "`chat_template: {value}`: no chat template in this folder",
            code="no-template-in-folder",
            allowed="a folder with chat_template.jinja, or with a `chat_template` in"
            " tokenizer_config.json",
            value=value,
        )
    return template


def save_template(config: Config, folder: Path) -> None:
    """Write the chat template used in training next to a saved tokenizer, so that `generate` and
    transformers use it."""
    tokenizer = load_tokenizer(folder, config.trust_remote_code)
    source, _ = template_choice(config).choose(tokenizer)
    if source is not None and source != tokenizer.chat_template:
        (folder / "chat_template.jinja").write_text(source, encoding="utf-8")


def end_tokens(config: Config, tokenizer: LoadedTokenizer) -> list[int]:
    """Return the token ids that a model trained with the chat template in use ends its answers
    with, sorted."""
    source, _ = template_choice(config).choose(tokenizer)
    if source is None:
        return []
    control = tokenizer.control_tokens
    template = ChatTemplate(source, tokenizer.special_tokens, control_tokens=control)
    ids = tokenizer.encode_batch(template.end_tokens(), add_special_tokens=False)
    return sorted(tokens[0] for tokens in ids if len(tokens) == 1)
