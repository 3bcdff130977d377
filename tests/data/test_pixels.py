"""Images of every mode become RGB with 8 bits, without clipped values or hidden colors."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from paceline.data.images import ImageForm, read_image
from paceline.data.pixels import decode_rgb, open_image

RAMP = np.arange(256, dtype=np.int64).reshape(16, 16)


def saved(image: Image.Image, form: str) -> Image.Image:
    content = io.BytesIO()
    image.save(content, form)
    content.seek(0)
    return Image.open(content)


def gray(image: Image.Image) -> np.ndarray:
    pixels = np.asarray(decode_rgb(image))
    assert pixels.shape == (16, 16, 3)
    assert pixels.dtype == np.uint8
    assert (pixels == pixels[:, :, :1]).all()
    return pixels[:, :, 0]


def sixteen(order: str, values: np.ndarray) -> Image.Image:
    raw = values.astype(f"{order}u2").tobytes()
    mode = "I;16" if order == "<" else "I;16B"
    return Image.frombytes(mode, (16, 16), raw)


@pytest.mark.parametrize(
    ("order", "form"), [("<", None), ("<", "PNG"), ("<", "TIFF"), (">", None), (">", "TIFF")]
)
def test_sixteen_bits_are_scaled(order: str, form: str | None) -> None:
    image = sixteen(order, RAMP * 257)
    if form is not None:
        image = saved(image, form)
    assert image.mode.startswith("I")
    np.testing.assert_array_equal(gray(image), RAMP)


def test_dark_image_with_sixteen_bits_stays_dark() -> None:
    assert gray(saved(sixteen("<", RAMP), "PNG")).max() == 1


def test_gray_map_with_sixteen_bits_is_scaled() -> None:
    content = b"P5 16 16 65535\n" + (RAMP * 257).astype(">u2").tobytes()
    np.testing.assert_array_equal(gray(Image.open(io.BytesIO(content))), RAMP)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (RAMP.astype(np.int32), RAMP),
        ((RAMP * 257).astype(np.int32), RAMP),
        ((RAMP * 1_000_000).astype(np.int32), RAMP),
        ((RAMP * 100 - 500).astype(np.int32), RAMP),
        ((RAMP / 255).astype(np.float32), RAMP),
        (RAMP.astype(np.float32), RAMP),
        ((RAMP * 257).astype(np.float32), RAMP),
        ((RAMP * 1e6 - 7).astype(np.float32), RAMP),
        (np.where(RAMP == 0, np.nan, RAMP / 255).astype(np.float32), RAMP),
    ],
    ids=["I 8", "I 16", "I 32", "I signed", "F unit", "F 8", "F 16", "F 32", "F nan"],
)
def test_values_with_thirty_two_bits_are_scaled(values: Any, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(gray(Image.fromarray(values)), expected)
    np.testing.assert_array_equal(gray(saved(Image.fromarray(values), "TIFF")), expected)


def test_image_of_one_value_is_decoded() -> None:
    assert (gray(Image.new("F", (16, 16), -3.0)) == 0).all()


@pytest.mark.parametrize("mode", ["LA", "PA", "RGBA", "RGBa", "La"])
def test_transparent_pixels_are_white(mode: str) -> None:
    image = Image.new("RGBA", (16, 16), (200, 200, 200, 255))
    image.paste((0, 0, 0, 0), (0, 0, 8, 16))
    if mode == "PA":
        palette = Image.new("P", (16, 16), 1)
        palette.putpalette([0, 0, 0, 200, 200, 200])
        palette.paste(0, (0, 0, 8, 16))
        converted = palette.convert("PA")
        converted.putalpha(image.getchannel("A"))
    elif mode == "La":
        converted = image.convert("LA").convert("La")
    else:
        converted = image.convert(mode)
    assert converted.mode == mode
    values = gray(converted)
    assert (values[:, :8] == 255).all()
    assert (values[:, 8:] == 200).all()


@pytest.mark.parametrize("form", ["PNG", "GIF"])
def test_transparent_color_of_a_palette_is_white(form: str) -> None:
    image = Image.new("P", (16, 16), 1)
    image.putpalette([0, 0, 0, 200, 200, 200])
    image.paste(0, (0, 0, 8, 16))
    content = io.BytesIO()
    image.save(content, form, transparency=0)
    values = gray(Image.open(content))
    assert (values[:, :8] == 255).all()
    assert (values[:, 8:] == 200).all()


def test_half_transparent_pixels_are_blended() -> None:
    image = Image.new("RGBA", (16, 16), (0, 0, 0, 128))
    assert abs(int(gray(image)[0, 0]) - 127) <= 1


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "CMYK", "YCbCr", "HSV", "LAB", "RGBX"])
def test_other_modes_keep_their_colors(mode: str) -> None:
    source = Image.new("RGB", (16, 16), (255, 255, 255))
    source.paste((0, 0, 0), (0, 0, 8, 16))
    if mode == "LAB":
        lab = np.zeros((16, 16, 3), dtype=np.uint8)
        lab[:, 8:, 0] = 255
        image = Image.fromarray(lab, "LAB")
    else:
        image = source.convert(mode)
    pixels = np.asarray(decode_rgb(image)).astype(int)
    assert abs(pixels - np.asarray(source)).max() <= 2


@pytest.mark.parametrize("channels", [1, 3])
def test_classification_reads_sixteen_bits(tmp_path: Path, channels: int) -> None:
    sixteen("<", RAMP * 257).save(tmp_path / "a.png")
    pixels = read_image(tmp_path / "a.png", ImageForm(channels))
    assert pixels.shape == (channels, 16, 16)
    np.testing.assert_allclose(pixels[0].numpy(), RAMP / 255, atol=1e-6)


def test_postscript_is_not_run() -> None:
    content = io.BytesIO()
    Image.new("RGB", (2, 2)).save(content, "EPS")
    with pytest.raises(OSError, match="PostScript"):
        open_image(content.getvalue())
