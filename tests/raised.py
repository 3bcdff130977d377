"""Expect a ConfigError by its code."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from paceline.core.errors import ConfigError


@contextmanager
def raises_error(
    kind: type[ConfigError], *, code: str, naming: str = ""
) -> Iterator[pytest.ExceptionInfo[ConfigError]]:
    """Expect an error with a code.

    Args:
        kind: the class of the error.
        code: the code, which tells the kind of error.
        naming: the key, file or value that the error is about, as the message writes it.
    """
    with pytest.raises(kind) as caught:
        yield caught
    assert caught.value.code == code, str(caught.value)
    assert naming in str(caught.value)
