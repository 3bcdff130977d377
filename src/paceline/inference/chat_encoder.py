"""Encode a chat, with or without images, as the inputs of a trained model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from pydantic import JsonValue

from paceline.core.errors import ConfigError, first_line
from paceline.data.text.chat_template import (
    ChatTemplate,
    TemplateRefused,
    given_arguments,
    listed_arguments,
)
from paceline.data.text.chats.message_parser import MessageParser, response_template

if TYPE_CHECKING:
    from paceline.data.text.chats.tool_calls import ToolCall
    from paceline.data.text.token_columns import Blob
    from paceline.data.vision_language.images import ImageProcessor


class PromptTurn(TypedDict, total=False):
    """One turn of a chat, always with a role and a content. ``images`` has contents of image files.
    Those without a mark of their own in the content precede it."""

    role: str
    content: str
    images: Sequence[Blob]
    name: str
    reasoning_content: str
    tool_calls: list[ToolCall]
    tool_call_id: str


class ChatEncoder:
    """Encodes chats with the chat template of a model; without one, the texts of the turns follow
    each other.

    Args:
        tokenizer: tokenizer of transformers.
        processor: the processor of a vision-language model; None for a language model.
    """

    def __init__(self, tokenizer: Any, processor: ImageProcessor | None = None) -> None:
        self.tokenizer, self.processor = tokenizer, processor

    def encode(
        self,
        turns: Sequence[PromptTurn],
        tools: Sequence[Mapping[str, JsonValue]] = (),
        arguments: Mapping[str, JsonValue] | None = None,
    ) -> Any:
        """Return the inputs of a chat and of the beginning of its next answer, each with one row.

        Args:
            tools: descriptions of the tools that the model may call.
            arguments: variables of the chat template.

        Raises:
            ConfigError: the model does not read images, or the template does not read the tools or
                an argument, or it refuses the chat.
        """
        arguments = given_arguments(arguments or {})
        self._check_template(bool(tools), arguments)
        if self.processor is None and any(turn.get("images") for turn in turns):
            raise ConfigError(
                "the model reads texts only, and the question has an image",
                code="model-without-images",
                fix="ask without an image, or use the run of a vision-language model",
            )
        try:
            if self.processor is not None:
                return self._with_processor(self.processor, turns, tools, arguments)
            return self._with_tokenizer(turns, tools, arguments)
        except TemplateRefused as error:
            raise ConfigError(
                "the chat template of the model refuses the chat: {reason}",
                code="chat-refused-by-template",
                fix="check the order of the roles",
                reason=first_line(error),
            ) from error

    def encode_text(self, text: str) -> Any:
        """Return the inputs of a text that the model continues, with one row."""
        return _without_types(self.tokenizer(text, return_tensors="pt"))

    def encode_tokens(self, ids: Sequence[int]) -> Any:
        """Return the inputs of tokens that the model continues, with one row."""
        import torch
        from transformers import BatchEncoding

        tokens = torch.tensor([[*ids]])
        return BatchEncoding({"input_ids": tokens, "attention_mask": torch.ones_like(tokens)})

    def _check_template(self, has_tools: bool, arguments: Mapping[str, JsonValue]) -> None:
        source = self.template_source(has_tools)
        if has_tools and (source is None or not _template(source).uses("tools")):
            raise ConfigError(
                "the chat template of the model does not read tools",
                code="template-without-tools",
                fix="ask without tools, or train with a template that describes them",
            )
        names = () if source is None else self._argument_names(source)
        for name in arguments:
            if name not in names:
                raise ConfigError(
                    "the chat template of the model does not read the argument `{name}`",
                    code="template-argument-not-read",
                    allowed="{names}",
                    name=name,
                    names=listed_arguments(names),
                )

    def template_source(self, has_tools: bool) -> str | None:
        """Return the chat template for chats with or without tools; None if there is none."""
        if self.tokenizer.chat_template is None:
            return None
        return str(self.tokenizer.get_chat_template(tools=[{}] if has_tools else None))

    def parser(self, prompt: str, tools: Sequence[Mapping[str, JsonValue]] = ()) -> MessageParser:
        """Return the parser of an answer.

        Args:
            prompt: the chat as text.
            tools: the tools that the answer may call.
        """
        own = getattr(self.tokenizer, "response_template", None)
        form = response_template(own, self.template_source(bool(tools)), bool(tools))
        return MessageParser(form, self.tokenizer.all_special_tokens, prompt, tools)

    def _argument_names(self, source: str) -> list[str]:
        """Return the arguments that the template reads, except parameters of transformers."""
        taken = {*inspect.signature(self.tokenizer.apply_chat_template).parameters} - {"documents"}
        taken |= {*self.tokenizer.special_tokens_map}
        return [name for name in _template(source).argument_names if name not in taken]

    def _with_tokenizer(
        self,
        turns: Sequence[PromptTurn],
        tools: Sequence[Mapping[str, JsonValue]],
        arguments: Mapping[str, JsonValue],
    ) -> Any:
        if self.tokenizer.chat_template is None:
            return self.encode_text(_texts(turns))
        messages = [
            {name: value for name, value in turn.items() if name != "images"} for turn in turns
        ]
        try:
            text = self.tokenizer.apply_chat_template(
                messages,
                tools=[*tools] or None,
                tokenize=False,
                add_generation_prompt=True,
                **arguments,
            )
        except Exception as error:  # a template is a program, and may raise any error
            raise TemplateRefused(first_line(error)) from error
        return _without_types(self.tokenizer(text, return_tensors="pt", add_special_tokens=False))

    def _with_processor(
        self,
        processor: ImageProcessor,
        turns: Sequence[PromptTurn],
        tools: Sequence[Mapping[str, JsonValue]],
        arguments: Mapping[str, JsonValue],
    ) -> Any:
        from paceline.data.kinds.image import ImageChatTemplate
        from paceline.data.vision_language.rows import IMAGE_MARK

        marked: list[Any] = [
            {
                **{name: value for name, value in turn.items() if name != "images"},
                "content": _with_marks(turn, IMAGE_MARK),
            }
            for turn in turns
        ]
        start = self.tokenizer.bos_token
        source = self.template_source(bool(tools))
        if source is None:
            text = _texts(marked).replace(IMAGE_MARK, processor.placeholder)
        else:
            template = ImageChatTemplate(
                source, self.tokenizer.special_tokens_map, arguments=arguments
            )
            template.image_token = processor.placeholder
            listed: list[Any] = [*tools]
            text = template.render(marked, add_generation_prompt=True, tools=listed or None)
        images = processor.open_images([each for turn in turns for each in turn.get("images", ())])
        try:
            return processor.processor(
                text=[text],
                images=[images] if images else None,
                return_tensors="pt",
                # as transformers' `apply_chat_template`: a template may print the first token
                add_special_tokens=start is None or not text.startswith(start),
            )
        except (ValueError, IndexError, StopIteration) as error:
            raise ConfigError(
                "the processor of the model refuses the chat: {reason}",
                code="chat-refused-by-processor",
                fix="check that no text contains the model's token of an image",
                reason=first_line(error),
            ) from error


def _with_marks(turn: PromptTurn, mark: str) -> str:
    num_missing = len(turn.get("images", ())) - turn["content"].count(mark)
    return mark * num_missing + turn["content"]


@lru_cache(maxsize=64)
def _template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {})


def _without_types(inputs: Any) -> Any:
    for name in {*inputs} - {"input_ids", "attention_mask"}:
        del inputs[name]  # models do not read token types of a tokenizer
    return inputs


def _texts(turns: Sequence[PromptTurn]) -> str:
    return "\n\n".join(turn["content"] for turn in turns)


def read_images(files: Sequence[str]) -> list[bytes]:
    """Return the contents of image files.

    Raises:
        ConfigError: a file does not exist, or it is not an image.
    """
    contents = []
    for file in files:
        try:
            contents.append(Path(file).expanduser().read_bytes())
        except OSError as error:
            raise _not_read(file, error) from error
        check_image(contents[-1], file)
    return contents


def check_image(content: bytes, name: str) -> None:
    """Check that a content is an image. ``name``: what messages call it.

    Raises:
        ConfigError: it is not.
    """
    from paceline.data.pixels import decode_rgb, open_image

    try:
        with open_image(content) as image:
            decode_rgb(image)
    except (OSError, ValueError, SyntaxError) as error:
        raise _not_read(name, error) from error


def _not_read(name: str, error: Exception) -> ConfigError:
    from paceline.data.pixels import describe_failure

    return ConfigError(
        "the image `{name}` cannot be read: {reason}",
        code="image-not-read",
        allowed="image files, such as PNG or JPEG",
        fix="check the path and the file",
        name=name,
        reason=describe_failure(error),
    )
