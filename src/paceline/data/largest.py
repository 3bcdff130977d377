"""Find the largest micro-batch of a run. Imports no torch."""

from collections.abc import Sequence

import numpy as np

from paceline.data.order.base import Keys, Order

#: Number of samples whose micro-batches are compared, so that the search takes about a second at
#: most.
_MAX_SAMPLES = 100_000


def largest_keys(
    order: Order,
    lengths: Sequence[int] | np.ndarray | None,
    parts: int,
    steps: range,
    *,
    is_packed: bool,
) -> Keys:
    """Return the keys of the samples of the micro-batch with the most tokens among the first
    100,000 samples; without lengths, of the one with the most samples.

    Args:
        lengths: number of tokens of each sample, or None if samples have no tokens.
        parts: number of micro-batches of a step.
        steps: the steps of the run.
        is_packed: whether samples are joined to a row; otherwise they are padded to the longest.
    """
    sizes = None if lengths is None else np.asarray(lengths)
    best, best_size, num_samples = None, -1, 0
    for step in steps:
        for keys in order.micro_batches(step, parts):
            size = _num_tokens(keys, sizes, is_packed)
            if size > best_size:
                best, best_size = keys, size
            num_samples += len(keys)
        if num_samples >= _MAX_SAMPLES:
            break
    assert best is not None
    return best


def _num_tokens(keys: Keys, lengths: np.ndarray | None, is_packed: bool) -> int:
    if lengths is None or not len(keys):
        return len(keys)
    tokens = lengths[keys[:, 1]] if keys.shape[1] == 2 else keys[:, 3] - keys[:, 2]
    return int(tokens.sum() if is_packed else tokens.max() * len(tokens))
