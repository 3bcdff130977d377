"""The runs of `benchmarks/digests.py` cover what Paceline offers, and differences are found."""

import json
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import get_args

import pytest

from paceline.config.schema.compression import Method
from paceline.config.schema.parallel import Parallel, ParameterServer
from paceline.config.schema.train_args import TrainArgs
from paceline.parallel.registry import STRATEGIES
from paceline.tasks import BUILT_IN

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "digests.py"
_spec = spec_from_file_location("digests", SCRIPT)
assert _spec is not None
assert _spec.loader is not None
digests = module_from_spec(_spec)
_spec.loader.exec_module(digests)
RUNS = digests.mode_runs() | digests.RUNS


def values_of(key: str) -> set[str]:
    """Return all values of a key in the runs, where lists count by item."""
    texts = [
        setting.partition("=")[2]
        for settings in ((*digests.BASE, *settings) for settings in RUNS.values())
        for setting in settings
        if setting.startswith(f"{key}=")
    ]
    return {value for text in texts for value in text.strip("[]").split(",")}


@pytest.mark.parametrize(
    ("key", "offered"),
    [
        ("parallel.mode", set(STRATEGIES)),
        ("task", set(BUILT_IN) - {"sft"}),
        ("compression.method", set(get_args(Method)) - {"none"}),
        (
            "parallel.all_reduce_algorithm",
            set(get_args(Parallel.model_fields["all_reduce_algorithm"].annotation)) - {"native"},
        ),
        (
            "parameter_server.consistency",
            set(get_args(ParameterServer.model_fields["consistency"].annotation)) - {"sync"},
        ),
        (
            "train_args.packing_strategy",
            set(get_args(TrainArgs.model_fields["packing_strategy"].annotation)) - {"micro_batch"},
        ),
        (
            "train_args.optim",
            set(get_args(TrainArgs.model_fields["optim"].annotation)) - {"adamw"},
        ),
    ],
)
def test_runs_cover_all_values(key: str, offered: set[str]) -> None:
    assert offered
    assert offered - values_of(key) == set()


def test_settings_have_different_names_for_different_runs() -> None:
    assert len({frozenset(settings) for settings in RUNS.values()}) == len(RUNS)


def test_differences_and_missing_runs_are_problems() -> None:
    expected, counted = {"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "9", "new": "4"}
    assert digests.compare(expected, counted, missing_matters=False) == ["b: expected 2, got 9"]
    assert len(digests.compare(expected, counted, missing_matters=True)) == 2


@pytest.mark.slow
@pytest.mark.soak
def test_script_compares_with_a_file(tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(SCRIPT), "--only", "mode/single", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=600)

    path = tmp_path / "digests.json"
    written = run("--output", str(path), "--rounds", "2")
    assert written.returncode == 0, written.stderr
    result = json.loads(path.read_text())
    assert json.loads(written.stdout) == result["digests"]
    assert run("--compare", str(path)).returncode == 0
    result["digests"]["mode/single"] = "other"
    path.write_text(json.dumps(result))
    different = run("--compare", str(path))
    assert different.returncode == 1
    assert "mode/single: expected other" in different.stderr
