"""Chat templates by name, and the choice between one of them, the user's own and the tokenizer's.

The named templates are written for Paceline. Each marks the answers with ``{% generation %}``:
content and end of turn. Their formats are those that the model families document in the
`chat_template` of their tokenizers.
"""

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

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
from paceline.data.text.chat_template import ChatTemplate, TemplateRefused
from paceline.data.text.qwen_tokenizer import folder_template
from paceline.data.text.tokenizer import LoadedTokenizer, load_tokenizer
from paceline.data.text.tool_calls import Message

Notice = tuple[str, str]

BOS, EOS = "{bos}", "{eos}"


@dataclass(frozen=True)
class Format:
    """One family's chat format. ``{}`` stands for the content of a message, ``{bos}`` and ``{eos}``
    for the tokenizer's tokens.

    Args:
        user, header, answer: a user's turn, what comes before an answer, and the answer with its
            end of turn.
        after: what follows an answer without carrying loss.
        system: a system turn; empty if the system message goes in front of the next user's content,
            as ``system_in_user``.
        prefix: the beginning of a chat.
        default_system: the system message of chats that have none.
        tool: a tool's result; by default a user's turn.
        before_user: repeated before each user's turn but the first.
        prefers_own: the tokenizer's own template is used if it has the family's marks: it also
            writes reasoning and tools.
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
    prefers_own: bool = False
    marks: tuple[str, ...] = ()


def _chatml(default_system: str = "", prefix: str = "", prefers_own: bool = False) -> Format:
    return Format(
        user="<|im_start|>user\n{}<|im_end|>\n",
        header="<|im_start|>assistant\n",
        answer="{}<|im_end|>",
        after="\n",
        system="<|im_start|>system\n{}<|im_end|>\n",
        tool="<|im_start|>tool\n{}<|im_end|>\n",
        prefix=prefix,
        default_system=default_system,
        prefers_own=prefers_own,
        marks=("<|im_start|>", "<|im_end|>"),
    )


def _bars(prefix: str = "") -> Format:
    """`<|user|>` and its like on lines of their own, ended by the end-of-text token."""
    return Format(
        "<|user|>\n{}\n",
        "<|assistant|>\n",
        "{}{eos}",
        "\n",
        system="<|system|>\n{}\n",
        prefix=prefix,
    )


def _deepseek3(prefers_own: bool) -> Format:
    return Format(
        "<｜User｜>{}", "<｜Assistant｜>", "{}<｜end▁of▁sentence｜>", system="{}", prefix=BOS,
        prefers_own=prefers_own, marks=("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
    )  # fmt: skip


_VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives"
    " helpful, detailed, and polite answers to the user's questions."
)
_ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes"
    " the request."
)
_LLAMA3 = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_COHERE = (
    "<|START_OF_TURN_TOKEN|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|USER_TOKEN|>",
    "<|CHATBOT_TOKEN|>",
)

FORMATS: dict[str, Format] = {
    "chatml": _chatml(),
    "qwen": _chatml("You are Qwen, created by Alibaba Cloud. You are a helpful assistant."),
    "qwen2": _chatml("You are a helpful assistant."),
    "qwen3": _chatml(prefers_own=True),
    "smollm2": _chatml("You are a helpful AI assistant named SmolLM, trained by Hugging Face"),
    "smollm3": _chatml(prefers_own=True),
    "llama2": Format(
        "[INST] {} [/INST]",
        "",
        " {} {eos}",
        system_in_user="<<SYS>>\n{}\n<</SYS>>\n\n",
        prefix=BOS,
        before_user=BOS,
    ),
    "llama3": Format(
        "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "{}<|eot_id|>",
        system="<|start_header_id|>system<|end_header_id|>\n\n{}<|eot_id|>",
        prefix=BOS,
        tool="<|start_header_id|>ipython<|end_header_id|>\n\n{}<|eot_id|>",
        marks=_LLAMA3,
    ),
    "llama4": Format(
        "<|header_start|>user<|header_end|>\n\n{}<|eot|>",
        "<|header_start|>assistant<|header_end|>\n\n",
        "{}<|eot|>",
        system="<|header_start|>system<|header_end|>\n\n{}<|eot|>",
        prefix=BOS,
        tool="<|header_start|>ipython<|header_end|>\n\n{}<|eot|>",
        marks=("<|header_start|>", "<|header_end|>", "<|eot|>"),
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
    "gemma": Format(
        "<start_of_turn>user\n{}<end_of_turn>\n",
        "<start_of_turn>model\n",
        "{}<end_of_turn>",
        "\n",
        prefix=BOS,
        marks=("<start_of_turn>", "<end_of_turn>"),
    ),
    "phi3": Format(
        "<|user|>\n{}<|end|>\n",
        "<|assistant|>\n",
        "{}<|end|>",
        "\n",
        system="<|system|>\n{}<|end|>\n",
        marks=("<|user|>", "<|assistant|>", "<|end|>"),
    ),
    "phi4": Format(
        "<|im_start|>user<|im_sep|>{}<|im_end|>",
        "<|im_start|>assistant<|im_sep|>",
        "{}<|im_end|>",
        system="<|im_start|>system<|im_sep|>{}<|im_end|>",
        marks=("<|im_start|>", "<|im_sep|>", "<|im_end|>"),
    ),
    "zephyr": Format(
        "<|user|>\n{}{eos}\n", "<|assistant|>\n", "{}{eos}", "\n", system="<|system|>\n{}{eos}\n"
    ),
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
    "deepseek3": _deepseek3(prefers_own=False),
    "deepseekr1": _deepseek3(prefers_own=True),
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
    "granite3": Format(
        "<|start_of_role|>user<|end_of_role|>{}<|end_of_text|>\n",
        "<|start_of_role|>assistant<|end_of_role|>",
        "{}<|end_of_text|>",
        "\n",
        system="<|start_of_role|>system<|end_of_role|>{}<|end_of_text|>\n",
        marks=("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"),
    ),
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
    """The Jinja source of a named template."""
    form = FORMATS[name]
    default = ""
    if form.default_system:
        default = _expression(form.system, json.dumps(form.default_system, ensure_ascii=False))
    user = _expression(form.user, "held.system + message['content']")
    before = (
        f"{{% if held.turns > 0 %}}{{{{ {_expression(form.before_user)} }}}}{{% endif %}}"
        if form.before_user
        else ""
    )
    if form.system:
        system = f"{{{{ {_expression(form.system)} }}}}"
    else:
        system = f"{{% set held.system = {_expression(form.system_in_user)} %}}"
    lines = [
        "{% set held = namespace(system='', turns=0) %}",
        f"{{{{ {_expression(form.prefix)} }}}}" if form.prefix else "",
        (
            f"{{% if not messages or messages[0]['role'] != 'system' %}}{{{{ {default} }}}}{{%"
            " endif %}"
            if default
            else ""
        ),
        "{% for message in messages %}",
        f"{{% if message['role'] == 'system' %}}{system}",
        (
            f"{{% elif message['role'] == 'user' %}}{before}{{{{ {user} }}}}{{% set held.system ="
            " '' %}{% set held.turns = 1 %}"
        ),
        f"{{% elif message['role'] == 'tool' %}}{{{{ {_expression(form.tool or form.user)} }}}}",
        (
            f"{{% elif message['role'] == 'assistant' %}}{{{{ {_expression(form.header)} }}}}{{%"
            f" generation %}}{{{{ {_expression(form.answer)} }}}}{{% endgeneration %}}{{{{"
            f" {_expression(form.after)} }}}}"
        ),
        (
            "{% else %}{{ raise_exception('the role ' + message['role'] + ' is not known to this"
            " chat template') }}{% endif %}"
        ),
        "{% endfor %}",
        f"{{% if add_generation_prompt %}}{{{{ {_expression(form.header)} }}}}{{% endif %}}",
    ]
    return "".join(lines)


def _expression(text: str, content: str = "message['content']") -> str:
    """A format as a Jinja expression: literals joined with the content and the tokenizer's
    tokens."""
    variables = {"{}": content, BOS: "bos_token", EOS: "eos_token"}
    parts = [part for part in re.split(f"({'|'.join(map(re.escape, variables))})", text) if part]
    return (
        " + ".join(variables.get(part) or json.dumps(part, ensure_ascii=False) for part in parts)
        or "''"
    )


# -- the choice


@dataclass(frozen=True)
class AskedTemplate:
    """The chat template that a config asks for.

    Args:
        source: its Jinja source; None for the tokenizer's own.
        name: its name, if it is a named one.
        is_fallback: it is for tokenizers without a template.
        key: tells it from any other, for the cache.
    """

    source: str | None = None
    name: str | None = None
    is_fallback: bool = False

    @property
    def key(self) -> str | None:
        return self.source if self.name is None else f"{self.name} {self.is_fallback} {self.source}"

    def choose(self, tokenizer: LoadedTokenizer) -> tuple[str | None, list[Notice]]:
        """The source to use with a tokenizer, and what to report."""
        own = tokenizer.chat_template
        if self.source is None or (self.is_fallback and own):
            return own, []
        if self.name is None:
            return self.source, []
        if own and _same_text(self.source, own, tokenizer):
            return own, [
                (
                    "info",
                    (
                        "chat template: the tokenizer's own, which writes the same text as"
                        f" `{self.name}`"
                    ),
                )
            ]
        form = FORMATS[self.name]
        if own and form.prefers_own and form.marks and all(mark in own for mark in form.marks):
            return own, [
                (
                    "info",
                    f"chat template: the tokenizer's own, which is of the family of `{self.name}`",
                )
            ]
        notices: list[Notice] = [("info", f"chat template: `{self.name}`")]
        if own:
            text = (
                f"chat template: `{self.name}`; the tokenizer's own writes other text"
                f" (`chat_template: {TOKENIZER_DEFAULT}`)"
            )
            notices = [("warning", text)]
        return self.source, [*notices, *_about_marks(self.name, form, tokenizer)]

    def for_tools(self, tokenizer: LoadedTokenizer) -> str | None:
        """The tokenizer's own template, for chats with tools, which named ones lack; None if it is
        of another family."""
        own = tokenizer.chat_template
        if self.name is None or not own or self.choose(tokenizer)[0] == own:
            return None
        marks = FORMATS[self.name].marks
        return own if marks and all(mark in own for mark in marks) else None


def _about_marks(name: str, form: Format, tokenizer: LoadedTokenizer) -> list[Notice]:
    """What a tokenizer lacks of the tokens that a template writes."""
    notices: list[Notice] = []
    if tokenizer.backend is not None:
        missing = [mark for mark in form.marks if tokenizer.backend.token_to_id(mark) is None]
        if missing:
            listed = ", ".join(f"`{mark}`" for mark in missing)
            notices.append(
                (
                    "warning",
                    (
                        f"the tokenizer has no token {listed}; `{name}` writes it as several tokens"
                        " of text"
                    ),
                )
            )
    needs_eos = EOS in form.answer
    if needs_eos and not tokenizer.special_tokens.get("eos_token"):
        notices.append(
            (
                "warning",
                f"the tokenizer has no end-of-text token, with which `{name}` ends an answer",
            )
        )
    return notices


_PROBES: tuple[list[Message], ...] = (
    [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Two."}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": "Three?"},
        {"role": "assistant", "content": "Four."},
    ],
)


def _same_text(one: str, other: str, tokenizer: LoadedTokenizer) -> bool:
    """Whether two templates write the same text for chats with and without a system message."""
    try:
        first, second = (ChatTemplate(source, tokenizer.special_tokens) for source in (one, other))
        return all(first.render(chat) == second.render(chat) for chat in _PROBES) and (
            first.render(_PROBES[0][:1], add_generation_prompt=True)
            == second.render(_PROBES[0][:1], add_generation_prompt=True)
        )
    except (TemplateRefused, ConfigError):
        return False


def asked_template(config: Config) -> AskedTemplate:
    """The chat template that the config asks for.

    Raises:
        ConfigError: no such name or file, or a file that cannot be read.
    """
    value = config.chat_template
    if value is None or value == TOKENIZER_DEFAULT:
        return AskedTemplate()
    if is_inline(value):
        return AskedTemplate(value)
    path = Path(value).expanduser()
    is_fallback = value.startswith(FALLBACK)
    name = canonical_name(value.removeprefix(FALLBACK))
    if name is not None and not path.is_file():
        return AskedTemplate(template_source(name), name, is_fallback)
    return AskedTemplate(_read(value, path))


def _read(value: str, path: Path) -> str:
    try:
        if path.is_dir():
            return _of_folder(value, path)
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        what = (
            f"cannot be read ({reason})"
            if is_path(value)
            else f"is neither the name of a template nor a file ({reason})"
        )
        raise ConfigError(
            f"`chat_template: {value}` {what}",
            allowed=(
                f"{', '.join(TEMPLATE_NAMES)}, {TOKENIZER_DEFAULT}, a file with a Jinja template,"
                " or the template itself"
            ),
            fix=did_you_mean(
                value.lower(),
                [] if is_path(value) else TEMPLATE_NAMES,
                "check the name or the path, or leave the key out to use the tokenizer's own",
            ),
        ) from error


def _of_folder(value: str, path: Path) -> str:
    """The template of a tokenizer in a local folder."""
    template = folder_template(path)
    if template is None:
        raise ConfigError(
            f"`chat_template: {value}`: there is no chat template in this folder",
            allowed=(
                "a folder with chat_template.jinja, or with a `chat_template` in"
                " tokenizer_config.json"
            ),
        )
    return template


def save_template(config: Config, folder: Path) -> None:
    """Put the chat template that was trained with beside a saved tokenizer, so that `generate` and
    transformers use it."""
    tokenizer = load_tokenizer(folder, config.trust_remote_code)
    source, _ = asked_template(config).choose(tokenizer)
    if source is not None and source != tokenizer.chat_template:
        (folder / "chat_template.jinja").write_text(source, encoding="utf-8")
