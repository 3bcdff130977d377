"""Encode chats with images: render them, and replace the token of each image by those that the
model's processor gives it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.data.sources.rows import MalformedRow
from paceline.data.text.chat_template import ChatTemplate, TemplateRefused
from paceline.data.text.encoding.encoder import Encoded, Encoder
from paceline.data.text.sample import Sample
from paceline.data.text.tool_calls import ChatMessage
from paceline.data.vision_language.images import ImageProcessor
from paceline.data.vision_language.rows import IMAGE_MARK, PLACEHOLDER


class ImageChatTemplate(ChatTemplate):
    """The chat template of a vision-language model, to which the contents of messages are lists of
    texts and images. Templates that accept only texts get the model's token of an image in them.

    Args:
        image_token: text of the token of an image.
    """

    def __init__(
        self,
        source: str,
        special_tokens: dict[str, str],
        for_tools: str | None = None,
        control_tokens: frozenset[str] = frozenset(),
        *,
        image_token: str = PLACEHOLDER,
    ) -> None:
        super().__init__(source, special_tokens, for_tools, control_tokens)
        self._image_token = image_token
        self._has_parts: bool | None = None

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
        return text.replace(IMAGE_MARK, self._image_token)


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
class ImageEncoder(Encoder):
    """Encode chats with images. The tokens of images carry no loss.

    Args:
        images: the model's processor.
    """

    images: ImageProcessor | None = None

    def __call__(self, samples: list[Sample]) -> list[Encoded | str]:
        """Return the tokens of each sample, or the reason why it is dropped."""
        results = super().__call__(samples)
        return [
            encoded if isinstance(encoded, str) else self._expand(sample, encoded)
            for sample, encoded in zip(samples, results, strict=True)
        ]

    def _expand(self, sample: Sample, encoded: Encoded) -> Encoded | str:
        assert self.images is not None
        places = np.flatnonzero(encoded.input_ids == self.images.token_id)
        if len(places) != len(sample.images):
            return "the chat template does not print every image"
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
        min_length = sum(map(len, ids))
        return Encoded(
            np.concatenate([*ids, encoded.input_ids[start:]]),
            np.concatenate([*mask, encoded.labels_mask[start:]]),
            excluded_turns=encoded.excluded_turns,
            images=sample.images,
            min_length=min_length,
            weight=encoded.weight,
        )
