"""Create hosts as network namespaces of this machine, if it allows tests to do so."""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from not_run import skip_with_summary


@contextmanager
def create_network(
    config: pytest.Config, num_hosts: int, loss: float = 0.0, delay_s: float = 0.0
) -> Iterator[Any]:
    """Create a :class:`netns.Network` of hosts that loses the given fraction of packets. Skips the
    test, and reports that in pytest's summary, if this machine does not allow namespaces."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
    from netns import Link, Network, NetworkError

    with ExitStack() as stack:
        try:
            network = stack.enter_context(Network(num_hosts, Link(1e9, delay_s, loss)))
        except NetworkError as error:
            skip_with_summary(config, "namespaces", f"between network namespaces: {error}")
        yield network


def create_two_host_network(config: pytest.Config) -> AbstractContextManager[Any]:
    """Create a network of two hosts without packet loss."""
    return create_network(config, 2)
