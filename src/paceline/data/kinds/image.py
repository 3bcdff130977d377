"""Chats with images: each image has a placeholder in the rendered chat, which is replaced by the
text that the model's processor puts there."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from paceline.data.kinds.base import NO_LABELS, TOO_LONG, Encoded, KindSetup, RowCounts
from paceline.data.kinds.chat import ChatKind
from paceline.data.kinds.document import Encoder
from paceline.data.sources.resolve import Place, ResolvedSource
from paceline.data.sources.rows import MalformedRow
from paceline.data.text.chat_template import ChatTemplate, Rendered, Span, TemplateRefused
from paceline.data.text.chats.tool_calls import ChatMessage
from paceline.data.text.positions import TokenizedText
from paceline.data.text.token_columns import Blob, BlobColumn, Column
from paceline.data.text.token_dataset import LOSS_WEIGHTS, TokenDataset
from paceline.data.vision_language.comparison import check_tokens
from paceline.data.vision_language.images import ImageProcessor, ImageTextSample, load_processor
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


@dataclass
class ImageRendered(Rendered):
    """A chat as text in which the processor's text stands for each image.

    Args:
        image_spans: [start, end) in characters of the text of each image.
        images: paths or contents of the images.
        template_text: the text that the chat template has printed.
    """

    image_spans: list[Span] = field(default_factory=list)
    images: tuple[Blob, ...] = ()
    template_text: str = ""


class ImageKind(ChatKind):
    """Chats with images. The tokens of images carry no loss."""

    columns: ClassVar[Sequence[Column]] = (LOSS_WEIGHTS, IMAGES)

    template_class = ImageChatTemplate

    def __init__(self, setup: KindSetup) -> None:
        config = setup.config
        self.images = load_processor(
            setup.folder, config.vision.max_pixels, config.trust_remote_code
        )
        # The numbers of images of the chats that were compared, shared by all sources.
        self._compared: set[int] = set()
        super().__init__(setup)
        if isinstance(self.template, ImageChatTemplate):
            self.template.image_token = self.images.placeholder

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
        results = iter(super().encode([sample for sample in ready if not isinstance(sample, str)]))
        return [sample if isinstance(sample, str) else next(results) for sample in ready]

    def _prepare(self, sample: Any) -> tuple[Encoder, Any] | str:
        prepared = super()._prepare(sample)
        if isinstance(prepared, str):
            return prepared
        encoder, content = prepared
        if not isinstance(content, Rendered):
            return prepared
        try:
            return encoder, self._expand(content, sample.images)
        except MalformedRow as reason:
            return str(reason)

    def _expand(self, chat: Rendered, images: Sequence[Blob]) -> ImageRendered:
        """Replace the placeholders of the images in a chat as the model's processor does.

        Raises:
            MalformedRow: an image cannot be read, or has no placeholder in the text.
        """
        mark = self.images.placeholder
        pieces = chat.text.split(mark)
        if len(pieces) - 1 != len(images):
            raise MalformedRow("the chat template does not print every image")
        expansions = self.images.expansions(images)
        text, image_spans, ends = pieces[0], [], []
        length = len(text)
        for piece, expansion in zip(pieces[1:], expansions, strict=True):
            image_spans.append((len(text), len(text) + len(expansion)))
            text += expansion + piece
            ends.append(length + len(mark))
            length = ends[-1] + len(piece)

        def moved(spans: list[Span]) -> list[Span]:
            return [(move(start), move(end)) for start, end in spans]

        def move(char: int) -> int:
            passed = bisect_right(ends, char)
            return char + sum(map(len, expansions[:passed])) - passed * len(mark)

        return ImageRendered(
            text,
            moved(chat.spans),
            chat.unplaced,
            moved(chat.excluded),
            chat.excluded_turns,
            image_spans,
            tuple(images),
            chat.text,
        )

    def _encode_chat(self, chat: Rendered, text: TokenizedText) -> Encoded:
        assert isinstance(chat, ImageRendered), "_prepare has expanded it"
        encoded = super()._encode_chat(chat, text)
        images_end = 0
        for span in chat.image_spans:
            first, images_end = text.tokens_of(span)
            encoded.labels_mask[first:images_end] = False
        # A processor puts them before a text unless the chat template has printed them.
        start = self.tokenizer.missing_start(text.ids)
        encoded.input_ids = np.concatenate([np.array(start, dtype=np.int32), encoded.input_ids])
        encoded.labels_mask = np.concatenate([np.zeros(len(start), np.bool_), encoded.labels_mask])
        encoded.values["image"] = chat.images
        encoded.values["images_end"] = images_end + len(start) if chat.images else 0
        self._compare(chat, encoded)
        return encoded

    def _compare(self, chat: ImageRendered, encoded: Encoded) -> None:
        """Compare the first chats with one image and with several with what the processor makes of
        the whole chat."""
        num_images = min(len(chat.images), 2)
        if num_images and num_images not in self._compared:
            self._compared.add(num_images)
            check_tokens(self.images, chat.template_text, chat.images, encoded.input_ids)

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
