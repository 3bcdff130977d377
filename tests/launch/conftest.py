"""Fixtures of the tests that run commands."""

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache that other tests do not use at the same time."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder / "paceline"


@pytest.fixture
def without_memory_history(own_cache: Path) -> None:
    """Keep the settings that worked in one test from being used in the next one."""
    (own_cache / "memory-settings.json").unlink(missing_ok=True)
