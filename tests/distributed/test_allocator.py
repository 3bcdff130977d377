"""The allocator keeps freed memory for reuse, and garbage collection ignores imported modules."""

import os
import subprocess
import sys

import pytest

from paceline.distributed.devices import expands_segments

_PROGRAM = """
import gc, resource, sys
from paceline.distributed.communicator import tune_allocator
if sys.argv[1] == "tuned":
    tune_allocator("cpu")
def step():
    buffers = [bytearray(b"x") * (24 << 20) for _ in range(4)]
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, gc.get_freeze_count())
"""


def count_faults_and_frozen(allocator: str, **env: str) -> tuple[int, int]:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))
    }
    process = subprocess.run(
        [sys.executable, "-c", _PROGRAM, allocator],
        env={**inherited, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    faults, frozen = map(int, process.stdout.split())
    return faults, frozen


@pytest.mark.soak
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_freed_memory_is_reused_by_the_next_step() -> None:
    default, frozen_by_default = count_faults_and_frozen("default")
    tuned, frozen = count_faults_and_frozen("tuned")
    assert default > 10_000  # 5 steps of 96 MiB in pages of 4 KiB
    assert frozen_by_default == 0
    assert tuned < default / 20
    assert frozen > 1_000


@pytest.mark.soak
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_user_settings_take_precedence() -> None:
    faults, frozen = count_faults_and_frozen("tuned", MALLOC_TRIM_THRESHOLD_="65536")
    assert faults > 10_000
    assert frozen > 1_000


def test_segments_expand_on_cuda_unless_the_environment_has_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    assert expands_segments("cuda")
    assert not expands_segments("cpu")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    assert not expands_segments("cuda")
