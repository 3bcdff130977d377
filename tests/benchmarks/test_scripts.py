"""Each benchmark starts, and its contenders do the work, with the smallest settings."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
pytestmark = [pytest.mark.slow, pytest.mark.soak]


def run_script(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / name), *arguments],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_lora_contenders_do_the_same_work() -> None:
    result = json.loads(run_script("run.py", "--rounds", "1", "--steps", "2", "--json"))
    assert set(result["runs"]) == {"paceline", "handwritten", "packed", "trainer"}
    assert result["same_work"] == {"tokens_of_every_step": True, "labels_of_the_held_out_set": True}
    assert {goal["rival"] for goal in result["goals"]} == {"handwritten", "packed", "trainer"}


def test_strategies_run_in_paceline_and_by_hand() -> None:
    arguments = ("--rounds", "1", "--steps", "2", "--no-state", "--json")
    assert json.loads(run_script("strategies.py", *arguments))


def test_startup_records_every_part_of_the_start() -> None:
    result = json.loads(run_script("startup.py", "--rounds", "1", "--json"))
    recorded = {
        call["call"] for process in result["processes"].values() for call in process["calls"]
    }
    code = (BENCHMARKS / "startup_hooks" / "sitecustomize.py").read_text()
    scope: dict[str, dict[str, dict[str, str]]] = {}
    exec(code, scope)
    named = {name for functions in scope["CALLS"].values() for name in functions.values()}
    assert recorded == named - {"step"} | {"step 1", "step 2"}
    assert set(result["processes"]) == {
        "launcher", "fork server", "rank process 0", "rank process 1"
    }  # fmt: skip
    by_package = {row["package"]: row for row in result["imports"]["fork server"]}
    assert {"torch", "transformers", "peft"} <= by_package.keys()
    assert not {"torchao", "bitsandbytes", "scipy", "sklearn"} & by_package.keys()


def test_trials_compare_the_choice_of_auto_with_all_configurations(tmp_path: Path) -> None:
    path = tmp_path / "trials.json"
    run_script("planner_trials.py", "--measure", str(path), "--cases", "4", "--table", str(path))
    [case] = json.loads(path.read_text())["cases"].values()
    tried = [each["settings"] for each in case["screened"]]
    assert len(tried) >= 12
    assert case["choice"] in tried
    assert {each["parallel.mode"] for each in tried} >= {"ddp", "zero3", "tensor", "pipeline"}
    assert case["choice"] not in case["rivals"]
    assert [len(times) for times in case["rounds_step_s"]] == [1 + len(case["rivals"])] * 5
    assert case["name"] in path.with_suffix(".md").read_text()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("error_feedback.py", ("--steps", "2")),
        ("tokenize_rows.py", ("--rows", "2000", "--rounds", "1")),
        ("chunked_loss.py", ("--tokens", "1500", "--vocabulary", "50000", "--rounds", "1")),
        ("panel.py", ("--viewers", "2", "--steps", "400")),
        ("recovery.py", ("--rounds", "1", "--steps", "100", "--kills", "1", "--modes", "ddp")),
    ],
)
def test_benchmark_runs(name: str, arguments: tuple[str, ...]) -> None:
    assert run_script(name, *arguments).strip()


@pytest.mark.alone
@pytest.mark.parametrize(
    ("name", "arguments"),
    [("balance.py", ("--rounds", "1", "--steps", "18")), ("recovery_hosts.py", ("--rounds", "1"))],
)
def test_benchmark_on_hosts_runs(name: str, arguments: tuple[str, ...]) -> None:
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        pytest.skip("needs Linux and root")
    assert run_script(name, *arguments).strip()
