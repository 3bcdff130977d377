"""Test the clock comparison between hosts: real processes that share a TCPStore, each with its own
``PACELINE_HOST``."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta

import pytest
from not_run import skip_with_summary
from torch.distributed import HashStore, TCPStore

from paceline.cluster.clock import ClockServer, check_clock
from paceline.core.errors import ConfigError, RunError

_HOST = """
import sys, time
from datetime import timedelta
from torch.distributed import TCPStore
from paceline.cluster.clock import check_clock
from paceline.core.errors import PacelineError

store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, timeout=timedelta(seconds=30))
for shift in sys.argv[2:]:
    try:
        print(f"{check_clock(store, clock=lambda: time.time() + float(shift)).skew_s:.3f}")
    except PacelineError as error:
        print(error.exit_code, error.paragraph())
"""


@pytest.fixture
def store() -> Iterator[TCPStore]:
    """Create the store of host a, the rendezvous endpoint."""
    store = TCPStore(
        "127.0.0.1",
        0,
        is_master=True,
        multi_tenant=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=30),
    )
    with pytest.MonkeyPatch.context() as patch, contextlib.closing(ClockServer(store)):
        patch.setenv("PACELINE_HOST", "a")
        yield store


def _on_host(name: str, store: TCPStore, *shifts: float, prefix: tuple[str, ...] = ()) -> list[str]:
    command = [*prefix, sys.executable, "-c", _HOST, str(store.port), *map(str, shifts)]
    environment = {**os.environ, "PACELINE_HOST": name}
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.splitlines()


@pytest.mark.slow
def test_rejects_hosts_with_different_clocks(store: TCPStore) -> None:
    equal, ahead, within, behind = _on_host("b", store, 0, 8, 3, -7.5)
    assert abs(float(equal)) < 1
    assert ahead.startswith(
        "2 the clock of host b is 8.0 s ahead of the clock of the rendezvous endpoint's host a. "
    )
    assert "Allowed: at most 5 s" in ahead
    assert "chrony" in ahead
    assert float(within) == pytest.approx(3, abs=1)
    assert "host b is 7.5 s behind the clock of the rendezvous endpoint's host a" in behind
    # Host b joined with +3 s. Host c is within the limit of the endpoint host, but not of host b.
    (other,) = _on_host("c", store, -4)
    assert other.startswith("2 the clock of host c is 7.0 s behind the clock of host b. ")


@pytest.mark.slow
def test_rejects_shifted_system_clock(store: TCPStore, pytestconfig: pytest.Config) -> None:
    if shutil.which("faketime") is None:
        skip_with_summary(
            pytestconfig,
            "faketime",
            "with a shifted system clock: faketime not found (apt install faketime)",
        )
    (refused,) = _on_host("b", store, 0, prefix=("faketime", "-f", "-20s"))
    assert "host b is 20.0 s behind the clock of the rendezvous endpoint's host a" in refused


def test_missing_clock_server_is_an_error() -> None:
    with pytest.raises(RunError, match=r"no clock server answered within 0\.2 s"):
        check_clock(HashStore(), timeout_s=0.2)


def test_server_ignores_malformed_messages() -> None:
    store = HashStore()
    with contextlib.closing(ClockServer(store, clock=lambda: 0.0)):
        for message in (
            "not JSON",
            "[]",
            '{"id": 3}',
            '{"stop": "guess"}',
            '{"id": "x", "host": "z", "skew_s": "nan"}',
        ):
            store.queue_push("paceline/clock/requests", message)
        assert check_clock(store, clock=lambda: 1.0).skew_s == pytest.approx(1.0, abs=0.5)
        with pytest.raises(ConfigError):
            check_clock(store, clock=lambda: 9.0)


def test_close_ends_server_thread() -> None:
    store = HashStore()
    server = ClockServer(store)
    server.close()
    server.close()
    assert not server._thread.is_alive()
