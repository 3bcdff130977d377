"""Recurrent layers for packed rows in kernels of other packages, with references of these packages
on the CPU. Their kernels need a GPU and are not run here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REFERENCES = Path(__file__).parent / "reference_kernels"
FAMILIES = ("qwen3_next", "qwen3_5_text", "mamba2", "bamba", "nemotron_h", "lfm2", "jamba")
PROGRAM = """
import json, sys
import test_mixers as tests

results = {}
for family in sys.argv[1:]:
    model = tests.build_model(family)
    expected = tests.gradients_of(model, tests.collate_padded(tests.make_samples(), 0))
    choice = tests.choose_packing(model, tests.CPU, tests.CONFIG)
    packed = tests.gradients_of(model, tests.collate_packed(tests.make_samples()))
    results[family] = [
        choice.rows, choice.in_kernels, tests.largest_difference(packed, expected)
    ]
print(json.dumps(results))
"""


def run_with_references(kind, families):
    """Return {family: [rows, whether they are computed in kernels, difference of gradients]}."""
    tests = Path(__file__).parents[1]
    folders = [REFERENCES, tests, tests.parent, *sys.path]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "REFERENCE_KERNELS": kind,
    }
    command = [sys.executable, "-c", PROGRAM, *families]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["correct", "ignores", "old"])
def test_kernels_that_take_beginnings_of_samples_compute_a_row_in_one_call(kind):
    results = run_with_references(kind, FAMILIES)
    assert len(results) == len(FAMILIES)
    for family, (rows, in_kernels, difference) in results.items():
        assert rows == "segments"
        # Mamba 1 (Jamba) has no kernel that takes them.
        assert in_kernels is (kind == "correct" and family != "jamba"), family
        assert difference <= 1e-6, family
