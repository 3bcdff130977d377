"""Derive random seeds as a pure function of (seed, purpose, counters).

Every use of randomness, such as the order of an epoch, the augmentation of a sample or dropout in a
micro-batch, is seeded from these values. A resumed run therefore needs no saved generator state,
and results do not depend on the number of loader workers.
"""

import hashlib
import random
from collections.abc import Callable
from functools import cache
from typing import Any

_MASK_63 = (1 << 63) - 1


def derive_seed(seed: int, purpose: str, *counters: int) -> int:
    """Derive a 63-bit seed from the run's seed, a purpose, and counters."""
    text = f"{seed}/{purpose}/" + "/".join(str(int(counter)) for counter in counters)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & _MASK_63


def seed_everything(seed: int, purpose: str, *counters: int) -> None:
    """Seed the global generators of Python, NumPy and torch (CPU and accelerators)."""
    import numpy as np
    import torch

    value = derive_seed(seed, purpose, *counters)
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    # torch.manual_seed is not used: if no accelerator is in use, it records a stack trace and takes
    # a hundred times as long.
    torch.default_generator.manual_seed(value)
    seeding = _accelerator_seeding()
    if seeding is not None:
        is_initialized, seed_all = seeding
        if is_initialized():
            seed_all(value)


@cache
def _accelerator_seeding() -> tuple[Callable[[], bool], Callable[[int], object]] | None:
    """Return two functions, one that returns whether the accelerator is in use and one that seeds
    all of its devices, or None without an accelerator."""
    import torch

    if not torch.accelerator.is_available():
        return None
    module: Any = torch.get_device_module(torch.accelerator.current_accelerator())
    # mps has only `manual_seed` and is always initialized.
    seed_all = getattr(module, "manual_seed_all", module.manual_seed)
    return getattr(module, "is_initialized", lambda: True), seed_all
