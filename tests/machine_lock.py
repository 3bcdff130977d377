"""Run tests marked ``alone`` exclusively, although two pytest workers run tests in parallel.

The workers share two lock files. Each test first acquires the gate, then the machine: shared, or
exclusively if it is marked ``alone``. Such a test holds the gate until the other tests have
finished, so that no further test starts.
"""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def lock_machine(folder: Path, exclusive: bool) -> Iterator[None]:
    """Lock the machine, shared or exclusively, with the lock files in ``folder``."""
    with open(folder / "gate", "a") as gate, open(folder / "machine", "a") as machine:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(machine, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        yield
