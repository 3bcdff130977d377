"""What a rank frees stays with it, and what it imported is out of the collector's sight."""

import os
import subprocess
import sys

import pytest

_PROGRAM = """
import gc, resource, sys
from paceline.distributed.communicator import tune_allocator
if sys.argv[1] == "settled":
    tune_allocator("cpu")
def step():
    kept = [bytearray(b"x") * (24 << 20) for _ in range(4)]
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, gc.get_freeze_count())
"""


def faults_and_frozen(how: str, **env: str) -> tuple[int, int]:
    plain = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))
    }
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, how],
        env={**plain, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    faults, frozen = map(int, done.stdout.split())
    return faults, frozen


@pytest.mark.soak
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_freed_memory_is_used_again_by_the_next_step() -> None:
    plain, nothing_frozen = faults_and_frozen("plain")
    settled, frozen = faults_and_frozen("settled")
    assert plain > 10_000  # 5 steps of 96 MiB, page by page
    assert nothing_frozen == 0
    assert settled < plain / 20
    assert frozen > 1_000


@pytest.mark.soak
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_what_the_user_set_is_kept() -> None:
    faults, frozen = faults_and_frozen("settled", MALLOC_TRIM_THRESHOLD_="65536")
    assert faults > 10_000
    assert frozen > 1_000
