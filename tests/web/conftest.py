"""Fixtures for the tests of the panel."""

import contextlib
from collections.abc import Callable, Iterator

import pytest
from panels import Served, serve_panel


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """Return a function that serves a folder, like :func:`serve_panel`, until the end of the
    test."""
    with contextlib.ExitStack() as stack:
        yield lambda folder, host="127.0.0.1", start_folder=None: stack.enter_context(
            serve_panel(folder, host, start_folder)
        )
