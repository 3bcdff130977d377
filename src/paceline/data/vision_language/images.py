"""Read images, and process them with the processor of a model."""

from __future__ import annotations

import io
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.core.errors import ConfigError, RunError, first_line
from paceline.data.pixels import decode_rgb, open_image
from paceline.data.sources.rows import MalformedRow
from paceline.data.text.token_columns import Blob
from paceline.data.text.token_dataset import TokenSample

if TYPE_CHECKING:
    import torch

_BLANK_SIZE = (32, 32)
NO_IMAGE_FILE = (
    "the image file does not exist (a relative path begins at the folder of the data file, or at"
    " `vision.images_folder`)"
)
#: EXIF tag of the orientation, and its values that exchange width and height.
_ORIENTATION, _TURNED = 0x0112, (5, 6, 7, 8)


class ImageTextSample(TokenSample):
    """A chat with the inputs of the model for its images, by name; empty without images."""

    pixels: dict[str, torch.Tensor]


class ImageProcessor:
    """The processor of a vision-language model. Pickled as its settings.

    Args:
        folder: folder of the model's tokenizer and processor.
        max_pixels: larger images are scaled down to this number of pixels; None for no limit.

    Raises:
        ConfigError: the folder has no processor for images.
    """

    def __init__(self, folder: Path, max_pixels: int | None, trust_remote_code: bool) -> None:
        from transformers import AutoProcessor

        self._settings = (folder, max_pixels, trust_remote_code)
        self.max_pixels = max_pixels
        try:
            processor: Any = AutoProcessor.from_pretrained(
                str(folder), trust_remote_code=trust_remote_code
            )
            self.token_id = int(processor.image_token_id)
            self.token = str(processor.image_token)
        except (OSError, ValueError, ImportError, AttributeError) as error:
            raise ConfigError(
                "the processor in `{folder}` cannot be loaded: {reason}",
                code="processor-not-loaded",
                fix="use a folder with the files of the model's processor",
                folder=folder,
                reason=first_line(error),
            ) from error
        self._processor = processor
        self._tokens_of_size = lru_cache(maxsize=4096)(self._find_tokens)

    def __reduce__(self) -> Any:
        return ImageProcessor, self._settings

    def tokens(self, source: Blob) -> np.ndarray:
        """Return the token IDs that stand for an image, int32 [tokens]. They depend on its size
        only.

        Raises:
            MalformedRow: the image cannot be read.
        """
        return self._tokens_of_size(*self._scaled(_size_of(source)))

    def _find_tokens(self, width: int, height: int) -> np.ndarray:
        from PIL import Image

        processed = self._processor(
            text=[self._processor.image_token],
            images=[[Image.new("RGB", (width, height))]],
            add_special_tokens=False,
        )
        return np.array(processed["input_ids"][0], dtype=np.int32)

    def _scaled(self, size: tuple[int, int]) -> tuple[int, int]:
        width, height = size
        if self.max_pixels is None or width * height <= self.max_pixels:
            return size
        scale = (self.max_pixels / (width * height)) ** 0.5
        return max(1, int(width * scale)), max(1, int(height * scale))

    def pixels(self, sources: list[Blob]) -> dict[str, torch.Tensor]:
        """Return the inputs of the model for the images of one sample, by name.

        Raises:
            RunError: an image cannot be read.
        """
        images = [self._read(source) for source in sources]
        processed = self._processor.image_processor([images], return_tensors="pt")
        return {name: value for name, value in processed.items() if name.startswith("pixel_")}

    def blank_sample(self) -> ImageTextSample:
        """Return a sample with a small black image and without label tokens."""
        from PIL import Image

        content = io.BytesIO()
        Image.new("RGB", _BLANK_SIZE).save(content, "PNG")
        tokens = self.tokens(content.getvalue())
        return {
            "input_ids": tokens,
            "labels_mask": np.zeros(len(tokens), dtype=np.bool_),
            "pixels": self.pixels([content.getvalue()]),
        }

    def _read(self, source: Blob) -> Any:
        from PIL import Image

        try:
            with open_image(source) as opened:
                image = decode_rgb(opened)
        except (OSError, ValueError, SyntaxError) as error:
            name = source if isinstance(source, str) else "in the data"
            raise RunError(
                "the image {name} cannot be decoded: {reason}",
                code="sample-image-not-decodable",
                fix="replace the image, or remove the row, and run the command again",
                name=name,
                reason=first_line(error),
            ) from error
        size = self._scaled(image.size)
        return image if size == image.size else image.resize(size, Image.Resampling.BICUBIC)


def _size_of(source: Blob) -> tuple[int, int]:
    """Return the width and the height of an image, from its header."""
    from PIL import Image

    try:
        with open_image(source) as image:
            width, height = image.size
            is_turned = image.getexif().get(_ORIENTATION) in _TURNED
    except FileNotFoundError:
        raise MalformedRow(NO_IMAGE_FILE) from None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        raise MalformedRow("the image cannot be read") from None
    return (height, width) if is_turned else (width, height)
