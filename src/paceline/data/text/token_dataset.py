"""Tokenized samples in a folder, read through a memory map."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

TOKENS, MASK, LENGTHS, LABEL_COUNTS = (
    "tokens.bin",
    "labels_mask.bin",
    "lengths.npy",
    "label_counts.npy",
)


class TokenSample(TypedDict):
    """``input_ids`` int32 [tokens]; ``labels_mask`` bool [tokens], true where the token carries
    loss."""

    input_ids: np.ndarray
    labels_mask: np.ndarray


class TokenDataset:
    """Map-style dataset of tokenized samples. It is pickled as a path and opens the files again
    when unpickled.

    Args:
        folder: an entry of the cache, written by :class:`TokenWriter`.
        indices: int array of the entry's samples that belong to this dataset, in order; None for
            all of them.

    Attributes:
        lengths: int64 [num_samples], tokens of each sample.
        label_counts: int64 [num_samples], positions of each sample that carry loss. The first
            position never does, because no token precedes it.
    """

    # Samples do not depend on random state, so the loader does not need to set it.
    deterministic = True

    def __init__(self, folder: Path, indices: np.ndarray | None = None) -> None:
        self.folder = Path(folder)
        self.indices = None if indices is None else np.asarray(indices, dtype=np.int64)
        lengths = np.load(self.folder / LENGTHS)
        label_counts = np.load(self.folder / LABEL_COUNTS)
        starts = np.concatenate([[0], np.cumsum(lengths)])[:-1].astype(np.int64)
        chosen = slice(None) if self.indices is None else self.indices
        self.lengths, self.label_counts = lengths[chosen], label_counts[chosen]
        self._starts = starts[chosen]
        self._tokens = np.memmap(self.folder / TOKENS, dtype=np.int32, mode="r")
        self._mask = np.memmap(self.folder / MASK, dtype=np.bool_, mode="r")

    def __reduce__(self) -> tuple[type[TokenDataset], tuple[Path, np.ndarray | None]]:
        return TokenDataset, (self.folder, self.indices)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> TokenSample:
        start = int(self._starts[index])
        end = start + int(self.lengths[index])
        return {
            "input_ids": np.array(self._tokens[start:end]),
            "labels_mask": np.array(self._mask[start:end]),
        }

    def subset(self, indices: Any) -> TokenDataset:
        """Return the samples at ``indices`` as a dataset over the same files."""
        chosen = np.asarray(indices, dtype=np.int64)
        return TokenDataset(self.folder, chosen if self.indices is None else self.indices[chosen])


class TokenWriter:
    """Append samples to the files that :class:`TokenDataset` reads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tokens = open(folder / TOKENS, "wb")  # noqa: SIM115  (open until close)
        self._mask = open(folder / MASK, "wb")  # noqa: SIM115
        self.lengths = array("q")
        self.label_counts = array("q")

    def extend(
        self,
        tokens: list[bytes],
        mask: list[bytes],
        lengths: list[int],
        label_counts: list[int],
    ) -> None:
        """Append several samples: the int32 and bool values, the length and the number of labels of
        each sample."""
        self._tokens.writelines(tokens)
        self._mask.writelines(mask)
        self.lengths.extend(lengths)
        self.label_counts.extend(label_counts)

    def close(self) -> None:
        self._tokens.close()
        self._mask.close()
        np.save(self.folder / LENGTHS, np.array(self.lengths, dtype=np.int64))
        np.save(self.folder / LABEL_COUNTS, np.array(self.label_counts, dtype=np.int64))
