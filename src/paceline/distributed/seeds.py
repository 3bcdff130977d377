"""Randomness as a pure function of (seed, purpose, counters): nothing to save, nothing to replay.

Every use of chance draws from a state set afresh from these numbers: the order of an epoch, the
augmentation of a sample, dropout in a micro-batch. So a resumed run needs no saved generator, and
the number of ranks or loader workers plays no part.
"""

import hashlib
import random
from functools import cache
from typing import Any

_MASK_63 = (1 << 63) - 1


def derive_seed(seed: int, purpose: str, *counters: int) -> int:
    """A 63-bit seed from the run's seed, a purpose, and counters; independent for any two different
    arguments."""
    text = f"{seed}/{purpose}/" + "/".join(str(int(one)) for one in counters)
    return (
        int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") & _MASK_63
    )


def seed_everything(seed: int, purpose: str, *counters: int) -> None:
    """Set Python's, NumPy's and torch's (CPU and accelerator) global generators."""
    import numpy as np
    import torch

    value = derive_seed(seed, purpose, *counters)
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    # Not torch.manual_seed: where no accelerator is in use it records a stack trace each time, a
    # hundred times the cost.
    torch.default_generator.manual_seed(value)
    accelerator = _accelerator_module()
    if accelerator is not None and accelerator.is_initialized():
        accelerator.manual_seed_all(value)


@cache
def _accelerator_module() -> Any:
    """torch.cuda or its like; None without an accelerator, or where it has no generators of its own
    to set."""
    import torch

    if not torch.accelerator.is_available():
        return None
    module = torch.get_device_module(torch.accelerator.current_accelerator())
    return (
        module
        if hasattr(module, "is_initialized") and hasattr(module, "manual_seed_all")
        else _AlwaysReady(module)
    )


class _AlwaysReady:
    """An accelerator module without ``is_initialized`` (mps)."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def is_initialized(self) -> bool:
        return True

    def manual_seed_all(self, value: int) -> None:
        self.module.manual_seed(value)
