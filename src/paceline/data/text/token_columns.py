"""The columns that a sample has besides its tokens: how their values are stored, and read again."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

#: A label as it is in the data.
Label = int | str
#: Path of a file, or the content of one.
Blob = str | bytes


@dataclass(frozen=True)
class Column(ABC):
    """A value of each sample besides its tokens.

    Args:
        name: the key of the value in a sample, in the singular.
    """

    name: str

    @abstractmethod
    def store(self, folder: Path) -> Any:
        """Return an object that stores the column: its ``extend(values)`` appends the values of
        samples, and its ``close()`` completes the files."""

    @abstractmethod
    def load(self, folder: Path) -> Any:
        """Return the stored values, which ``[row]`` reads, or None if no sample has one."""

    def as_stored(self, value: Any) -> Any:
        """Return a value with the precision with which it is stored."""
        return value


# -- numbers
@dataclass(frozen=True)
class NumberColumn(Column):
    """A number of each sample. Nothing is stored if no sample has one.

    Args:
        dtype: the type of the stored numbers.
        fill: the number of samples without one, if others have one.
        file: name of the file; None for the plural of ``name``.
    """

    dtype: str = "int64"
    fill: float = 0
    file: str | None = None

    def path(self, folder: Path) -> Path:
        return folder / (self.file or f"{self.name}s.npy")

    def store(self, folder: Path) -> _Numbers:
        return _Numbers(self, self.path(folder))

    def load(self, folder: Path) -> np.ndarray | None:
        path = self.path(folder)
        return np.load(path) if path.is_file() else None

    def as_stored(self, value: float) -> Any:
        return np.dtype(self.dtype).type(value).item()


class _Numbers:
    def __init__(self, column: NumberColumn, path: Path) -> None:
        self.column, self.path = column, path
        self._values: Any = array("q" if np.dtype(column.dtype).kind == "i" else "d")
        self._has_values = False

    def extend(self, values: Iterable[float | None]) -> None:
        for value in values:
            self._has_values = self._has_values or value is not None
            self._values.append(self.column.fill if value is None else value)

    def close(self) -> None:
        if self._has_values:
            np.save(self.path, np.array(self._values, dtype=self.column.dtype))


# -- any number of values of each sample
@dataclass
class _Slices:
    """Any number of values of each sample.

    Args:
        ends: number of values up to the end of each sample.
    """

    values: np.ndarray
    ends: np.ndarray

    def bounds(self, row: int) -> tuple[int, int]:
        return int(self.ends[row - 1]) if row else 0, int(self.ends[row])

    def __getitem__(self, row: int) -> np.ndarray:
        start, end = self.bounds(row)
        return np.array(self.values[start:end])


@dataclass(frozen=True)
class CategoryColumn(Column):
    """A label of each sample, or a list of labels. They are stored as numbers, in the order in
    which the labels occur first, and read as int64 [labels]."""

    def files(self, folder: Path) -> tuple[Path, Path, Path]:
        """Return the files with the numbers, their number up to the end of each sample, and the
        labels."""
        name = self.name
        return folder / f"{name}s.npy", folder / f"{name}_ends.npy", folder / f"{name}_names.json"

    def store(self, folder: Path) -> _Categories:
        return _Categories(self, folder)

    def load(self, folder: Path) -> _Slices:
        numbers, ends, _ = self.files(folder)
        return _Slices(np.load(numbers, mmap_mode="r"), np.load(ends, mmap_mode="r"))

    def names(self, folder: Path) -> tuple[tuple[Label, ...], bool]:
        """Return the labels by number, and whether a sample may have several."""
        content = json.loads(self.files(folder)[2].read_text(encoding="utf-8"))
        return tuple(content[f"{self.name}s"]), content["is_multi"]


class _Categories:
    def __init__(self, column: CategoryColumn, folder: Path) -> None:
        self.column, self.folder = column, folder
        self._numbers: dict[Label, int] = {}
        self._flat, self._ends = array("q"), array("q")
        self._is_multi = False

    def extend(self, values: Iterable[Label | list[Label]]) -> None:
        numbers = self._numbers
        for value in values:
            labels = value if isinstance(value, list) else [value]
            self._is_multi = self._is_multi or labels is value
            self._flat.extend(numbers.setdefault(label, len(numbers)) for label in labels)
            self._ends.append(len(self._flat))

    def close(self) -> None:
        flat, ends, names = self.column.files(self.folder)
        np.save(flat, np.array(self._flat, dtype=np.int64))
        np.save(ends, np.array(self._ends, dtype=np.int64))
        content = {f"{self.column.name}s": list(self._numbers), "is_multi": self._is_multi}
        names.write_text(json.dumps(content), encoding="utf-8")


@dataclass(frozen=True)
class BlobColumn(Column):
    """Any number of paths or contents of files of each sample."""

    def files(self, folder: Path) -> list[Path]:
        """Return the files with the contents, the end of each content, whether it is a path, and
        the number of contents up to the end of each sample."""
        name, sample = self.name, f"sample_{self.name}_ends.npy"
        names = (f"{name}s.bin", f"{name}_ends.npy", f"{name}s_are_paths.npy", sample)
        return [folder / file for file in names]

    def store(self, folder: Path) -> _Blobs:
        return _Blobs(self.files(folder))

    def load(self, folder: Path) -> BlobValues:
        return BlobValues(self.files(folder))


class _Blobs:
    def __init__(self, files: list[Path]) -> None:
        self._files = files
        self._contents = open(files[0], "wb")  # noqa: SIM115  (open until close)
        self._ends, self._sample_ends = array("q"), array("q")
        self._are_paths = array("b")

    def extend(self, values: Iterable[Sequence[Blob]]) -> None:
        for blobs in values:
            for blob in blobs:
                self._contents.write(blob.encode() if isinstance(blob, str) else blob)
                self._ends.append(self._contents.tell())
                self._are_paths.append(isinstance(blob, str))
            self._sample_ends.append(len(self._ends))

    def close(self) -> None:
        self._contents.close()
        _, ends, are_paths, sample_ends = self._files
        np.save(ends, np.array(self._ends, dtype=np.int64))
        np.save(are_paths, np.array(self._are_paths, dtype=np.bool_))
        np.save(sample_ends, np.array(self._sample_ends, dtype=np.int64))


class BlobValues:
    """The paths and the contents of all samples, which are read on demand."""

    def __init__(self, files: list[Path]) -> None:
        self._contents = files[0]
        ends, self._are_paths, sample_ends = (np.load(file, mmap_mode="r") for file in files[1:])
        self._blobs, self._samples = _Slices(ends, ends), _Slices(ends, sample_ends)

    def __getitem__(self, row: int) -> list[Blob]:
        return [self._read(number) for number in range(*self._samples.bounds(row))]

    def __bool__(self) -> bool:
        """Return whether a sample has one."""
        return len(self._blobs.ends) > 0

    def _read(self, number: int) -> Blob:
        start, end = self._blobs.bounds(number)
        with open(self._contents, "rb") as file:
            file.seek(start)
            content = file.read(end - start)
        return content.decode() if self._are_paths[number] else content
