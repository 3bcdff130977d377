"""Compare what a chat becomes with what the model's processor makes of the whole chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.core.errors import ConfigError, first_line
from paceline.data.text.token_columns import Blob
from paceline.data.vision_language.images import ImageProcessor, join_inputs

#: What transformers' processors raise for an input that they do not support.
_ERRORS = (TypeError, ValueError, RuntimeError, KeyError, IndexError, AttributeError)


def check_tokens(
    images: ImageProcessor, text: str, sources: Sequence[Blob], ids: np.ndarray
) -> None:
    """Check the token IDs and pixels of a chat with images, alone and in a batch of two.

    Args:
        text: the chat as the template has printed it.
        ids: its token IDs.

    Raises:
        ConfigError: the processor gives the chat other token IDs, or other inputs for its images.
    """
    opened = images.open_images(sources)
    try:
        expected = images.processor(
            text=[text, text],
            images=[opened, opened],
            add_special_tokens=not _begins_with_bos(images.processor, text),
            return_tensors="pt",
        )
        pixels = images.pixels(sources)
        joined = join_inputs([pixels, pixels], images.row_inputs)
    except _ERRORS as error:
        raise _differs(images, f"it cannot process a chat: {first_line(error)}") from error
    if not np.array_equal(expected["input_ids"][0].numpy(), ids):
        raise _differs(images, "it gives the first chat with images other token IDs")
    for name in images.token_inputs:
        if not np.array_equal(expected[name][0].numpy(), images.token_types(ids)):
            raise _differs(images, f"it gives the first chat with images another `{name}`")
    known = {"input_ids", "attention_mask", *images.token_inputs}
    for name in (expected.keys() - known) | joined.keys():
        both = (expected.get(name), joined.get(name))
        if not all(hasattr(value, "shape") for value in both) or not _are_equal(*both):
            raise _differs(images, f"it gives two chats with images another `{name}`")


def _begins_with_bos(processor: Any, text: str) -> bool:
    """Return whether transformers' ``apply_chat_template`` adds no special tokens."""
    bos = processor.tokenizer.bos_token
    return bos is not None and text.startswith(bos)


def _are_equal(first: Any, second: Any) -> bool:
    return first.shape == second.shape and bool((first == second).all())


def _differs(images: ImageProcessor, reason: str) -> ConfigError:
    return ConfigError(
        "chats with images cannot be tokenized as the processor {processor} does: {reason}",
        code="processor-differs",
        fix="choose another model; or train on rows without images",
        processor=type(images.processor).__name__,
        reason=reason,
    )
