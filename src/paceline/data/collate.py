"""Collate token samples into batches: packed into one row without padding, or padded.

Both give the same loss and gradients. The language-model head is needed only at positions whose
next token has a loss, so a batch lists these positions, and the other logits are never computed.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypedDict

import numpy as np
import torch

from paceline.data.text.token_dataset import NOISE_STEP, TokenSample


class SegmentInputs(TypedDict):
    """The lengths of the samples of a packed row, as :mod:`paceline.models.attention` needs them.

    They are computed on the host with the batch, so that attention does not wait for the device.
    """

    segment_lengths: tuple[int, ...]
    cu_seqlens: torch.Tensor
    max_seqlen: int


class TokenBatch(TypedDict, total=False):
    """The result of :func:`collate_packed` and :func:`collate_padded`.

    Args:
        target_counts: number of targets of each sequence of a packed row, in preference tasks.
        local_target_counts: number of these targets on this rank, if ranks divide rows.
        is_filler: whether the only token stands for a part of a row that has none.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    attention_mask: torch.Tensor
    keep: torch.Tensor
    targets: torch.Tensor
    segment_lengths: tuple[int, ...]
    cu_seqlens: torch.Tensor
    max_seqlen: int
    num_labels: int
    num_tokens: int
    noise_keys: torch.Tensor
    noise_scales: torch.Tensor
    target_sources: torch.Tensor
    source_losses: "SourceLosses"
    target_weights: torch.Tensor
    count: float
    is_filler: bool
    target_counts: tuple[int, ...]
    local_target_counts: tuple[int, ...]
    totals: dict[str, torch.Tensor]


class SourceLosses:
    """The losses of a micro-batch by source, once its loss has been computed.

    Args:
        num_samples, num_tokens: numbers of each source.
    """

    def __init__(self, num_samples: list[int], num_tokens: list[int]) -> None:
        self.num_samples, self.num_tokens = num_samples, num_tokens
        #: float32 [2, sources]: the sum of the losses, and the number of label tokens.
        self.sums: torch.Tensor | None = None

    def record(self, losses: torch.Tensor, sources: torch.Tensor, weights: torch.Tensor) -> None:
        """Sum the losses of tokens by source; each argument is [tokens]. ``weights``: weights of
        the losses, 0 for a token without loss."""
        numbers = torch.arange(len(self.num_samples), device=sources.device)
        of_source = (sources == numbers.unsqueeze(1)) * weights.float()  # [sources, tokens]
        sums = (of_source * losses.detach().float()).sum(1)
        self.sums = torch.stack([sums, of_source.sum(1)])


class MetricSums:
    """The metrics of a micro-batch, once its loss has been computed.

    Args:
        names: names of the metrics.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        #: float32 [2, metrics]: the sums of the values, and their numbers.
        self.sums: torch.Tensor | None = None

    def record(self, metrics: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Store the sum and the number of values of each metric."""
        rows = zip(*(metrics[name] for name in self.names), strict=True)
        self.sums = torch.stack([torch.stack(row).detach().float() for row in rows])


def add_sources(batch: TokenBatch, samples: Sequence[TokenSample], num_sources: int) -> None:
    """Add the source of each target to a batch of samples of several sources: ``target_sources``,
    int64 in the shape of ``targets``."""
    sources = np.array([sample["source"] for sample in samples], dtype=np.int64)
    lengths = [len(sample["input_ids"]) for sample in samples]
    batch["target_sources"] = _of_targets(batch, sources)
    batch["source_losses"] = SourceLosses(
        np.bincount(sources, minlength=num_sources).tolist(),
        np.bincount(sources, lengths, num_sources).astype(np.int64).tolist(),
    )


def add_weights(batch: TokenBatch, samples: Sequence[TokenSample]) -> None:
    """Add the weights of samples with weights: ``target_weights``, float32 in the shape of
    ``targets`` and 0 where a target has no loss; and their sum ``count``."""
    weights = np.array([sample.get("weight", 1.0) for sample in samples], dtype=np.float32)
    of_targets = _of_targets(batch, weights).masked_fill(batch["targets"] == -100, 0.0)
    batch["target_weights"] = of_targets
    batch["count"] = float(of_targets.sum(dtype=torch.float64))


def _of_targets(batch: TokenBatch, values: np.ndarray) -> torch.Tensor:
    """Return the value of each target's sample, in the shape of ``targets``.

    Args:
        values: value of each sample [samples].
    """
    if "segment_lengths" in batch:
        return torch.from_numpy(np.repeat(values, batch["segment_lengths"]))[batch["keep"] + 1]
    return torch.from_numpy(values).unsqueeze(1).expand_as(batch["targets"]).clone()


def collate_packed(samples: Sequence[TokenSample]) -> TokenBatch:
    """Concatenate the samples in one row. position_ids start at 0 for each sample, which separates
    samples in attention.

    Returns:
        input_ids, position_ids: int64 [1, tokens]; keep: int64 [labels], positions whose next token
            carries loss;
        targets: int64 [labels]; segment_lengths: tokens of each sample; cu_seqlens: their
            cumulative sum, int32 [samples + 1]; max_seqlen: the longest; num_labels, num_tokens:
            int.
    """
    ids = np.concatenate([sample["input_ids"] for sample in samples]).astype(np.int64)
    positions = np.concatenate(
        [np.arange(len(sample["input_ids"]), dtype=np.int64) for sample in samples]
    )
    mask = np.concatenate([sample["labels_mask"] for sample in samples]).copy()
    mask[positions == 0] = False  # no token precedes the first one
    targets = np.flatnonzero(mask)
    segments = segment_inputs([len(sample["input_ids"]) for sample in samples])
    batch: TokenBatch = {
        "input_ids": torch.from_numpy(ids).unsqueeze(0),
        "position_ids": torch.from_numpy(positions).unsqueeze(0),
        "keep": torch.from_numpy(targets - 1),
        "targets": torch.from_numpy(ids[targets]),
        "segment_lengths": segments["segment_lengths"],
        "cu_seqlens": segments["cu_seqlens"],
        "max_seqlen": segments["max_seqlen"],
        "num_labels": len(targets),
        "num_tokens": len(ids),
    }
    if "seed" in samples[0]:
        noise = [noise_inputs(sample["seed"], len(sample["input_ids"])) for sample in samples]
        keys, scales = (torch.from_numpy(np.concatenate(part)) for part in zip(*noise, strict=True))
        batch["noise_keys"], batch["noise_scales"] = keys.unsqueeze(0), scales.unsqueeze(0)
    return batch


def noise_inputs(seed: int, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Return what the noise of a sample's embeddings depends on; see
    :mod:`paceline.models.transforms.embedding_noise`.

    Returns:
        A key for each token, int32 [tokens], and the scale of its noise before it is divided by
        the square root of the width, float32 [tokens].
    """
    keys = (np.arange(num_tokens, dtype=np.uint64) * NOISE_STEP + seed).astype(np.uint32)
    scales = np.full(num_tokens, num_tokens**-0.5, dtype=np.float32)
    return keys.view(np.int32), scales


def segment_inputs(lengths: Sequence[int], device: torch.device | str = "cpu") -> SegmentInputs:
    """Return the inputs of a model with packed rows that describe the samples of a row."""
    ends = np.cumsum([0, *lengths], dtype=np.int32)
    return {
        "segment_lengths": tuple(lengths),
        "cu_seqlens": torch.from_numpy(ends).to(device),
        "max_seqlen": max(lengths),
    }


def collate_padded(samples: Sequence[TokenSample], pad_token_id: int) -> TokenBatch:
    """Put each sample in one row, padded on the right to the longest.

    Returns:
        input_ids, attention_mask: int64 [rows, longest]; keep: int64 [columns], those where any
        row's next token carries loss; targets: int64 [rows, columns], -100 where that row's does
        not; num_labels, num_tokens: int (padding not counted).
    """
    longest = max(len(sample["input_ids"]) for sample in samples)
    ids = np.full((len(samples), longest), pad_token_id, dtype=np.int64)
    attention = np.zeros((len(samples), longest), dtype=np.int64)
    next_targets = np.full((len(samples), longest), -100, dtype=np.int64)
    for row, sample in enumerate(samples):
        tokens = sample["input_ids"]
        ids[row, : len(tokens)] = tokens
        attention[row, : len(tokens)] = 1
        positions = np.flatnonzero(sample["labels_mask"][1:])
        next_targets[row, positions] = tokens[positions + 1]
    keep = np.flatnonzero((next_targets != -100).any(axis=0))
    targets = next_targets[:, keep]
    batch: TokenBatch = {
        "input_ids": torch.from_numpy(ids),
        "attention_mask": torch.from_numpy(attention),
        "keep": torch.from_numpy(keep),
        "targets": torch.from_numpy(np.ascontiguousarray(targets)),
        "num_labels": int((targets != -100).sum()),
        "num_tokens": int(attention.sum()),
    }
    if "seed" in samples[0]:
        keys = np.zeros((len(samples), longest), dtype=np.int32)
        scales = np.zeros((len(samples), longest), dtype=np.float32)
        for row, sample in enumerate(samples):
            count = len(sample["input_ids"])
            keys[row, :count], scales[row, :count] = noise_inputs(sample["seed"], count)
        batch["noise_keys"], batch["noise_scales"] = (
            torch.from_numpy(keys),
            torch.from_numpy(scales),
        )
    return batch


def pad_tokens(rows: Iterable[np.ndarray], value: int) -> np.ndarray:
    """Return the rows padded on the right to the longest: int64 [rows, longest]."""
    rows = list(rows)
    padded = np.full((len(rows), max(map(len, rows))), value, dtype=np.int64)
    for number, row in enumerate(rows):
        padded[number, : len(row)] = row
    return padded


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply ``change`` to each tensor in nested dicts, lists, tuples and named tuples; leave other
    values as they are."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        changed = copy.copy(value)  # of the same class, such as an output of transformers
        for key, item in value.items():  # outputs of transformers have no `update`
            changed[key] = map_tensors(item, change)
        return changed
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(item, change) for item in value)
    return value


def find_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from find_tensors(item)
