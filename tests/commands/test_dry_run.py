"""What a dry run prints."""

import json
from pathlib import Path

import pytest
import yaml

from paceline.cli import main

ARGS = ("model=builtin:qwen2-micro", "dataset=builtin:python-docs#20", "parallel.device=cpu")


def print_dry_run(
    folder: Path, capfd: pytest.CaptureFixture[str], *options: str
) -> tuple[str, str]:
    """Return what the command prints to the standard output, and to the standard error."""
    assert main(["sft", *ARGS, "max_steps=3", f"output_dir={folder}", "--dry-run", *options]) == 0
    output, errors = capfd.readouterr()
    return output, errors


def test_only_keys_that_are_set_are_printed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output, errors = print_dry_run(tmp_path / "run", capfd)
    keys = yaml.safe_load(output)
    assert keys["train_args"]["max_steps"] == 3
    assert keys["output_dir"] == str(tmp_path / "run")
    assert "seed" not in keys["train_args"]
    assert "optimizer" not in keys
    assert errors.splitlines()[-1].startswith("evaluation")


def test_full_prints_all_keys_and_loads_to_the_same_config(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    short, _ = print_dry_run(tmp_path / "run", capfd)
    full, _ = print_dry_run(tmp_path / "run", capfd, "--full")
    as_json, _ = print_dry_run(tmp_path / "run", capfd, "--json")
    config = json.loads(as_json)["config"]
    assert yaml.safe_load(full) == config
    file = tmp_path / "short.yaml"
    file.write_text(short)
    assert main(["sft", "--config", str(file), "--dry-run", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["config"] == config


def test_full_needs_a_dry_run(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["sft", *ARGS, "--full"]) == 2
    assert "add `--dry-run`" in capfd.readouterr().err


def test_settings_of_an_axis_that_the_run_lacks_are_reported(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _, errors = print_dry_run(
        tmp_path / "run",
        capfd,
        "parallel.mode=ddp",
        "parallel.num_gpus=2",
        "parallel.context_method=ring",
        "parallel.sequence_parallel=true",
        "parallel.pipeline_schedule=1f1b",
    )
    text = " ".join(errors.split())
    assert "`parallel.context_method: ring` has no effect: this run has no axis `context`" in text
    assert "`parallel.sequence_parallel: true` has no effect: this run has no axis `tensor`" in text
    assert "pipeline_schedule" not in text  # its default
