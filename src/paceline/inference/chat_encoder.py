"""Encode a chat, with or without images, as the inputs of a trained model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from paceline.data.text.token_columns import Blob
    from paceline.data.vision_language.images import ImageProcessor


class PromptTurn(TypedDict, total=False):
    """One turn of a chat, always with a role and a content. ``images`` has contents of image files,
    which precede the content."""

    role: str
    content: str
    images: Sequence[Blob]


class ChatEncoder:
    """Encodes chats with the chat template of a model; without one, the texts of the turns follow
    each other.

    Args:
        tokenizer: tokenizer of transformers.
        processor: the processor of a vision-language model; None for a language model.
    """

    def __init__(self, tokenizer: Any, processor: ImageProcessor | None = None) -> None:
        self.tokenizer, self.processor = tokenizer, processor

    def encode(self, turns: Sequence[PromptTurn]) -> Any:
        """Return the inputs of a chat and of the beginning of its next answer, each with one row.

        Raises:
            ConfigError: the model does not read images.
        """
        if self.processor is not None:
            return self._with_processor(self.processor, turns)
        if any(turn.get("images") for turn in turns):
            raise ConfigError(
                "the model reads texts only, and the question has an image",
                code="model-without-images",
                fix="ask without an image, or use the run of a vision-language model",
            )
        if self.tokenizer.chat_template is None:
            inputs = self.tokenizer(_texts(turns), return_tensors="pt")
        else:
            text = self.tokenizer.apply_chat_template(
                [{"role": turn["role"], "content": turn["content"]} for turn in turns],
                tokenize=False,
                add_generation_prompt=True,
            )
            inputs = self.tokenizer(text, return_tensors="pt", add_special_tokens=False)
        for name in {*inputs} - {"input_ids", "attention_mask"}:
            del inputs[name]  # models do not read token types of a tokenizer
        return inputs

    def _with_processor(self, processor: ImageProcessor, turns: Sequence[PromptTurn]) -> Any:
        from paceline.data.kinds.image import ImageChatTemplate
        from paceline.data.vision_language.rows import IMAGE_MARK

        marked: list[Any] = [
            {
                "role": turn["role"],
                "content": IMAGE_MARK * len(turn.get("images", ())) + turn["content"],
            }
            for turn in turns
        ]
        start = self.tokenizer.bos_token
        if self.tokenizer.chat_template is None:
            text = _texts(marked).replace(IMAGE_MARK, processor.placeholder)
        else:
            template = ImageChatTemplate(
                self.tokenizer.chat_template, self.tokenizer.special_tokens_map
            )
            template.image_token = processor.placeholder
            text = template.render(marked, add_generation_prompt=True)
        images = processor.open_images([each for turn in turns for each in turn.get("images", ())])
        return processor.processor(
            text=[text],
            images=[images] if images else None,
            return_tensors="pt",
            # as transformers' `apply_chat_template`: a template may print the first token itself
            add_special_tokens=start is None or not text.startswith(start),
        )


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
