"""The choice between the tokenizer's chat template, the user's, and a named one."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import JsonValue

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
from paceline.data.text.chat_template import (
    ChatTemplate,
    TemplateRefused,
    given_arguments,
    has_generation_blocks,
    listed_arguments,
)
from paceline.data.text.chats.jinja import with_defaults
from paceline.data.text.chats.named_templates import EOS, FORMATS, Format, template_source
from paceline.data.text.chats.tool_calls import ChatMessage
from paceline.data.text.qwen_tokenizer import folder_template
from paceline.data.text.tokenizer import LoadedTokenizer, load_tokenizer

#: Part of the keys for templates without marks. Increase it when their answers are found elsewhere.
_ANSWER_RULES = 2


@dataclass(frozen=True)
class TemplateChoice:
    """The chat template that a config selects.

    Args:
        source: its Jinja source; None for the tokenizer's template.
        name: its name, if it is a named template.
        is_fallback: use it only for tokenizers without a template.
        arguments: values of variables that the template reads.
        key: identifies it in the cache.
    """

    source: str | None = None
    name: str | None = None
    is_fallback: bool = False
    arguments: dict[str, JsonValue] = field(default_factory=dict)

    @property
    def key(self) -> str | None:
        key = self.source
        if self.name is not None:
            key = f"{self.name} {self.is_fallback} {self.source}"
        return f"{key} {json.dumps(self.arguments, sort_keys=True)}" if self.arguments else key

    def choose(self, tokenizer: LoadedTokenizer) -> tuple[str | None, list[Notice]]:
        """Return the source to use with a tokenizer, and messages to log.

        Raises:
            ConfigError: the template does not read one of the arguments.
        """
        source, notices = self._choose(tokenizer)
        self._check_arguments(source, tokenizer)
        return source, notices

    def _check_arguments(self, source: str | None, tokenizer: LoadedTokenizer) -> None:
        if not self.arguments:
            return
        if source is None:
            raise ConfigError(
                "`chat_template_kwargs` has no effect, because there is no chat template",
                code="template-arguments-without-template",
                fix="set `chat_template`, or remove `chat_template_kwargs`",
            )
        known = ChatTemplate(source, tokenizer.special_tokens).argument_names
        for name in self.arguments:
            if name not in known:
                raise ConfigError(
                    "`chat_template_kwargs.{name}`: the chat template does not read `{name}`",
                    code="unknown-template-argument",
                    allowed=listed_arguments(known),
                    fix=did_you_mean(name, known),
                    name=name,
                )

    def _choose(self, tokenizer: LoadedTokenizer) -> tuple[str | None, list[Notice]]:
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
    value, arguments = config.chat_template, given_arguments(config.chat_template_kwargs)
    if value is None or value == TOKENIZER_DEFAULT:
        return TemplateChoice(arguments=arguments)
    if is_inline(value):
        return TemplateChoice(value, arguments=arguments)
    path = Path(value).expanduser()
    is_fallback = value.startswith(FALLBACK)
    name = canonical_name(value.removeprefix(FALLBACK))
    if name is not None and not path.is_file():
        return TemplateChoice(template_source(name), name, is_fallback, arguments)
    return TemplateChoice(_read(value, path), arguments=arguments)


def template_key(config: Config, folder: Path) -> object:
    """Return what identifies the chat template of a config in the keys of the token cache.

    Args:
        folder: the folder of the tokenizer.
    """
    choice = template_choice(config)
    sources = (choice.source, folder_template(folder))
    if all(source is None or has_generation_blocks(source) for source in sources):
        return choice.key
    return [choice.key, _ANSWER_RULES]


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
    transformers use it. The arguments of the config become defaults of its variables."""
    choice = template_choice(config)
    if choice == TemplateChoice():
        return
    tokenizer = load_tokenizer(folder, config.trust_remote_code)
    source, _ = choice.choose(tokenizer)
    if source is None:
        return
    source = with_defaults(source, choice.arguments)
    if source != tokenizer.chat_template:
        (folder / "chat_template.jinja").write_text(source, encoding="utf-8")


def end_tokens(config: Config, tokenizer: LoadedTokenizer) -> list[int]:
    """Return the token ids that a model trained with the chat template in use ends its answers
    with, sorted."""
    choice = template_choice(config)
    source, _ = choice.choose(tokenizer)
    if source is None:
        return []
    template = ChatTemplate(
        source,
        tokenizer.special_tokens,
        control_tokens=tokenizer.control_tokens,
        arguments=choice.arguments,
    )
    ids = tokenizer.encode_batch(template.end_tokens(), add_special_tokens=False)
    return sorted(tokens[0] for tokens in ids if len(tokens) == 1)
