"""Tests that take long are soak tests, by the durations that were measured."""

import subprocess
import sys
from pathlib import Path

import pytest
from long_tests import LONG_S, read_durations

ROOT = Path(__file__).resolve().parents[1]


def collect(*arguments: str) -> set[str]:
    """Return the names of the tests that pytest would run."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    return {line for line in done.stdout.splitlines() if "::" in line}


@pytest.fixture(scope="module")
def long_test() -> str:
    """The test that takes longest, in a file that also has a short one."""
    seconds = {
        f"{file}::{name}": duration_s
        for file, of_file in read_durations().items()
        for name, duration_s in of_file.items()
        if min(of_file.values()) < LONG_S
    }
    longest = max(seconds, key=lambda name: seconds[name])
    assert seconds[longest] > LONG_S
    return longest


def test_long_tests_are_soak_tests(long_test: str) -> None:
    file = long_test.partition("::")[0]
    short, soak = collect(file), collect("-m", "soak", file)
    assert long_test in soak
    assert long_test not in short
    assert short


def test_long_test_runs_if_it_is_named(long_test: str) -> None:
    assert long_test in collect(long_test)


def test_durations_name_tests_that_exist() -> None:
    files = {file for file in read_durations() if not (ROOT / file).is_file()}
    assert not files, "measure again, or rename the files in tests/durations.json"
