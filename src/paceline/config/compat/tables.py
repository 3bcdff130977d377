"""The tables of other tools' keys: YAML files in this package."""

from functools import cache
from pathlib import Path
from typing import Any

import yaml

from paceline.config.yaml_read import SafeLoader


@cache
def read_table(name: str) -> Any:
    """Read a data file of this package, once. ``name``: its path below the package."""
    text = (Path(__file__).parent / name).read_text(encoding="utf-8")
    return yaml.load(text, Loader=SafeLoader)
