"""Tokenized answers with preferences in a folder."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NotRequired

import numpy as np

from paceline.data.text.token_dataset import TokenDataset, TokenSample

#: The number of tokens of each sample that belong to the preferred answer's sequence.
_CHOSEN_LENGTHS = "chosen_lengths.npy"
#: The difference that the scores of each pair should have at least. Missing if all are 0.
_MARGINS = "margins.npy"


class PreferenceSample(TokenSample):
    """A pair of token sequences, one after the other, or a single one. ``labels_mask`` is true for
    the tokens of the answers.

    Args:
        chosen_length: number of tokens of the first sequence, which has the preferred answer; of a
            single sequence 0 if its answer is undesirable.
        margin: difference that the scores of a pair should have at least.
        index: index of the sample in the dataset.
        mismatched: the prompt of this sample with the answer of another one, if the dataset has
            such pairs.
        reference: log-probabilities of the reference model, float32, once they are known.
    """

    chosen_length: int
    margin: float
    index: int
    mismatched: NotRequired[TokenSample]
    reference: NotRequired[np.ndarray]


class PreferenceDataset(TokenDataset):
    """Map-style dataset of answers with preferences.

    Args:
        folder, indices: as in :class:`TokenDataset`.
        mismatch_size: size of the groups of consecutive samples within which each prompt is also
            paired with the answer of the sample before it, and the first prompt with the answer of
            the last sample; 0 for none. A last group of a single sample takes the answer of the
            sample before it.
        max_length: number of tokens to which these sequences are truncated.

    Attributes:
        reference: log-probabilities of the reference model, float32 [num_samples, values], which
            are set once they are known.
    """

    def __init__(
        self,
        folder: Path,
        indices: np.ndarray | None = None,
        mismatch_size: int = 0,
        max_length: int = 0,
    ) -> None:
        super().__init__(folder, indices)
        self.mismatch_size, self.max_length = mismatch_size, max_length
        self.reference: np.ndarray | None = None
        chosen = slice(None) if self.indices is None else self.indices
        self.chosen_lengths = np.load(self.folder / _CHOSEN_LENGTHS)[chosen]
        margins = self.folder / _MARGINS
        self.margins: np.ndarray | None = np.load(margins)[chosen] if margins.is_file() else None

    def __reduce__(self) -> Any:
        arguments = (self.folder, self.indices, self.mismatch_size, self.max_length)
        return PreferenceDataset, arguments, {"reference": self.reference}

    def __getitem__(self, index: int) -> PreferenceSample:
        tokens = super().__getitem__(index)
        sample: PreferenceSample = {
            "input_ids": tokens["input_ids"],
            "labels_mask": tokens["labels_mask"],
            "chosen_length": int(self.chosen_lengths[index]),
            "margin": 0.0 if self.margins is None else float(self.margins[index]),
            "index": index,
        }
        if self.mismatch_size:
            sample["mismatched"] = self._mismatched(sample, index)
        if self.reference is not None:
            sample["reference"] = self.reference[index]
        return sample

    def _mismatched(self, sample: TokenSample, index: int) -> TokenSample:
        first = index - index % self.mismatch_size
        last = min(first + self.mismatch_size, len(self)) - 1
        is_alone = first == last
        other = super().__getitem__(last if index == first and not is_alone else max(index - 1, 0))
        prompt = sample["input_ids"][~sample["labels_mask"]]
        answer = other["input_ids"][other["labels_mask"]]
        ids = np.concatenate([prompt, answer])[: self.max_length]
        return {"input_ids": ids, "labels_mask": np.arange(len(ids)) >= len(prompt)}


class PreferenceWriter:
    """Append the lengths and margins that :class:`PreferenceDataset` reads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lengths = array("q")
        self._margins = array("d")

    def extend(self, lengths: Iterable[int], margins: Iterable[float]) -> None:
        """Append the lengths and margins of several samples."""
        self._lengths.extend(lengths)
        self._margins.extend(margins)

    def close(self) -> None:
        np.save(self.folder / _CHOSEN_LENGTHS, np.array(self._lengths, dtype=np.int64))
        if any(self._margins):
            np.save(self.folder / _MARGINS, np.array(self._margins, dtype=np.float32))
