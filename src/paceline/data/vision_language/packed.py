"""Samples with images in one row: their inputs, and the samples on which this is tested."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.data.vision_language.images import ImageProcessor, ImageTextSample, join_inputs

if TYPE_CHECKING:
    import torch

#: (width, height) of the images of the tests, by sample.
_SIZES = (((96, 64),), ((64, 80), (128, 64)))


def join_in_row(
    rows: Sequence[Mapping[str, torch.Tensor]], row_inputs: Collection[str]
) -> dict[str, torch.Tensor]:
    """Return the inputs for the images of the samples of a packed row. Inputs with an entry for
    each row get a single one, with the images of all samples.

    Args:
        rows: results of :meth:`ImageProcessor.pixels`, empty for samples without images.
        row_inputs: :attr:`ImageProcessor.row_inputs`.
    """
    of_images = [
        {name: value.squeeze(0) if name in row_inputs else value for name, value in row.items()}
        for row in rows
    ]
    joined = join_inputs(of_images, ())
    return {
        name: value.unsqueeze(0) if name in row_inputs else value for name, value in joined.items()
    }


def example_samples(
    processor: ImageProcessor, lengths: Sequence[int], with_images: bool
) -> list[ImageTextSample]:
    """Return samples that show whether a model keeps the samples of a row apart: texts, and between
    them samples with one and with two images of random pixels between texts.

    Args:
        lengths: number of tokens of each text.
        with_images: whether there are samples with images.
    """
    random = np.random.default_rng(0)
    tokenizer: Any = processor.processor.tokenizer
    marks = list(tokenizer.added_tokens_decoder)
    tokens = np.setdiff1d(np.arange(len(tokenizer), dtype=np.int32), marks)
    samples: list[ImageTextSample] = []
    for number, length in enumerate(lengths):
        ids = random.choice(tokens, length).astype(np.int32)
        mask = np.zeros(length, dtype=np.bool_)
        samples.append({"input_ids": ids, "labels_mask": mask, "pixels": {}})
        if with_images and number < len(_SIZES):
            samples.append(_sample(processor, _SIZES[number], random))
    return samples


def _sample(
    processor: ImageProcessor, sizes: Sequence[tuple[int, int]], random: np.random.Generator
) -> ImageTextSample:
    from PIL import Image

    images = [
        Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))
        for width, height in sizes
    ]
    texts = [f"{processor.placeholder} or {number}, " for number in range(len(images))]
    return processor.sample(f"Which? {''.join(texts)}the end.", images)
