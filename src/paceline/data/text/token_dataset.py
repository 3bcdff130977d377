"""Tokenized samples in a folder, read through a memory map."""

from __future__ import annotations

import json
import random
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np

from paceline.core.files import write_json_atomic

TOKENS, MASK, LENGTHS, LABEL_COUNTS = (
    "tokens.bin",
    "labels_mask.bin",
    "lengths.npy",
    "label_counts.npy",
)
_LARGEST_TOKEN = "largest_token.json"
#: Factor of the loss of each sample, if a source has them.
WEIGHTS = "loss_weights.npy"
#: Of labeled texts: numbers of the labels of all samples, the end of each sample among them, and
#: the labels by number.
LABELS, LABEL_ENDS, LABEL_NAMES = "labels.npy", "label_ends.npy", "label_names.json"

#: Difference of the noise keys of consecutive tokens; see
#: :func:`paceline.data.collate.noise_inputs`.
NOISE_STEP = 0x27D4EB2F

#: A label as it is in the data.
Label = int | str


class TokenSample(TypedDict):
    """``input_ids`` int32 [tokens]; ``labels_mask`` bool [tokens], true where the token carries
    loss; ``seed``: of the sample's noise, if there is any, an unsigned 32-bit number; ``source``:
    index of its source, if several are mixed; ``weight``: factor of its loss, if the data have
    them."""

    input_ids: np.ndarray
    labels_mask: np.ndarray
    seed: NotRequired[int]
    source: NotRequired[int]
    weight: NotRequired[float]


class LabeledSample(TokenSample):
    """A text with its classes, int64 [labels]. ``labels_mask`` is true for the tokens of the second
    text of a pair."""

    classes: np.ndarray


class TokenDataset:
    """Map-style dataset of tokenized samples. It is pickled as a path and opens the files again
    when unpickled.

    Args:
        folder: an entry of the cache, written by :class:`TokenWriter`.
        indices: int array of the entry's samples that belong to this dataset, in order; None for
            all of them.
        with_seeds: whether samples have a seed, drawn from Python's random state.
        source_ends: with mixed sources, the index of the first sample after each of them.

    Attributes:
        deterministic: whether samples do not depend on random state, so that the loader need not
            set it.
        lengths: int64 [num_samples], tokens of each sample.
        label_counts: int64 [num_samples], positions of each sample that carry loss. The first
            position never does, because no token precedes it.
        loss_weights: float32 [num_samples], factor of each sample's loss, or None if the data have
        none.
    """

    def __init__(
        self,
        folder: Path,
        indices: np.ndarray | None = None,
        with_seeds: bool = False,
        source_ends: tuple[int, ...] = (),
    ) -> None:
        self.source_ends = source_ends
        self.folder = Path(folder)
        self.deterministic = not with_seeds
        self.indices = None if indices is None else np.asarray(indices, dtype=np.int64)
        lengths = np.load(self.folder / LENGTHS)
        label_counts = np.load(self.folder / LABEL_COUNTS)
        starts = np.concatenate([[0], np.cumsum(lengths)])[:-1].astype(np.int64)
        chosen = slice(None) if self.indices is None else self.indices
        self.lengths, self.label_counts = lengths[chosen], label_counts[chosen]
        self._starts = starts[chosen]
        weights = self.folder / WEIGHTS
        self.loss_weights = np.load(weights)[chosen] if weights.is_file() else None
        self._tokens = np.memmap(self.folder / TOKENS, dtype=np.int32, mode="r")
        self._mask = np.memmap(self.folder / MASK, dtype=np.bool_, mode="r")

    def __reduce__(self) -> tuple[type[TokenDataset], tuple[Any, ...]]:
        arguments = (self.folder, self.indices, not self.deterministic, self.source_ends)
        return TokenDataset, arguments

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> TokenSample:
        return self.piece(index, 0, int(self.lengths[index]))

    def piece(self, index: int, start: int, stop: int) -> TokenSample:
        """Return the tokens [start, stop) of a sample."""
        first = int(self._starts[index])
        tokens = slice(first + start, first + stop)
        sample: TokenSample = {
            "input_ids": np.array(self._tokens[tokens]),
            "labels_mask": np.array(self._mask[tokens]),
        }
        if not self.deterministic:
            # A piece has the noise of its place in the sample.
            sample["seed"] = (random.getrandbits(32) + start * NOISE_STEP) % (1 << 32)
        if self.source_ends:
            sample["source"] = bisect_right(self.source_ends, index)
        if self.loss_weights is not None:
            sample["weight"] = float(self.loss_weights[index])
        return sample

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

    def subset(self, indices: Any) -> TokenDataset:
        """Return the samples at ``indices`` as a dataset over the same files."""
        chosen = np.asarray(indices, dtype=np.int64)
        indices = chosen if self.indices is None else self.indices[chosen]
        return TokenDataset(self.folder, indices, not self.deterministic)


class TokenWriter:
    """Append samples to the files that :class:`TokenDataset` reads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tokens = open(folder / TOKENS, "wb")  # noqa: SIM115  (open until close)
        self._mask = open(folder / MASK, "wb")  # noqa: SIM115
        self.lengths = array("q")
        self.label_counts = array("q")
        self.weights = array("f")
        self._has_weights = False

    def extend(
        self,
        tokens: list[bytes],
        mask: list[bytes],
        lengths: list[int],
        label_counts: list[int],
        weights: list[float | None],
    ) -> None:
        """Append several samples: the int32 and bool values, the length, the number of labels and
        the factor of the loss (None: 1) of each sample."""
        self._tokens.writelines(tokens)
        self._mask.writelines(mask)
        self.lengths.extend(lengths)
        self.label_counts.extend(label_counts)
        self.weights.extend(1.0 if weight is None else weight for weight in weights)
        self._has_weights = self._has_weights or any(weight is not None for weight in weights)

    def close(self) -> None:
        self._tokens.close()
        self._mask.close()
        np.save(self.folder / LENGTHS, np.array(self.lengths, dtype=np.int64))
        np.save(self.folder / LABEL_COUNTS, np.array(self.label_counts, dtype=np.int64))
        if self._has_weights:
            np.save(self.folder / WEIGHTS, np.array(self.weights, dtype=np.float32))


class LabeledDataset(TokenDataset):
    """Map-style dataset of labeled texts.

    Args:
        folder, indices: as in :class:`TokenDataset`.
        numbers: the class of each label of the entry.
    """

    def __init__(
        self, folder: Path, indices: np.ndarray | None = None, numbers: Sequence[int] = ()
    ) -> None:
        super().__init__(folder, indices)
        self.numbers = np.asarray(numbers, dtype=np.int64)
        self._labels = np.load(self.folder / LABELS, mmap_mode="r")
        self._ends = np.load(self.folder / LABEL_ENDS, mmap_mode="r")

    def __reduce__(self) -> Any:
        return LabeledDataset, (self.folder, self.indices, self.numbers)

    def __getitem__(self, index: int) -> LabeledSample:
        return {**super().__getitem__(index), "classes": self.classes_of(index)}

    def classes_of(self, index: int) -> np.ndarray:
        """Return the classes of a sample, int64 [labels], without reading its tokens."""
        row = index if self.indices is None else int(self.indices[index])
        start = int(self._ends[row - 1]) if row else 0
        classes: np.ndarray = self.numbers[self._labels[start : int(self._ends[row])]]
        return classes

    def subset(self, indices: Any) -> LabeledDataset:
        """Return the samples at ``indices`` as a dataset over the same files."""
        chosen = super().subset(indices).indices
        return LabeledDataset(self.folder, chosen, self.numbers.tolist())


class LabelWriter:
    """Append the labels of samples to the files that :class:`LabeledDataset` reads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._numbers: dict[Label, int] = {}
        self._flat = array("q")
        self._ends = array("q")

    def extend(self, samples: Iterable[Sequence[Label]]) -> None:
        """Append the labels of several samples."""
        numbers = self._numbers
        for labels in samples:
            self._flat.extend(numbers.setdefault(label, len(numbers)) for label in labels)
            self._ends.append(len(self._flat))

    @property
    def labels(self) -> frozenset[Label]:
        """The distinct labels."""
        return frozenset(self._numbers)

    def close(self, is_multi: bool) -> None:
        """Write the files. ``is_multi`` states whether a sample may have several labels."""
        np.save(self.folder / LABELS, np.array(self._flat, dtype=np.int64))
        np.save(self.folder / LABEL_ENDS, np.array(self._ends, dtype=np.int64))
        content = {"labels": list(self._numbers), "is_multi": is_multi}
        (self.folder / LABEL_NAMES).write_text(json.dumps(content), encoding="utf-8")
