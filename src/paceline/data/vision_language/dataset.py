"""Tokenized chats with their images in a folder."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data.text.token_dataset import TokenDataset
from paceline.data.vision_language.images import ImageProcessor, ImageTextSample
from paceline.data.vision_language.rows import ImageSource

#: Paths and contents of all images; the end of each, and whether it is a path; and the end of the
#: images of each sample.
_SOURCES, _ENDS, _ARE_PATHS, _SAMPLE_ENDS = (
    "images.bin",
    "image_ends.npy",
    "images_are_paths.npy",
    "sample_image_ends.npy",
)


def has_images(folder: Path) -> bool:
    """Return whether a folder of tokenized chats has an image."""
    ends = np.load(folder / _SAMPLE_ENDS, mmap_mode="r")
    return bool(len(ends) and ends[-1])


class ImageTextDataset(TokenDataset):
    """Map-style dataset of tokenized chats with images, which are read and processed on demand.

    Args:
        folder, indices: as in :class:`TokenDataset`.
        processor: the model's processor.
    """

    def __init__(self, folder: Path, indices: np.ndarray | None, processor: ImageProcessor) -> None:
        super().__init__(folder, indices)
        self.processor = processor
        self._ends = np.load(self.folder / _ENDS, mmap_mode="r")
        self._are_paths = np.load(self.folder / _ARE_PATHS, mmap_mode="r")
        self._sample_ends = np.load(self.folder / _SAMPLE_ENDS, mmap_mode="r")

    def __reduce__(self) -> Any:
        return ImageTextDataset, (self.folder, self.indices, self.processor)

    def __getitem__(self, index: int) -> ImageTextSample:
        row = index if self.indices is None else int(self.indices[index])
        first = int(self._sample_ends[row - 1]) if row else 0
        sources = [self._source(number) for number in range(first, int(self._sample_ends[row]))]
        pixels = self.processor.pixels(sources) if sources else {}
        return {**super().__getitem__(index), "pixels": pixels}

    def _source(self, number: int) -> ImageSource:
        start = int(self._ends[number - 1]) if number else 0
        with open(self.folder / _SOURCES, "rb") as file:
            file.seek(start)
            content = file.read(int(self._ends[number]) - start)
        return content.decode() if self._are_paths[number] else content

    def subset(self, indices: Any) -> ImageTextDataset:
        """Return the samples at ``indices`` as a dataset over the same files."""
        return ImageTextDataset(self.folder, super().subset(indices).indices, self.processor)


class ImageWriter:
    """Append the images of samples to the files that :class:`ImageTextDataset` reads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._sources = open(folder / _SOURCES, "wb")  # noqa: SIM115  (open until close)
        self._ends, self._sample_ends = array("q"), array("q")
        self._are_paths = array("b")

    def extend(self, samples: Iterable[Sequence[ImageSource]]) -> None:
        """Append the images of several samples."""
        for images in samples:
            for image in images:
                self._sources.write(image.encode() if isinstance(image, str) else image)
                self._ends.append(self._sources.tell())
                self._are_paths.append(isinstance(image, str))
            self._sample_ends.append(len(self._ends))

    def close(self) -> None:
        self._sources.close()
        np.save(self.folder / _ENDS, np.array(self._ends, dtype=np.int64))
        np.save(self.folder / _ARE_PATHS, np.array(self._are_paths, dtype=np.bool_))
        np.save(self.folder / _SAMPLE_ENDS, np.array(self._sample_ends, dtype=np.int64))
