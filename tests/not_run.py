"""Report in pytest's summary which tests were not run and why, including those of pytest-xdist
workers."""

from typing import NoReturn

import pytest

#: kind of tests → line of the summary
NOT_RUN = pytest.StashKey[dict[str, str]]()


def record_not_run(config: pytest.Config, kind: str, line: str) -> None:
    """Add a line to pytest's summary; a later line of the same kind replaces it."""
    config.stash.setdefault(NOT_RUN, {})[kind] = line


def skip_with_summary(config: pytest.Config, kind: str, reason: str) -> NoReturn:
    """Skip the test because of something that this machine lacks, and report it in the summary."""
    record_not_run(config, kind, f"NOT RUN: tests {reason}.")
    pytest.skip(reason)
