"""Models for the tests of `paceline serve`, written once."""

from pathlib import Path

import pytest
from api_servers import write_adapter, write_base


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two runs, `one` and `two`: adapters of the model `initial`. Their
    answers stop at the limit of tokens."""
    folder = tmp_path_factory.mktemp("served")
    base = write_base(folder / "initial")
    write_adapter(folder / "one", base, seed=1)
    write_adapter(folder / "two", base, seed=2)
    return folder
