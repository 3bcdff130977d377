"""Decode images of every mode of Pillow to RGB with 8 bits per channel.

``Image.convert("RGB")`` clips values above 255, so that an image with 16 bits becomes white, and
drops the alpha channel, so that transparent areas get whatever color is stored below them.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.core.errors import first_line
from paceline.data.sources.tar import read_tar_file

if TYPE_CHECKING:
    from PIL.Image import Image

_WITH_ALPHA = ("LA", "La", "PA", "RGBA", "RGBa")
#: Upper ends of the ranges of values of images without a fixed range.
_TOPS = (1 << 8, 1 << 16)
_WHITE = (255, 255, 255, 255)


def open_image(source: str | bytes) -> Image:
    """Open an image without decoding it.

    Args:
        source: its content, its path, or :attr:`~paceline.data.sources.tar.TarFile.path`.

    Raises:
        OSError, ValueError, SyntaxError: the file does not exist, or it is not an image, or it is
            a PostScript program.
    """
    from PIL import Image

    content = read_tar_file(source) if isinstance(source, str) else source
    image = Image.open(source if content is None else io.BytesIO(content))
    if image.format == "EPS":
        image.close()
        raise OSError("PostScript is not read, because Ghostscript would run it")
    return image


def describe_failure(error: Exception) -> str:
    """Return why an image cannot be opened or decoded."""
    from PIL import UnidentifiedImageError

    if isinstance(error, UnidentifiedImageError):
        return "it is not an image"  # Pillow names an object in memory
    return getattr(error, "strerror", None) or first_line(error)


def decode_rgb(opened: Image) -> Image:
    """Return an image as RGB with 8 bits per channel, turned as its EXIF orientation states.

    - Images with 16 bits (modes ``I;16…``) are scaled from 0…65535.
    - Values of the modes ``I`` and ``F`` (32 bits) are scaled from the smallest of the ranges 0…1
      (``F`` only), 0…255 and 0…65535 that contains all of them, or else from their minimum and
      maximum.
    - Transparent pixels are blended with white.

    Raises:
        OSError, ValueError, SyntaxError: the image cannot be decoded.
    """
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(opened)
    if image.mode.startswith("I;16"):
        gray = np.asarray(image, dtype=np.float64) / 257
        return _gray(gray)
    if image.mode in ("I", "F"):
        return _gray(_scaled(np.asarray(image, dtype=np.float64), image))
    if image.mode == "LAB":
        return _from_lab(image)
    if image.mode in _WITH_ALPHA or "transparency" in image.info:
        image = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
        background = Image.new("RGBA", image.size, _WHITE)
        image = Image.alpha_composite(background, image)
    return image.convert("RGB")


def _gray(values: np.ndarray) -> Image:
    """Return a gray image of values from 0 to 255, float64 [height, width]."""
    from PIL import Image

    return Image.fromarray(values.round().clip(0, 255).astype(np.uint8)).convert("RGB")


def _scaled(values: np.ndarray, image: Image) -> np.ndarray:
    """Return values of 32 bits scaled to 0…255. Values that are not finite are 0."""
    values = np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
    low, high = float(values.min()), float(values.max())
    has_16_bits = image.mode == "I" and image.format in ("PNG", "PPM")
    if low >= 0 and (has_16_bits or high < _TOPS[1]):
        if image.mode == "F" and high <= 1:
            return values * 255
        top = _TOPS[1] if has_16_bits or high >= _TOPS[0] else _TOPS[0]
        return values * (255 / (top - 1))
    return (values - low) * (255 / (high - low or 1.0))


def _from_lab(image: Image) -> Image:
    from PIL import ImageCms

    profiles: tuple[Any, Any] = (ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB"))
    converted = ImageCms.profileToProfile(image, *profiles, outputMode="RGB")
    assert converted is not None
    return converted
