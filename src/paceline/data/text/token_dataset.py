"""Tokenized samples in a folder, read through a memory map."""

from __future__ import annotations

import json
import random
from array import array
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np

from paceline.core.files import write_json_atomic
from paceline.data.text.token_columns import Column, NumberColumn

TOKENS, MASK, LENGTHS, LABEL_COUNTS = (
    "tokens.bin",
    "labels_mask.bin",
    "lengths.npy",
    "label_counts.npy",
)
_LARGEST_TOKEN = "largest_token.json"
#: Factor of the loss of each sample, if a source has them.
LOSS_WEIGHTS = NumberColumn("weight", "float32", fill=1, file="loss_weights.npy")

#: Difference of the noise keys of consecutive tokens; see
#: :func:`paceline.data.collate.noise_inputs`.
NOISE_STEP = 0x27D4EB2F


class TokenSample(TypedDict):
    """``input_ids`` int32 [tokens]; ``labels_mask`` bool [tokens], true where the token carries
    loss; ``seed``: of the sample's noise, if there is any, an unsigned 32-bit number; ``source``:
    index of its source, if several are mixed; ``weight``: factor of its loss, if the data have
    them. The columns of other kinds of samples are further keys."""

    input_ids: np.ndarray
    labels_mask: np.ndarray
    seed: NotRequired[int]
    source: NotRequired[int]
    weight: NotRequired[float]


#: Completes a sample of a dataset with this index. Picklable.
Transform = Callable[[Any, int, "TokenDataset"], Any]


class TokenDataset:
    """Map-style dataset of tokenized samples of any kind. It is pickled as a path and opens the
    files again when unpickled.

    Args:
        folder: an entry of the cache, written by :class:`TokenWriter`.
        indices: int array of the entry's samples that belong to this dataset, in order; None for
            all of them.
        columns: the columns of the kind of samples, besides the tokens.
        transform: completes each sample.
        with_seeds: whether samples have a seed, drawn from Python's random state.
        source_ends: with mixed sources, the index of the first sample after each of them.

    Attributes:
        deterministic: whether samples do not depend on random state, so that the loader need not
            set it.
        lengths: int64 [num_samples], tokens of each sample.
        label_counts: int64 [num_samples], positions of each sample that carry loss. The first
            position never does, because no token precedes it.
        reference: values that the model has computed for each sample before training, float32
            [num_samples, values], once they are known. A sample has them as ``reference``.
    """

    def __init__(
        self,
        folder: Path,
        indices: np.ndarray | None = None,
        columns: Sequence[Column] = (LOSS_WEIGHTS,),
        transform: Transform | None = None,
        *,
        with_seeds: bool = False,
        source_ends: tuple[int, ...] = (),
    ) -> None:
        self.folder, self.transform = Path(folder), transform
        self.columns, self.source_ends = tuple(columns), source_ends
        self.deterministic = not with_seeds
        self.indices = None if indices is None else np.asarray(indices, dtype=np.int64)
        self.reference: np.ndarray | None = None
        lengths = np.load(self.folder / LENGTHS)
        label_counts = np.load(self.folder / LABEL_COUNTS)
        starts = np.concatenate([[0], np.cumsum(lengths)])[:-1].astype(np.int64)
        chosen = slice(None) if self.indices is None else self.indices
        self.lengths, self.label_counts = lengths[chosen], label_counts[chosen]
        self._starts = starts[chosen]
        loaded = {column.name: column.load(self.folder) for column in self.columns}
        self._values = {name: values for name, values in loaded.items() if values is not None}
        self._tokens = np.memmap(self.folder / TOKENS, dtype=np.int32, mode="r")
        self._mask = np.memmap(self.folder / MASK, dtype=np.bool_, mode="r")

    def __reduce__(self) -> Any:
        with_seeds, source_ends = not self.deterministic, self.source_ends
        make = partial(TokenDataset, with_seeds=with_seeds, source_ends=source_ends)
        arguments = (self.folder, self.indices, self.columns, self.transform)
        return make, arguments, {"reference": self.reference}

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Any:
        sample = self.piece(index, 0, int(self.lengths[index]))
        return sample if self.transform is None else self.transform(sample, index, self)

    def piece(self, index: int, start: int, stop: int) -> TokenSample:
        """Return the tokens [start, stop) of a sample, with the values of its columns."""
        first = int(self._starts[index])
        tokens = slice(first + start, first + stop)
        sample: Any = {
            "input_ids": np.array(self._tokens[tokens]),
            "labels_mask": np.array(self._mask[tokens]),
        }
        if not self.deterministic:
            # A piece has the noise of its place in the sample.
            sample["seed"] = (random.getrandbits(32) + start * NOISE_STEP) % (1 << 32)
        if self.source_ends:
            sample["source"] = bisect_right(self.source_ends, index)
        for name in self._values:
            sample[name] = self.value(name, index)
        if self.reference is not None:
            sample["reference"] = self.reference[index]
        return sample  # type: ignore[no-any-return]

    def has(self, name: str) -> bool:
        """Return whether a column has values."""
        return name in self._values

    def value(self, name: str, index: int) -> Any:
        """Return the value of a column for a sample, without reading its tokens."""
        value = self._values[name][index if self.indices is None else int(self.indices[index])]
        return value.item() if isinstance(value, np.generic) else value

    def numbers(self, name: str) -> np.ndarray:
        """Return the values of a column of numbers, [num_samples]."""
        stored: np.ndarray = self._values[name]
        return stored if self.indices is None else stored[self.indices]

    def largest_token(self) -> int:
        """Return the largest token id of the entry, including samples of other datasets. It is
        stored, so that later runs need not read all tokens."""
        file = self.folder / _LARGEST_TOKEN
        try:
            return int(json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            largest = int(self._tokens.max(initial=0))
        with suppress(OSError):
            write_json_atomic(file, largest)
        return largest

    def largest_label(self) -> int:
        """Return the largest token id with loss."""
        has_loss = np.array(self._mask)
        has_loss[self._starts[self.lengths > 0]] = False
        return int(self._tokens[has_loss].max(initial=0))


class TokenWriter:
    """Append samples to the files that :class:`TokenDataset` reads.

    Args:
        columns: the columns of the kind of samples, besides the tokens.
    """

    def __init__(self, folder: Path, columns: Sequence[Column] = (LOSS_WEIGHTS,)) -> None:
        self.folder = folder
        self._tokens = open(folder / TOKENS, "wb")  # noqa: SIM115  (open until close)
        self._mask = open(folder / MASK, "wb")  # noqa: SIM115
        self.lengths = array("q")
        self.label_counts = array("q")
        self._stores = {column.name: column.store(folder) for column in columns}

    def extend(
        self,
        columns: Mapping[str, Sequence[Any]],
        lengths: Sequence[int],
        label_counts: Sequence[int],
    ) -> None:
        """Append several samples.

        Args:
            columns: the values of each column. ``input_ids`` and ``labels_mask`` are the int32 and
                bool values of each sample as bytes.
            lengths, label_counts: numbers of tokens, and of tokens that carry loss.
        """
        self._tokens.writelines(columns["input_ids"])
        self._mask.writelines(columns["labels_mask"])
        self.lengths.extend(lengths)
        self.label_counts.extend(label_counts)
        for name, store in self._stores.items():
            store.extend(columns.get(name) or [None] * len(lengths))

    def close(self) -> None:
        self._tokens.close()
        self._mask.close()
        np.save(self.folder / LENGTHS, np.array(self.lengths, dtype=np.int64))
        np.save(self.folder / LABEL_COUNTS, np.array(self.label_counts, dtype=np.int64))
        for store in self._stores.values():
            store.close()
