"""`paceline init` writes a config that fits into memory."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import paceline
from paceline.cli import main
from paceline.planner import api
from paceline.planner.machine import hardware

MODEL, DATASET = "builtin:qwen2-micro", "builtin:python-docs#20"
NAMED = ("--model", MODEL, "--dataset", DATASET)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_writes_a_config_that_fits(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "mine.yaml", *NAMED, "--json"]) == 0
    printed = json.loads(capfd.readouterr().out)
    assert printed["path"] == "mine.yaml"
    assert printed["run"]["fits"]
    keys = yaml.safe_load((folder / "mine.yaml").read_text())
    assert (keys["model"], keys["dataset"]) == (MODEL, DATASET)
    assert keys["output_dir"] == "output/mine"
    assert "lora" not in keys
    assert main(["plan", "mine.yaml", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["run"]["fits"]


def test_never_overwrites(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = folder / "paceline.yaml"
    file.write_text("model: m")
    assert main(["init", *NAMED]) == 2
    assert "already exists" in capfd.readouterr().err
    assert file.read_text() == "model: m"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--model", MODEL], "`--dataset NAME`"),
        (["--dataset", DATASET], "`--model NAME`"),
        (["--model", MODEL, "--dataset", "./nothing.jsonl"], "nothing.jsonl"),
        ([*NAMED, "--task", "dbo"], "did you mean `task: dpo`?"),
    ],
)
def test_mistakes_write_nothing(
    options: list[str],
    named: str,
    folder: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        assert main(["init", *options]) == 2
    assert named in capfd.readouterr().err
    assert not list(folder.iterdir())


def test_trains_adapters_if_all_weights_do_not_fit(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = {"model": "builtin:qwen2-tiny", "dataset": DATASET}

    def fits(memory_bytes: int, *, with_adapters: bool) -> bool:
        for module in (api, hardware):
            monkeypatch.setattr(module, "available_memory", lambda: memory_bytes)
        run = paceline.plan({**model, "lora": {"enable": with_adapters}})["run"]
        return run is not None and run["fits"]

    memory_bytes = 4 << 30
    while fits(memory_bytes, with_adapters=False):
        memory_bytes = memory_bytes * 4 // 5
    assert fits(memory_bytes, with_adapters=True)
    named = ("--model", model["model"], "--dataset", DATASET)
    assert main(["init", "mine.yaml", *named]) == 0
    keys = yaml.safe_load((folder / "mine.yaml").read_text())
    assert keys["lora"] == {"enable": True, "rank": 8}


def test_asks_in_a_terminal(folder: Path) -> None:
    ours, theirs = pty.openpty()
    try:
        command = [sys.executable, "-m", "paceline", "init"]
        process = subprocess.Popen(
            command, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        os.write(ours, f"{MODEL}\n{DATASET}\n".encode())
        output, errors = process.communicate(timeout=120)
    finally:
        os.close(ours)
        os.close(theirs)
    assert process.returncode == 0, errors
    assert "Model (" in errors
    assert "Dataset (" in errors
    assert "paceline sft paceline.yaml" in output
    assert yaml.safe_load((folder / "paceline.yaml").read_text())["model"] == MODEL
