"""The config of `make demo` trains a model that answers questions it has not seen."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(folder: Path, *args: str) -> str:
    command = [sys.executable, "-m", "paceline", *args]
    completed = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    assert completed.returncode == 0, completed.stderr[-2000:]
    return completed.stdout


def test_config_evaluates_all_held_out_questions(tmp_path: Path) -> None:
    config = yaml.safe_load((EXAMPLES / "demo.yaml").read_text())
    assert config["dataset"] == "builtin:small-questions"
    resolved = json.loads(
        run(tmp_path, "sft", "--config", str(EXAMPLES / "demo.yaml"), "--dry-run", "--json")
    )
    assert resolved["config"]["val_dataset"] == "builtin:small-questions-held-out"
    assert resolved["config"]["evaluation"]["metrics"] == ["exact_match"]
    assert resolved["config"]["evaluation"]["metric_rows"] is None
    assert resolved["metrics"] == ["loss", "exact_match"]


@pytest.mark.soak
def test_trained_model_answers_held_out_questions(tmp_path: Path) -> None:
    report = json.loads(run(tmp_path, "sft", "--config", str(EXAMPLES / "demo.yaml"), "--json"))
    assert report["final_eval_metrics"]["exact_match"] >= 0.98
    answers = run(
        tmp_path, "generate", "output/demo", "What is 48 + 37?",
        "What is 11:38 pm in 24-hour time?", "How many milliliters are 283 l?",
    )  # fmt: skip
    assert [line.strip() for line in answers.splitlines()[1::2]] == ["85", "23:38", "283000"]
