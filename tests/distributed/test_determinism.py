"""`train_args.deterministic`: a process computes only with algorithms that give the same bits."""

import os
import subprocess
import sys

import pytest

_SCRIPT = """
import os
import torch
from paceline.train.precision import use_deterministic_algorithms

use_deterministic_algorithms()
print(torch.are_deterministic_algorithms_enabled(), os.environ["CUBLAS_WORKSPACE_CONFIG"])
"""


@pytest.mark.parametrize(("configured", "expected"), [("", ":4096:8"), (":16:8", ":16:8")])
def test_algorithms_and_workspace(configured: str, expected: str) -> None:
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": configured}
    if not configured:
        del environment["CUBLAS_WORKSPACE_CONFIG"]
    out = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert out.split() == ["True", expected]
