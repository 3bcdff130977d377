"""Fixtures for the tests of the config."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.config.load import Loaded, load_config


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Loaded]:
    """Load a config from its text, with overrides."""

    def load_text(text: str, overrides: Any = ()) -> Loaded:
        path = tmp_path / "c.yaml"
        path.write_text(text)
        return load_config(path, overrides)

    return load_text
