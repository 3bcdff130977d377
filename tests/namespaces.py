"""Hosts that are network namespaces of this machine, where it lets tests make them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from not_run import skip_loudly


@contextmanager
def two_hosts(config: pytest.Config) -> Iterator[Any]:
    """A :class:`netns.Network` of two; a test that cannot have it is skipped, and that is said at the end of the session."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
    from netns import Link, Network, NetworkError

    with ExitStack() as stack:
        try:
            found = stack.enter_context(Network(2, Link(1e9)))
        except NetworkError as error:
            skip_loudly(config, "namespaces", f"between network namespaces: {error}")
        yield found
