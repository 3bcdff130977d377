"""Import modules of `benchmarks`."""

import importlib
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def import_benchmark(name: str, folder: str = "") -> Any:
    """Import a module, which finds others in its folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS / folder)
        return importlib.import_module(name)
