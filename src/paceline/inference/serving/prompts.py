"""The prompt and the sampling of a request, from its fields."""

from __future__ import annotations

import base64
import json
import re
import secrets
from collections.abc import Mapping

from pydantic import JsonValue

from paceline.core.errors import ConfigError
from paceline.data.pixels import open_image
from paceline.data.text.chats.tool_calls import ToolCall, ToolCallArguments
from paceline.data.vision_language.rows import IMAGE_MARK
from paceline.inference.chat_encoder import PromptTurn, check_image
from paceline.inference.engine.engine import (
    MAX_NEW_TOKENS,
    ChatPrompt,
    EncodedPrompt,
    Engine,
    GenerationRequest,
)
from paceline.inference.serving.queue import TIME_LIMIT_S
from paceline.inference.serving.refusals import RequestRefused, unsupported_field
from paceline.inference.serving.requests import (
    ChatFields,
    CompletionFields,
    EarlierCall,
    ImagePart,
    Message,
    SamplingFields,
)

#: New tokens of a text that continues, if the request does not say how many (as OpenAI's API).
_DEFAULT_COMPLETION = 16
#: Below it, logits that are divided by the temperature may not be finite.
_LOWEST_TEMPERATURE = 0.01
#: Of all images of a request together.
_MAX_PIXELS = 50_000_000
_MAX_IMAGES = 64
#: Formats of Pillow. It starts other programs for some others, such as Ghostscript for EPS. MPO is
#: a JPEG with previews.
_IMAGE_FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "GIF")
_DATA_URL = re.compile(r"data:image/[\w.+-]+;base64,", re.IGNORECASE)


def chat_tools(fields: ChatFields) -> list[Mapping[str, JsonValue]]:
    """Return the tools that the answer may call."""
    if fields.tool_choice == "none":
        return []
    return [tool.model_dump(exclude_none=True) for tool in fields.tools]


def encode_chat(engine: Engine, fields: ChatFields) -> EncodedPrompt:
    """Return the inputs of a chat.

    Raises:
        ConfigError: a field is wrong, or the model cannot read the chat.
    """
    images = _ReceivedImages(engine.encoder(fields.model).processor is not None)
    turns = [_turn(message, number, images) for number, message in enumerate(fields.messages)]
    prompt = ChatPrompt(turns, chat_tools(fields), fields.chat_template_kwargs)
    try:
        return engine.encode(fields.model, prompt)
    except RequestRefused:
        raise
    except ConfigError as error:
        raise _at_field(error, "messages") from error


def _at_field(error: ConfigError, param: str) -> RequestRefused:
    """Return the error of an engine with the field of the request that caused it."""
    if error.code == "template-without-tools":
        param = "tools"
    elif error.code == "template-argument-not-read":
        param = f"chat_template_kwargs.{error.values['name']}"
    refused = RequestRefused.from_record(error.record())
    refused.param = param
    return refused


def encode_text(engine: Engine, fields: CompletionFields) -> EncodedPrompt:
    """Return the inputs of a text to continue, or of its tokens.

    Raises:
        ConfigError: there are several texts, or the text is too long.
    """
    prompt = fields.prompt
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise unsupported_field("prompt", "one text, or one list of tokens")
        prompt = prompt[0]
    encoder = engine.encoder(fields.model)
    try:
        if isinstance(prompt, str):
            return engine.encode(fields.model, prompt)
        ids = [id for id in prompt if isinstance(id, int)]
        size = len(encoder.tokenizer)
        if not ids or min(ids) < 0 or max(ids) >= size:
            raise unsupported_field("prompt", f"tokens from 0 to {size - 1}")
        return engine.checked(fields.model, encoder.encode_tokens(ids))
    except ConfigError as error:
        raise _at_field(error, "prompt") from error


def generation_request(
    fields: SamplingFields, prompt: EncodedPrompt, kept_tokens: frozenset[str] = frozenset()
) -> GenerationRequest:
    """Return what the engine gets."""
    if 0 < fields.temperature < _LOWEST_TEMPERATURE:
        raise unsupported_field("temperature", f"0, and {_LOWEST_TEMPERATURE} to 5")
    requested, num_logprobs = fields.max_tokens, None
    if isinstance(fields, ChatFields):
        requested = fields.max_completion_tokens or requested or MAX_NEW_TOKENS
        if fields.top_logprobs is not None and not fields.logprobs:
            raise unsupported_field("top_logprobs", "null without `logprobs: true`")
        num_logprobs = (fields.top_logprobs or 0) if fields.logprobs else None
    elif isinstance(fields, CompletionFields):
        requested = requested or _DEFAULT_COMPLETION
        num_logprobs = fields.logprobs
    return GenerationRequest(
        fields.model,
        prompt,
        requested or MAX_NEW_TOKENS,
        fields.temperature,
        fields.top_p,
        secrets.randbits(32) if fields.seed is None else fields.seed,
        fields.stop,
        num_logprobs,
        kept_tokens,
        TIME_LIMIT_S,
    )


def _turn(message: Message, number: int, received: _ReceivedImages) -> PromptTurn:
    place = f"messages.{number}"
    texts, images = _content(message, place, received)
    role = "system" if message.role == "developer" else message.role
    turn = PromptTurn(role=role, content="".join(texts))
    if images:
        turn["images"] = images
    if message.name is not None:
        turn["name"] = message.name
    if message.reasoning_content is not None:
        turn["reasoning_content"] = message.reasoning_content
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        turn["tool_calls"] = [_call(call) for call in message.tool_calls]
    return turn


def _content(
    message: Message, place: str, received: _ReceivedImages
) -> tuple[list[str], list[bytes]]:
    """Return the texts of a message, with a mark for each image, and the images."""
    if isinstance(message.content, str):
        return [message.content.replace(IMAGE_MARK, "")], []
    texts: list[str] = []
    images: list[bytes] = []
    for number, part in enumerate(message.content):
        if isinstance(part, ImagePart):
            images.append(received.add(part, f"{place}.content.{number}.image_url.url"))
            texts.append(IMAGE_MARK)
        else:
            texts.append(part.text.replace(IMAGE_MARK, ""))
    return texts, images


class _ReceivedImages:
    """Reads the images of a request. Images that are small in the request may be large in memory.

    Args:
        are_read: whether the model reads images.
    """

    def __init__(self, are_read: bool) -> None:
        self._are_read = are_read
        self._num_images = self._num_pixels = 0

    def add(self, part: ImagePart, place: str) -> bytes:
        """Return the content of an image.

        Raises:
            RequestRefused: it is not one, or there are too many or too large ones.
        """
        if not self._are_read:
            raise RequestRefused(
                "the model reads texts only, and the question has an image",
                code="model-without-images",
                fix="ask without an image, or use the run of a vision-language model",
                param=place,
            )
        self._num_images += 1
        if self._num_images > _MAX_IMAGES:
            raise RequestRefused(
                "the request has too many images",
                code="too-many-images",
                allowed="at most {limit}",
                param=place,
                limit=_MAX_IMAGES,
            )
        content = _image_content(part, place)
        try:
            self._check_size(content, place)
            check_image(content, place)
        except ConfigError as error:
            refused = RequestRefused.from_record(error.record())
            refused.param = place
            raise refused from error
        return content

    def _check_size(self, content: bytes, place: str) -> None:
        """Check the format of an image and its number of pixels, without decoding it."""
        from PIL.Image import DecompressionBombError

        kind: str | None = None
        try:
            with open_image(content) as image:
                kind, num_pixels = image.format, image.width * image.height
        except DecompressionBombError:
            num_pixels = _MAX_PIXELS + 1
        except (OSError, ValueError, SyntaxError):
            return  # the next check says why
        self._num_pixels += num_pixels
        if self._num_pixels > _MAX_PIXELS:
            raise RequestRefused(
                "the images of the request have too many pixels",
                code="image-too-large",
                allowed="at most {limit} pixels together",
                limit=f"{_MAX_PIXELS:,}",
            )
        if kind not in _IMAGE_FORMATS:
            raise RequestRefused(
                "the image `{name}` has the format {format}",
                code="image-format-refused",
                allowed="PNG, JPEG, WebP, GIF",
                name=place,
                format=kind,
            )


def _image_content(part: ImagePart, place: str) -> bytes:
    """Return the bytes of an image. Addresses and files are never opened."""
    url = part.image_url.url
    match = _DATA_URL.match(url)
    try:
        content = None if match is None else base64.b64decode(url[match.end() :], validate=True)
    except ValueError:
        content = None
    if content is None:
        raise RequestRefused(
            "the image is not part of the request",
            code="image-outside-request",
            allowed="`data:image/png;base64,...` and the same with other types of images",
            fix="encode the file",
            param=place,
        )
    return content


def _call(call: EarlierCall) -> ToolCall:
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = call.function.arguments
    if isinstance(arguments, dict):
        arguments = ToolCallArguments(arguments)
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.function.name, "arguments": arguments},
    }
