"""How a rank's process keeps house with its memory: what was freed is used again, and what stays is
not looked at again."""

import ctypes
import gc
import os

#: Of glibc's <malloc.h>.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# DEFAULT_MMAP_THRESHOLD_MAX, where long has 8 bytes; a larger one is refused
_LARGEST_MMAP_THRESHOLD = 32 << 20
_KEPT_BYTES = 1 << 30


def tune_allocator(device_type: str) -> None:
    """Once a process knows that it is a rank, and has imported what it needs.

    The objects of all those modules are put out of the garbage collector's sight
    (:func:`gc.freeze`): a full collection otherwise walks over a million of them in the middle of a
    step, and in a forked rank makes a copy of every page it touches (seen: 21,000 page faults and
    half a second).

    Where training runs on the CPU, memory that a step frees stays with the process for the next
    step, up to 1 GiB: by default glibc's malloc hands it back to the system, which clears every
    page anew when it is asked for again. What the user set in the environment is kept, and so is
    another allocator.
    """
    gc.freeze()
    if device_type == "cpu" and not any(
        name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ
    ):
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
        if mallopt is not None:
            mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
            mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
