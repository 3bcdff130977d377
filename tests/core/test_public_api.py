"""The functions of the package stay callable whatever is imported below it."""

import importlib
import subprocess
import sys

import paceline


def test_the_package_train_does_not_hide_the_function() -> None:
    importlib.import_module("paceline.train.run_spec")
    assert callable(paceline.train)
    assert paceline.train.__module__ == "paceline.api"


def test_nothing_heavy_is_imported() -> None:
    script = (
        "import sys, paceline; print(sorted({'torch', 'yaml', 'pydantic'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
