"""What the function of a case knows about its process, and the locks on the device."""

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from cases import Skipped


@dataclass(frozen=True)
class Context:
    """The process of a case.

    Args:
        prepared: folder that ``prepare.py`` has written.
        scratch: folder of this case, shared by its ranks.
        is_simulated: whether the device is simulated on the CPU.
    """

    prepared: Path
    scratch: Path
    rank: int
    num_ranks: int
    is_simulated: bool

    def needs_gpu(self, reason: str) -> None:
        """Skip the case if the device is simulated."""
        if self.is_simulated:
            raise Skipped(f"needs a GPU: {reason}")

    def needs_packages(self, names: Sequence[str]) -> None:
        """Skip the case if a package is not installed."""
        missing = [name for name in names if find_spec(name) is None]
        if missing:
            raise Skipped(f"the package {', '.join(missing)} is not installed")

    def needs_capability(self, major: int, minor: int, feature: str) -> None:
        """Skip the case if the compute capability of the device is lower."""
        import torch

        capability = torch.cuda.get_device_capability()
        if capability < (major, minor):
            raise Skipped(
                f"{feature} needs compute capability {major}.{minor}; this device has"
                f" {capability[0]}.{capability[1]}"
            )


@contextlib.contextmanager
def device_lock(path: Path, *, is_exclusive: bool) -> Iterator[None]:
    """Hold the lock on the device: exclusively for timing, shared for all other cases."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if is_exclusive else fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)  # releases the lock
