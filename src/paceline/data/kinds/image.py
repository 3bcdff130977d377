"""Chats with images: each image is one token of the rendered chat, which is replaced by the tokens
that the model's processor gives the image."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from paceline.data.kinds.base import NO_LABELS, TOO_LONG, Encoded, KindSetup, RowCounts
from paceline.data.kinds.chat import ChatKind
from paceline.data.sources.resolve import Place, ResolvedSource
from paceline.data.sources.rows import MalformedRow
from paceline.data.text.chat_template import ChatTemplate, TemplateRefused
from paceline.data.text.chats.tool_calls import ChatMessage
from paceline.data.text.token_columns import BlobColumn, Column
from paceline.data.text.token_dataset import LOSS_WEIGHTS, TokenDataset
from paceline.data.vision_language.images import ImageProcessor, ImageTextSample
from paceline.data.vision_language.rows import (
    IMAGE_MARK,
    PLACEHOLDER,
    ImageChat,
    ImageRowConverter,
    with_contents,
    with_paths,
)

IMAGES = BlobColumn("image")


def has_images(folder: Path) -> bool:
    """Return whether a folder of tokenized chats has an image."""
    return bool(IMAGES.load(folder))


class ImageChatTemplate(ChatTemplate):
    """The chat template of a vision-language model, to which the contents of messages are lists of
    texts and images. Templates that accept only texts get the model's token of an image in them."""

    #: Text of the token of an image.
    image_token = PLACEHOLDER
    _has_parts: bool | None = None

    def _converted(self, messages: list[ChatMessage]) -> Sequence[object]:
        if self._has_parts is None:
            self._has_parts = self._accepts_parts()
        convert = _parts if self._has_parts else self._with_tokens
        return [{**message, "content": convert(message["content"])} for message in messages]

    def _accepts_parts(self) -> bool:
        try:
            text = self._run([{"role": "user", "content": _parts("probe")}], False, None)
        except TemplateRefused:
            return False
        return "{" not in text  # a template for texts prints the list

    def _with_tokens(self, text: str) -> object:
        return text.replace(IMAGE_MARK, self.image_token)


def _parts(text: str) -> object:
    """Return a content as a list of its texts and images."""
    parts: list[dict[str, str]] = []
    for number, piece in enumerate(text.split(IMAGE_MARK)):
        if number:
            parts.append({"type": "image"})
        if piece:
            parts.append({"type": "text", "text": piece})
    return parts


class ImageKind(ChatKind):
    """Chats with images. The tokens of images carry no loss."""

    columns: ClassVar[Sequence[Column]] = (LOSS_WEIGHTS, IMAGES)

    template_class = ImageChatTemplate

    def __init__(self, setup: KindSetup) -> None:
        config = setup.config
        self.images = ImageProcessor(
            setup.folder, config.vision.max_pixels, config.trust_remote_code
        )
        super().__init__(setup)
        if isinstance(self.template, ImageChatTemplate):
            self.template.image_token = self.images.token

    # -- rows
    def open(self, source: ResolvedSource) -> None:
        super().open(source)
        self._images = ImageRowConverter(self._converter, self.config.vision.max_images)

    def read(self, row: Any, place: Place) -> ImageChat:
        return with_paths(super().read(row, place), place, self.config.vision.images_folder)

    def convert(self, row: Any) -> ImageChat:
        return self._images(row)

    # -- tokens
    def encode(self, samples: list[Any]) -> list[Encoded | str]:
        ready = with_contents(samples)
        usable = [sample for sample in ready if not isinstance(sample, str)]
        results = zip(usable, super().encode([*usable]), strict=True)
        return [
            reason if isinstance(reason, str) else self._encoded(*next(results)) for reason in ready
        ]

    def _encoded(self, sample: ImageChat, encoded: Encoded | str) -> Encoded | str:
        return encoded if isinstance(encoded, str) else self._expand(sample, encoded)

    def _expand(self, sample: ImageChat, encoded: Encoded) -> Encoded | str:
        places = np.flatnonzero(encoded.input_ids == self.images.token_id)
        if len(places) != len(sample.images):
            return "the chat template does not print every image"
        encoded.values["image"] = sample.images
        if not len(places):
            return encoded
        ids, mask, start = [], [], 0
        for place, source in zip(places, sample.images, strict=True):
            try:
                tokens = self.images.tokens(source)
            except MalformedRow as reason:
                return str(reason)
            ids += [encoded.input_ids[start:place], tokens]
            mask += [encoded.labels_mask[start:place], np.zeros(len(tokens), dtype=np.bool_)]
            start = int(place) + 1
        images_end = sum(map(len, ids))
        encoded.input_ids = np.concatenate([*ids, encoded.input_ids[start:]])
        encoded.labels_mask = np.concatenate([*mask, encoded.labels_mask[start:]])
        encoded.values["images_end"] = images_end
        return encoded

    def fit(self, encoded: Encoded, counts: RowCounts, place: Place) -> Iterator[Encoded]:
        """Yield a sample unless an image of it would be truncated."""
        if self.max_length is not None and encoded.values.get("images_end", 0) > self.max_length:
            if not encoded.labels_mask[1:].any():
                counts.drop(NO_LABELS, place)
                return
            counts.note_overlong(len(encoded.input_ids))
            counts.drop(TOO_LONG, place)
            return
        yield from super().fit(encoded, counts, place)


@dataclass
class PixelTransform:
    """Read and process the images of a sample: ``pixels``.

    Args:
        processor: the model's processor.
    """

    processor: ImageProcessor

    def __call__(self, sample: Any, index: int, dataset: TokenDataset) -> ImageTextSample:
        images = sample.pop("image")
        sample["pixels"] = self.processor.pixels(images) if images else {}
        return sample  # type: ignore[no-any-return]
