"""Read images, and process them with the processor of a model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cache, cached_property, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.core.errors import ConfigError, RunError, first_line
from paceline.data.pixels import decode_rgb, describe_failure, open_image
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

    Attributes:
        placeholder: the text that stands for an image before the processor replaces it.
        backend: the library that computes the pixels: "torchvision" or "pil".

    Raises:
        ConfigError: the folder has no processor for images, or one that needs torchvision, which is
            not installed.
    """

    def __init__(self, folder: Path, max_pixels: int | None, trust_remote_code: bool) -> None:
        from transformers import AutoProcessor

        self._settings = (folder, max_pixels, trust_remote_code)
        self.max_pixels = max_pixels
        try:
            processor: Any = AutoProcessor.from_pretrained(
                str(folder), trust_remote_code=trust_remote_code
            )
            self.placeholder = str(processor.image_token)
            self.backend = str(getattr(processor.image_processor, "backend", "pil"))
        except (OSError, ValueError, ImportError, AttributeError) as error:
            raise _not_loaded(folder, error) from error
        self.processor = processor
        self._expansion_of_size = lru_cache(maxsize=4096)(self._find_expansion)

    def __reduce__(self) -> Any:
        return load_processor, self._settings

    def expansions(self, sources: Sequence[Blob]) -> list[str]:
        """Return the text by which the processor replaces the placeholder of each image of a
        sample. It depends on the image's size, and on whether the sample has other images.

        Raises:
            MalformedRow: an image cannot be read.
        """
        sizes = [self._scaled(_size_of(source)) for source in sources]
        return [self._expansion_of_size(*size, len(sizes) == 1) for size in sizes]

    def _find_expansion(self, width: int, height: int, is_alone: bool) -> str:
        from PIL import Image

        images = [Image.new("RGB", (width, height))] * (1 if is_alone else 2)
        keys = {"return_text_replacement_offsets": True} if self._returns_replacements else {}
        processed = self.processor(
            text=[self.placeholder * len(images)],
            images=[images],
            add_special_tokens=False,
            **keys,
        )
        replaced = processed.get("text_replacement_offsets")
        if replaced is not None:
            return str(replaced[0][0]["replacement"])
        ids = processed["input_ids"][0]
        return str(self.processor.tokenizer.decode(ids[: len(ids) // len(images)]))

    @property
    def _returns_replacements(self) -> bool:
        return hasattr(self.processor, "get_text_with_replacements")

    def _scaled(self, size: tuple[int, int]) -> tuple[int, int]:
        width, height = size
        if self.max_pixels is None or width * height <= self.max_pixels:
            return size
        scale = (self.max_pixels / (width * height)) ** 0.5
        return max(1, int(width * scale)), max(1, int(height * scale))

    def pixels(self, sources: Sequence[Blob]) -> dict[str, torch.Tensor]:
        """Return the inputs of the model for the images of one sample, by name.

        Raises:
            RunError: an image cannot be read.
        """
        return self._inputs_for(self.open_images(sources))

    def open_images(self, sources: Sequence[Blob]) -> list[Any]:
        """Return the images as the processor gets them.

        Raises:
            RunError: an image cannot be read.
        """
        return [self._read(source) for source in sources]

    def _inputs_for(self, images: list[Any]) -> dict[str, torch.Tensor]:
        processed = self.processor(
            text=[self.placeholder * len(images)], images=[images], return_tensors="pt"
        )
        of_tokens = _names_of_token_inputs(processed)
        return {name: value for name, value in processed.items() if name not in of_tokens}

    @cached_property
    def token_inputs(self) -> list[str]:
        """The names of the model's inputs that have a value for each token, besides the token IDs
        and the attention mask.

        Raises:
            ConfigError: there is one that Paceline does not compute.
        """
        processed = self.processor(
            text=[self.placeholder], images=[[_blank()]], return_tensors="pt"
        )
        names = _names_of_token_inputs(processed) - {"input_ids", "attention_mask"}
        if unknown := [name for name in sorted(names) if not name.endswith("token_type_ids")]:
            raise ConfigError(
                "the processor {processor} gives the model `{name}` for each token, which is not"
                " supported",
                code="processor-input-unknown",
                fix="choose another model",
                processor=type(self.processor).__name__,
                name=unknown[0],
            )
        return sorted(names)

    def has_image_tokens(self, ids: np.ndarray) -> bool:
        """Return whether some of the tokens stand for images."""
        return bool(self.are_of_images(ids).any())

    def are_of_images(self, ids: np.ndarray) -> np.ndarray:
        """Return whether each token stands for an image, bool [tokens]."""
        tokens = getattr(self.processor, "image_token_ids", None) or [self.processor.image_token_id]
        return np.isin(ids, [token for token in tokens if token is not None])

    def token_types(self, ids: np.ndarray) -> np.ndarray:
        """Return the kind of each token of a sample, int64 [tokens]: 0 for text, 1 for images."""
        types = self.processor.create_mm_token_type_ids([ids.tolist()])[0]
        return np.asarray(types, dtype=np.int64)

    @cached_property
    def row_inputs(self) -> frozenset[str]:
        """The names of the inputs of :meth:`pixels` that have an entry for each sample, also for
        one without images; the others have the entries of all samples one after the other."""
        alone = self._inputs_for([_blank()])
        try:
            both = self.processor(
                text=[self.placeholder, "text"],
                images=[[_blank()], []],
                padding=True,
                return_tensors="pt",
            )
        except (TypeError, ValueError, RuntimeError, IndexError):
            return frozenset()  # such a processor takes no samples without images
        return frozenset(name for name, value in alone.items() if len(both[name]) != len(value))

    def blank_sample(self) -> ImageTextSample:
        """Return a sample with a small black image and without label tokens."""
        return self.sample(self.placeholder, [_blank()])

    def sample(self, text: str, images: list[Any]) -> ImageTextSample:
        """Return a sample without label tokens.

        Args:
            text: text with a placeholder for each image.
        """
        processed = self.processor(text=[text], images=[images])
        tokens = np.array(processed["input_ids"][0], dtype=np.int32)
        return {
            "input_ids": tokens,
            "labels_mask": np.zeros(len(tokens), dtype=np.bool_),
            "pixels": self._inputs_for(images),
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
                reason=describe_failure(error),
            ) from error
        size = self._scaled(image.size)
        return image if size == image.size else image.resize(size, Image.Resampling.BICUBIC)


@cache
def load_processor(folder: Path, max_pixels: int | None, trust_remote_code: bool) -> ImageProcessor:
    """Return the processor of a model, loaded once per process.

    Raises:
        ConfigError: it cannot be loaded.
    """
    return ImageProcessor(folder, max_pixels, trust_remote_code)


def join_inputs(
    rows: Sequence[Mapping[str, torch.Tensor]], row_inputs: Collection[str]
) -> dict[str, torch.Tensor]:
    """Return the inputs for the images of several samples, as a processor does for a batch: one
    after the other, padded with zeros to the largest.

    Args:
        rows: results of :meth:`ImageProcessor.pixels`, empty for samples without images.
        row_inputs: :attr:`ImageProcessor.row_inputs`.
    """
    names = dict.fromkeys(name for row in rows for name in row)
    return {
        name: _join([row.get(name) for row in rows], has_rows=name in row_inputs) for name in names
    }


def _join(values: list[torch.Tensor | None], has_rows: bool) -> torch.Tensor:
    present = [value for value in values if value is not None]
    shape = [max(sizes) for sizes in zip(*(value.shape[1:] for value in present), strict=True)]
    counts = [(1 if has_rows else 0) if value is None else len(value) for value in values]
    joined = present[0].new_zeros(sum(counts), *shape)
    start = 0
    for value, count in zip(values, counts, strict=True):
        if value is not None:
            places = (slice(start, start + count), *(slice(size) for size in value.shape[1:]))
            joined[places] = value
        start += count
    return joined


def _blank() -> Any:
    from PIL import Image

    return Image.new("RGB", _BLANK_SIZE)


def _names_of_token_inputs(processed: Any) -> set[str]:
    """Return the names of what a processor has returned for each token of a single text."""
    shape = processed["input_ids"].shape
    return {name for name, value in processed.items() if value.shape == shape}


def _not_loaded(folder: Path, error: Exception) -> ConfigError:
    if "torchvision" in str(error).lower() and find_spec("torchvision") is None:
        return ConfigError(
            "the processor in `{folder}` needs the package `torchvision`, which is not installed",
            code="torchvision-missing",
            fix='install it: `pip install "paceline[vision]"`',
            folder=folder,
        )
    return ConfigError(
        "the processor in `{folder}` cannot be loaded: {reason}",
        code="processor-not-loaded",
        fix="use a folder with the files of the model's processor",
        folder=folder,
        reason=first_line(error),
    )


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
