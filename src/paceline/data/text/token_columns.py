"""The columns that a sample has besides its tokens: how their values are stored, and read again."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

#: A label as it is in the data.
Label = int | str
#: Path of a file, or the content of one.
Blob = str | bytes


class ColumnStore(Protocol):
    """The files of a column while samples are appended to them."""

    def extend(self, values: Iterable[Any]) -> None:
        """Append the values of several samples."""

    def close(self) -> None:
        """Complete the files."""


class ColumnValues(Protocol):
    """The stored values of a column."""

    def __getitem__(self, row: int) -> Any:
        """Return the value of a sample."""


@dataclass(frozen=True)
class Column(ABC):
    """A value of each sample besides its tokens.

    Args:
        name: the key of the value in a sample, in the singular.
    """

    name: str

    @abstractmethod
    def store(self, folder: Path) -> ColumnStore:
        """Return the files of the column in an empty folder."""

    @abstractmethod
    def load(self, folder: Path) -> ColumnValues | None:
        """Return the stored values, or None if no sample has one."""

    def as_stored(self, value: Any) -> Any:
        """Return a value with the precision with which it is stored."""
        return value


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

    def store(self, folder: Path) -> ColumnStore:
        return _Numbers(self, folder)

    def load(self, folder: Path) -> NumberValues | None:
        path = self.path(folder)
        return NumberValues(np.load(path)) if path.is_file() else None

    def as_stored(self, value: float) -> Any:
        return np.dtype(self.dtype).type(value).item()


@dataclass(frozen=True)
class CategoryColumn(Column):
    """A label of each sample, or a list of labels. They are stored as numbers, in the order in
    which the labels occur first, and read as int64 [labels]."""

    def store(self, folder: Path) -> ColumnStore:
        return _Categories(self, folder)

    def load(self, folder: Path) -> ColumnValues:
        numbers = np.load(folder / f"{self.name}s.npy", mmap_mode="r")
        return _Slices(numbers, np.load(folder / f"{self.name}_ends.npy", mmap_mode="r"))

    def names(self, folder: Path) -> tuple[tuple[Label, ...], bool]:
        """Return the labels by number, and whether a sample may have several."""
        content = json.loads(self.names_file(folder).read_text(encoding="utf-8"))
        return tuple(content[f"{self.name}s"]), content["is_multi"]

    def names_file(self, folder: Path) -> Path:
        return folder / f"{self.name}_names.json"


@dataclass(frozen=True)
class BlobColumn(Column):
    """Any number of paths or contents of files of each sample."""

    def store(self, folder: Path) -> ColumnStore:
        return _Blobs(self, folder)

    def load(self, folder: Path) -> BlobValues:
        return BlobValues(self, folder)

    def files(self, folder: Path) -> list[Path]:
        """Return the files with the contents, the end of each content, whether it is a path, and
        the number of contents up to the end of each sample."""
        name, sample = self.name, f"sample_{self.name}_ends.npy"
        names = (f"{name}s.bin", f"{name}_ends.npy", f"{name}s_are_paths.npy", sample)
        return [folder / file for file in names]


# -- numbers
class _Numbers:
    def __init__(self, column: NumberColumn, folder: Path) -> None:
        self.column, self.folder = column, folder
        self._values = array("q" if np.dtype(column.dtype).kind == "i" else "d")
        self._has_values = False

    def extend(self, values: Iterable[float | None]) -> None:
        fill: Any = self.column.fill
        for value in values:
            self._has_values = self._has_values or value is not None
            self._values.append(fill if value is None else value)  # type: ignore[arg-type]

    def close(self) -> None:
        if self._has_values:
            np.save(self.column.path(self.folder), np.array(self._values, self.column.dtype))


@dataclass
class NumberValues:
    """The numbers of all samples."""

    values: np.ndarray

    def __getitem__(self, row: int) -> Any:
        return self.values[row].item()


# -- categories
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
        name = self.column.name
        np.save(self.folder / f"{name}s.npy", np.array(self._flat, dtype=np.int64))
        np.save(self.folder / f"{name}_ends.npy", np.array(self._ends, dtype=np.int64))
        content = {f"{name}s": list(self._numbers), "is_multi": self._is_multi}
        self.column.names_file(self.folder).write_text(json.dumps(content), encoding="utf-8")


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


# -- blobs
class _Blobs:
    def __init__(self, column: BlobColumn, folder: Path) -> None:
        self._files = column.files(folder)
        self._contents = open(self._files[0], "wb")  # noqa: SIM115  (open until close)
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

    def __init__(self, column: BlobColumn, folder: Path) -> None:
        self._contents, *files = column.files(folder)
        ends, self._are_paths, sample_ends = (np.load(file, mmap_mode="r") for file in files)
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
