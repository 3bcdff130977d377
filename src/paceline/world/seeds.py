"""Randomness as a pure function of (seed, purpose, counters): nothing to save, nothing to replay.

Every use of chance draws from a state set afresh from these numbers: the order of an epoch, the augmentation of a sample,
dropout in a micro-batch. So a resumed run needs no saved generator, and the number of ranks or loader workers plays no part.
"""

from __future__ import annotations

import hashlib
import random

_MASK_63 = (1 << 63) - 1


def derive_seed(seed: int, purpose: str, *counters: int) -> int:
    """A 63-bit seed from the run's seed, a purpose, and counters; independent for any two different arguments."""
    text = f"{seed}/{purpose}/" + "/".join(str(int(one)) for one in counters)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") & _MASK_63


def seed_everything(seed: int, purpose: str, *counters: int) -> None:
    """Set Python's, NumPy's and torch's (CPU and accelerator) global generators."""
    import numpy as np
    import torch

    value = derive_seed(seed, purpose, *counters)
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    torch.manual_seed(value)
