"""Test that importing submodules does not hide the functions of the package."""

import importlib
import subprocess
import sys

import paceline


def test_subpackage_train_does_not_hide_the_function() -> None:
    importlib.import_module("paceline.train.run_spec")
    assert callable(paceline.train)
    assert paceline.train.__module__ == "paceline.api"


def test_import_loads_no_heavy_module() -> None:
    script = (
        "import sys, paceline; print(sorted({'torch', 'yaml', 'pydantic'} & sys.modules.keys()))"
    )
    completed = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert completed.stdout == "[]\n"
