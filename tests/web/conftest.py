"""A panel for a test."""

import contextlib
from collections.abc import Callable, Iterator

import pytest
from panels import Served, serving


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """``serve(folder)``: as :func:`serving`, to the end of the test."""
    with contextlib.ExitStack() as stack:
        yield lambda folder, host="127.0.0.1": stack.enter_context(serving(folder, host))
