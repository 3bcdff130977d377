"""Random permutations whose values are computed on demand, without memory for all of them.

A Feistel network permutes the integers below the next power of four; a value that is not below the
size is permuted again until it is (cycle walking; Black and Rogaway, "Ciphers with arbitrary finite
domains", 2002). Any position is found at once, so resuming at any sample takes no time.
"""

import numpy as np

from paceline.distributed.seeds import derive_seed

_ROUNDS = 6
#: The multipliers of the finalizer of SplitMix64.
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def permute(positions: np.ndarray, size: int, seed: int, *counters: int) -> np.ndarray:
    """Return the values at ``positions`` of a random permutation of ``range(size)``.

    Args:
        positions: int64 [n], each in ``range(size)``.
        seed, counters: select the permutation.

    Returns:
        int64 [n].
    """
    if size < 2:
        return np.zeros(len(positions), dtype=np.int64)
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = [np.uint64(derive_seed(seed, "permute", *counters, turn)) for turn in range(_ROUNDS)]
    values = _feistel(positions.astype(np.uint64), half_bits, keys)
    while (outside := values >= size).any():
        values[outside] = _feistel(values[outside], half_bits, keys)
    return values.astype(np.int64)


def _feistel(values: np.ndarray, half_bits: int, keys: list[np.uint64]) -> np.ndarray:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << shift) | right


def _mix(values: np.ndarray) -> np.ndarray:
    """Hash each value (the finalizer of SplitMix64; Steele et al., 2014)."""
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    mixed: np.ndarray = values ^ (values >> np.uint64(31))
    return mixed
