"""Rows with images: find the images and their places in the chat."""

from __future__ import annotations

import base64
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from paceline.data.sources.opening import windows_fix, with_slashes
from paceline.data.sources.rows import MalformedRow, Row, Unsupported, holds_nothing
from paceline.data.sources.tar import IMAGE_SUFFIXES, is_tar_file
from paceline.data.text.chats.tool_calls import ChatMessage
from paceline.data.text.formats import RowConverter
from paceline.data.text.sample import ChatSample, exchange
from paceline.data.text.token_columns import Blob
from paceline.data.vision_language.download import download_images, is_address

_COLUMNS = ("images", "image")
#: The placeholder of an image in a text, as in LLaMA-Factory and ms-swift.
PLACEHOLDER = "<image>"
#: A Unicode noncharacter, which does not occur in text, marks the place of an image in a message.
IMAGE_MARK = "\ufdd2"
#: Keys of a part of a message with an image; `value` as in LLaMA-Factory v1.
_SOURCE_KEYS = ("image", "image_url", "path", "url", "bytes", "value")
#: What a data URL with an image has before the comma.
_BASE64 = "data:image;base64"
#: Names of columns that may have images.
_IMAGE_NAME = re.compile(r"image|img|picture|photo", re.IGNORECASE)
#: Names of columns and types of parts with other media.
_OTHER_MEDIA = re.compile(r"(?:input_)?(?:videos?|audios?)(?:_url)?")
_IMAGE_PARTS = ("image", "image_url", "input_image")


@dataclass
class ImageChat(ChatSample):
    """A chat with images.

    Args:
        images: paths or contents of the images, in the order of their places.
    """

    images: tuple[Blob, ...] = ()


@dataclass
class ImageRowConverter:
    """Convert rows with images to chats in which :data:`IMAGE_MARK` stands for each image.

    Images are in a column ``images`` (or ``image``), in the order of the placeholders ``<image>``
    in the turns, or in parts of a message, as in transformers. Images of a chat without
    placeholders precede its first question.

    Args:
        convert: converts the rows without their images.
        max_images: rows with more images are dropped; None for no limit.
    """

    convert: RowConverter
    max_images: int | None = None

    def __call__(self, row: Any) -> ImageChat:
        """Convert one row.

        Raises:
            MalformedRow: the row cannot be used.
            Unsupported: the dataset needs another kind of training.
        """
        keys, ignored = self.convert.turn_keys, self.convert.ignore_columns
        if keys.are_messages(row):
            row = {"messages": row}
        if not isinstance(row, dict):
            raise MalformedRow("not an object with columns")
        named = [self.convert.columns.get(name, name) for name in _COLUMNS]
        columns = [name for name in named if name not in ignored]
        images = [
            image
            for name in columns
            if not holds_nothing(row.get(name))
            for image in _as_list(row[name])
        ]
        _check_media(row, ignored)
        in_parts: list[Any] = []
        text_row = {
            name: _with_marks(keys.unpack(value), in_parts)
            for name, value in row.items()
            if name not in columns
        }
        if images and in_parts and len(in_parts) != len(images):
            raise MalformedRow("images in both a column and the messages")
        # Parts without an image of their own stand for the images of the column, as in TRL.
        sources = images or in_parts
        if not sources:
            self._check_unused(text_row)
        if any(source is None for source in sources):
            raise MalformedRow("an image without a path or content")
        if self.max_images is not None and len(sources) > self.max_images:
            raise MalformedRow(f"more than {self.max_images} images")
        sample = ImageChat(**vars(self.convert(text_row)), images=tuple(map(_source, sources)))
        _place(sample)
        return sample

    def _check_unused(self, row: Row) -> None:
        """Reject a row whose only image is in a column of another name.

        Raises:
            Unsupported: a column has the path of an image.
        """
        for name, value in row.items():
            is_known = name in self.convert.columns.values() or name in self.convert.ignore_columns
            if _IMAGE_NAME.search(name) and not is_known and _is_image_path(value):
                raise Unsupported(
                    f"the column `{name}` has the path of an image and is not read",
                    allowed="images in the columns `images` and `image`, or in the messages",
                    fix=f"set `columns: {{image: {name}}}`, or `ignore_columns: [{name}]` to train"
                    " without the images",
                )


def _check_media(row: Row, ignored: Collection[str]) -> None:
    """Reject a row with video or audio.

    Raises:
        Unsupported: a column or a part of a message has one.
    """
    kind = next(
        (
            name
            for name, value in row.items()
            if _OTHER_MEDIA.fullmatch(name) and name not in ignored and not holds_nothing(value)
        ),
        None,
    )
    kind = kind or next(filter(None, (_other_part(value) for value in row.values())), None)
    if kind is not None:
        raise Unsupported(
            f"the rows have `{kind}`; vision-language models are trained on texts and images, not"
            " on video or audio",
            allowed="texts and images",
            fix="remove these rows, or use a tool that trains on video and audio",
        )


def _other_part(value: Any) -> str | None:
    """Return the type of the first part with video or audio in turns, or None."""
    if isinstance(value, list):
        return next(filter(None, map(_other_part, value)), None)
    if not isinstance(value, dict):
        return None
    kind = value.get("type")
    if isinstance(kind, str) and _OTHER_MEDIA.fullmatch(kind):
        return kind
    return next(filter(None, map(_other_part, value.values())), None)


def _is_image_path(value: Any) -> bool:
    first = value[0] if isinstance(value, list) and value else value
    return isinstance(first, str) and first.lower().endswith(tuple(f".{s}" for s in IMAGE_SUFFIXES))


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _with_marks(value: Any, images: list[Any]) -> Any:
    """Return texts and turns with :data:`IMAGE_MARK` for each image. Images in parts of a message
    are appended to ``images``, None for a part without one."""
    if isinstance(value, str):
        return value.replace(PLACEHOLDER, IMAGE_MARK)
    if isinstance(value, list):
        return [_with_marks(item, images) for item in value]
    if not isinstance(value, dict):
        return value
    if value.get("type") in _IMAGE_PARTS:
        candidates = (value.get(key) for key in _SOURCE_KEYS)
        source = next((item for item in candidates if not holds_nothing(item)), None)
        if source is None and isinstance(value.get("base64"), str):
            source = f"{_BASE64},{value['base64']}"
        images.append(source.get("url") if isinstance(source, dict) and "url" in source else source)
        return {"type": "text", "text": IMAGE_MARK}
    return {key: _with_marks(item, images) for key, item in value.items()}


def _source(value: Any) -> Blob:
    """Return the path, the address or the content of an image: a text, a data URL, bytes, or
    ``{bytes, path}`` as in the image columns of parquet files."""
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str) or not value.strip():
        raise MalformedRow("an image is neither a path nor bytes")
    head, _, content = value.partition(",")
    if head.startswith("data:") and head.endswith(";base64"):
        try:
            return base64.b64decode(content, validate=True)
        except ValueError:
            raise MalformedRow("an image whose base64 text is invalid") from None
    if value.startswith("file://"):
        return unquote(urlparse(value).path)
    if ("://" in value and not is_address(value)) or value.startswith("data:"):
        raise Unsupported(
            f"the image `{value[:80]}` is at an address that is not read",
            allowed="paths, absolute or relative to the data file, https addresses, or bytes in"
            " parquet files",
            fix="use https addresses, or download the images and give their paths",
        )
    return value


def _place(sample: ImageChat) -> None:
    """Check that each image has its place in the chat; without places, put all images before the
    first question.

    Raises:
        MalformedRow: there are more or fewer places than images.
    """
    if sample.pair is not None and (sample.images or IMAGE_MARK in sample.pair[0]):
        sample.messages, sample.pair = exchange(*sample.pair), None
    messages: list[ChatMessage] = sample.messages or []
    if sample.images and not messages:
        raise MalformedRow("images without a chat")
    num_places = sum(message["content"].count(IMAGE_MARK) for message in messages)
    if not num_places and sample.images:
        first = next(message for message in messages if message["role"] == "user")
        first["content"] = IMAGE_MARK * len(sample.images) + first["content"]
    elif num_places != len(sample.images):
        raise MalformedRow("the number of images differs from the number of placeholders")


def with_paths(sample: ImageChat, place: str, images_folder: str | None) -> ImageChat:
    """Return the sample with paths that are relative to ``images_folder``, or else to the folder of
    the data file in ``place``, such as ``line 3 of data/train.jsonl``.

    Raises:
        MalformedRow: an image is on a drive of Windows.
    """
    if not sample.images:
        return sample
    folder = Path(place.rpartition(" of ")[2]).parent
    if images_folder is not None:
        folder = Path(with_slashes(images_folder)).expanduser()
    paths = (
        _image_path(folder, image) if isinstance(image, str) and not is_address(image) else image
        for image in sample.images
    )
    return replace(sample, images=tuple(paths))


def with_contents(samples: Sequence[ImageChat]) -> list[ImageChat | str]:
    """Return the samples with the contents of the images that have addresses; instead of a sample
    whose image cannot be used, the reason."""
    contents = download_images(
        image
        for sample in samples
        for image in sample.images
        if isinstance(image, str) and is_address(image)
    )

    def content_of(image: Blob) -> Blob:
        content = contents[image] if isinstance(image, str) and is_address(image) else image
        if isinstance(content, MalformedRow):
            raise content
        return content

    ready: list[ImageChat | str] = []
    for sample in samples:
        try:
            ready.append(replace(sample, images=tuple(map(content_of, sample.images))))
        except MalformedRow as reason:
            ready.append(str(reason))
    return ready


def _image_path(folder: Path, image: str) -> str:
    path = folder / Path(image).expanduser()
    if ("\\" not in image and ":" not in image) or is_tar_file(image) or path.exists():
        return str(path)
    local = with_slashes(image)
    if windows_fix(local) is not None:
        raise MalformedRow(
            "the path of an image has a drive of Windows (write paths relative to the data file or"
            " to `vision.images_folder`)"
        )
    return str(folder / local.replace("\\", "/"))
