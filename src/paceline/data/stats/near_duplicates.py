"""Find samples that are almost the same, by MinHash (Broder, "On the resemblance and containment of
documents", 1997) through datasketch.

The similarity of two samples is the Jaccard index of their sets of five consecutive tokens. Samples
that are similar to a common sample belong to one group, so the members of a large group may differ
more than the threshold says.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import numpy as np

from paceline.core.stop import poll
from paceline.data.text.token_dataset import TokenDataset
from paceline.data.worker_pool import worker_pool
from paceline.distributed.devices import cpu_cores

if TYPE_CHECKING:
    from concurrent.futures import ProcessPoolExecutor

#: Number of consecutive tokens whose sets are compared.
SHINGLE_TOKENS = 5
#: Smallest Jaccard index of two similar samples.
THRESHOLD = 0.8
_NUM_PERMUTATIONS = 128
_SCHEME = "affine32"  # datasketch's permutations of 32-bit hashes
_PARALLEL_SAMPLES = 20_000  # for fewer, starting processes takes longer
_CHUNK_SAMPLES = 1_000
_MAX_WORKERS = 32
_GROUPS_SHOWN = 5
#: Odd constants of the hash of consecutive tokens.
_MULTIPLIERS = np.array([0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F, 0x165667B1], np.uint64)


class SimilarGroup(TypedDict):
    """``size`` similar samples: the first two of them by number, and the first of their tokens that
    carry loss as text."""

    size: int
    samples: list[int]
    texts: list[str]


class NearDuplicates(TypedDict):
    """Groups of similar samples. ``samples``: those that a group has besides its first one, and
    ``share`` of all. ``largest``: the largest groups."""

    threshold: float
    groups: int
    samples: int
    share: float
    largest: list[SimilarGroup]


def near_duplicates(dataset: TokenDataset) -> NearDuplicates:
    """Count the samples that are similar to another one, exact duplicates included. The groups do
    not have texts."""
    groups = sorted(_groups(_signatures(dataset)), key=lambda group: (-len(group), group[0]))
    repeats = sum(len(group) - 1 for group in groups)
    return {
        "threshold": THRESHOLD,
        "groups": len(groups),
        "samples": repeats,
        "share": repeats / max(1, len(dataset)),
        "largest": [
            SimilarGroup(size=len(group), samples=group[:2], texts=[])
            for group in groups[:_GROUPS_SHOWN]
        ],
    }


def _signatures(dataset: TokenDataset) -> np.ndarray:
    """Return the MinHash values of each sample, uint32 [num_samples, permutations]."""
    starts = range(0, len(dataset), _CHUNK_SAMPLES)
    sign = partial(_sign, dataset.folder)
    num_workers = min(cpu_cores(), _MAX_WORKERS) if len(dataset) >= _PARALLEL_SAMPLES else 1
    pool: AbstractContextManager[ProcessPoolExecutor | None] = nullcontext()
    if num_workers > 1:
        pool = worker_pool(num_workers, _import_packages, kill_on_error=True)
    chunks = []
    with pool as workers:
        for chunk in map(sign, starts) if workers is None else workers.map(sign, starts):
            poll()
            chunks.append(chunk)
    return np.concatenate(chunks)


def _import_packages() -> None:
    import datasketch  # noqa: F401


def _sign(folder: Path, start: int) -> np.ndarray:
    """Return the MinHash values of a chunk of samples."""
    from datasketch import MinHash

    dataset = TokenDataset(folder)
    rows = []
    signature = MinHash(_NUM_PERMUTATIONS, hashfunc=int, scheme=_SCHEME)
    for index in range(start, min(start + _CHUNK_SAMPLES, len(dataset))):
        signature.clear()
        signature.update_batch(shingle_hashes(dataset[index]["input_ids"]).tolist())
        rows.append(signature.hashvalues.copy())
    return np.array(rows)


def shingle_hashes(ids: np.ndarray) -> np.ndarray:
    """Return the distinct hashes of consecutive tokens, uint64 below 2^32. A sample with fewer
    tokens has the hash of all of them."""
    width = min(SHINGLE_TOKENS, len(ids))
    windows = np.lib.stride_tricks.sliding_window_view(ids.astype(np.uint64) + 1, width)
    mixed = (windows * _MULTIPLIERS[:width]).sum(axis=1, dtype=np.uint64)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    return np.unique(mixed >> np.uint64(32))


def _groups(signatures: np.ndarray) -> list[list[int]]:
    """Return the groups of at least two similar samples, each sorted."""
    from datasketch import MinHash, MinHashLSH

    index = MinHashLSH(THRESHOLD, _NUM_PERMUTATIONS)
    permutations = MinHash(_NUM_PERMUTATIONS, scheme=_SCHEME).permutations
    parents = list(range(len(signatures)))

    def root(number: int) -> int:
        while parents[number] != number:
            parents[number] = parents[parents[number]]
            number = parents[number]
        return number

    for number, values in enumerate(signatures):
        if number % _CHUNK_SAMPLES == 0:
            poll()
        signature = MinHash(hashvalues=values, permutations=permutations, scheme=_SCHEME)
        neighbors = index.query(signature)
        # The index proposes some pairs that are less similar.
        similar = [
            other for other in neighbors if (signatures[other] == values).mean() >= THRESHOLD
        ]
        for other in similar:
            parents[root(number)] = root(other)
        # Copies of a sample have the same neighbors, so the index needs only one of them.
        if not any(np.array_equal(signatures[other], values) for other in similar):
            index.insert(number, signature, check_duplication=False)
    groups: dict[int, list[int]] = defaultdict(list)
    for number in range(len(parents)):
        groups[root(number)].append(number)
    return [group for group in groups.values() if len(group) > 1]
