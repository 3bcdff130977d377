"""Two workers may run tests side by side; one marked ``alone`` has the machine to itself meanwhile.

Locks on two files that the workers share. Whoever begins a test goes through the gate: one that
shall be alone holds it while it waits for the others to end theirs, so that no more begin.
"""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def turn(folder: Path, alone: bool) -> Iterator[None]:
    """Hold the machine, with others or alone."""
    with open(folder / "gate", "a") as gate, open(folder / "machine", "a") as machine:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(machine, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        yield
