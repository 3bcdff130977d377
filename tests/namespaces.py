"""Hosts that are network namespaces of this machine, where it lets tests make them."""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from not_run import skip_loudly


@contextmanager
def network_of(
    config: pytest.Config, num_hosts: int, loss: float = 0.0, delay_s: float = 0.0
) -> Iterator[Any]:
    """A :class:`netns.Network` of so many hosts, which loses a share of all packets; a test that
    cannot have it is skipped, and that is said at the end of the session."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
    from netns import Link, Network, NetworkError

    with ExitStack() as stack:
        try:
            network = stack.enter_context(Network(num_hosts, Link(1e9, delay_s, loss)))
        except NetworkError as error:
            skip_loudly(config, "namespaces", f"between network namespaces: {error}")
        yield network


def two_hosts(config: pytest.Config) -> AbstractContextManager[Any]:
    """A network of two, without loss."""
    return network_of(config, 2)
