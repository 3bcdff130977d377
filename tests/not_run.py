"""What was left out of a session, and why: said at its end, also where workers of pytest-xdist have
found it."""

from typing import NoReturn

import pytest

#: kind → the line that is said
NOT_RUN = pytest.StashKey[dict[str, str]]()


def note(config: pytest.Config, kind: str, line: str) -> None:
    config.stash.setdefault(NOT_RUN, {})[kind] = line


def skip_loudly(config: pytest.Config, kind: str, why: str) -> NoReturn:
    """Skip a test for what this machine lacks."""
    note(config, kind, f"NOT RUN: tests {why}.")
    pytest.skip(why)
