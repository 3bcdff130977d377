"""Tokenised samples in a folder, read through a memory map."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import numpy as np

TOKENS, MASK, LENGTHS, LABEL_COUNTS = (
    "tokens.bin",
    "labels_mask.bin",
    "lengths.npy",
    "label_counts.npy",
)


class TokenDataset:
    """Map-style dataset of tokenised samples; pickles as a path and opens the files again where it
    lands.

    Args:
        folder: an entry of the cache, written by :class:`TokenWriter`.
        indices: int array of the entry's samples that belong to this dataset, in order; None for
            all of them.

    Attributes: lengths: int64 [num_samples], tokens of each sample. label_counts: int64
        [num_samples], positions of each sample that carry loss. The first position never does:
            nothing comes before it to predict it from.
    """

    # a sample is the same at every look: the loader need not set the random state for it
    deterministic = True

    def __init__(self, folder: Path, indices: np.ndarray | None = None) -> None:
        self.folder = Path(folder)
        self.indices = None if indices is None else np.asarray(indices, dtype=np.int64)
        self._open()

    def _open(self) -> None:
        lengths = np.load(self.folder / LENGTHS)
        label_counts = np.load(self.folder / LABEL_COUNTS)
        starts = np.concatenate([[0], np.cumsum(lengths)])[:-1].astype(np.int64)
        if self.indices is not None:
            lengths, label_counts, starts = (
                lengths[self.indices],
                label_counts[self.indices],
                starts[self.indices],
            )
        self.lengths, self.label_counts, self._starts = lengths, label_counts, starts
        self._tokens = np.memmap(self.folder / TOKENS, dtype=np.int32, mode="r")
        self._mask = np.memmap(self.folder / MASK, dtype=np.bool_, mode="r")

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """``input_ids`` int32 [tokens] and ``labels_mask`` bool [tokens], true where the token
        carries loss."""
        start = int(self._starts[index])
        end = start + int(self.lengths[index])
        return {
            "input_ids": np.array(self._tokens[start:end]),
            "labels_mask": np.array(self._mask[start:end]),
        }

    def subset(self, indices: Any) -> TokenDataset:
        """The samples at ``indices`` of this dataset, as a dataset over the same files."""
        chosen = np.asarray(indices, dtype=np.int64)
        return TokenDataset(self.folder, chosen if self.indices is None else self.indices[chosen])

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "indices": self.indices}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.folder, self.indices = state["folder"], state["indices"]
        self._open()


class TokenWriter:
    """Appends samples to the files that :class:`TokenDataset` reads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tokens = open(folder / TOKENS, "wb")  # noqa: SIM115  (kept open while samples come)
        self._mask = open(folder / MASK, "wb")  # noqa: SIM115
        self.lengths = array("q")
        self.label_counts = array("q")

    def add(self, input_ids: np.ndarray, labels_mask: np.ndarray) -> None:
        """One sample: token ids [tokens] and the mask [tokens] of those that carry loss."""
        self._tokens.write(np.ascontiguousarray(input_ids, dtype=np.int32).data)
        self._mask.write(np.ascontiguousarray(labels_mask, dtype=np.bool_).data)
        self.lengths.append(len(input_ids))
        self.label_counts.append(int(np.count_nonzero(labels_mask[1:])))

    def extend(
        self, tokens: bytes, mask: bytes, lengths: list[int], label_counts: list[int]
    ) -> None:
        """Several samples at once: int32 and bool values one after the other, with their numbers
        for each sample."""
        self._tokens.write(tokens)
        self._mask.write(mask)
        self.lengths.extend(lengths)
        self.label_counts.extend(label_counts)

    def close(self) -> None:
        self._tokens.close()
        self._mask.close()
        np.save(self.folder / LENGTHS, np.array(self.lengths, dtype=np.int64))
        np.save(self.folder / LABEL_COUNTS, np.array(self.label_counts, dtype=np.int64))
