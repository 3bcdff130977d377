"""Defer the work of side streams until something waits for it; see ``defer.cpp``.

A process with simulated devices does so if :data:`VARIABLE` has a seed, from its first process
group on. It is not checked by :mod:`stream_order.checker` then: a missing wait shows in its values.
"""

import ctypes
import os
from pathlib import Path

from paceline.simulation.cuda import load_library

#: Environment variable: the seed of the moments at which a part of the work runs early.
VARIABLE = "PACELINE_TEST_DEFER_SEED"
SOURCE = Path(__file__).with_name("defer.cpp")
_is_deferring = False


def defer_if_requested() -> None:
    seed = os.environ.get(VARIABLE)
    if seed is not None and not _is_deferring:
        defer(1000 * int(seed) + int(os.environ.get("RANK", 0)))


def defer(seed: int) -> None:
    """Defer the work of side streams of this process from now on, or draw from another seed."""
    global _is_deferring
    _is_deferring = True
    load_library(SOURCE).stream_order_defer(ctypes.c_int64(seed))
