"""`mode: auto` in a run: if the choice depends on the lengths of the samples, the data are read
first, and only once."""

from pathlib import Path

import pytest

from paceline.cli import main
from paceline.planner.auto import pick

MEMORY_BYTES = 3 << 30


def dry_run(output: Path, capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, list[str]]:
    """Return the exit code, and the lines about the mode, the data and errors."""
    fixed = [
        "model=builtin:qwen2-micro",
        "dataset=builtin:python-docs#200",
        "parallel.device=cpu",
        "parallel.num_gpus=2",
        "max_length=2048",
        f"output_dir={output}",
    ]
    code = main(["sft", *fixed, *args, "--dry-run"])
    lines = capsys.readouterr().err.splitlines()
    return code, [line for line in lines if line.startswith(("strategy: ", "data: ", "error: "))]


@pytest.fixture(autouse=True)
def small_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(pick, "available_memory", lambda: MEMORY_BYTES)


def test_first_and_second_run_choose_the_same(tmp_path, capsys):
    results = [
        dry_run(tmp_path / "run", capsys, "per_device_train_batch_size=64") for _ in range(2)
    ]
    assert [code for code, _ in results] == [0, 0]
    (first_choice, first_data), (second_choice, second_data) = [lines for _, lines in results]
    assert first_choice == second_choice
    assert "ddp: needs at most" in first_choice
    assert "tokenized in" in first_data
    assert "read from the token cache" in second_data


def test_run_folder_is_checked_before_the_data_are_tokenized(tmp_path, capsys):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text("model: m\ndataset: d\n")
    (folder / "events.jsonl").write_text("")
    args = ("per_device_train_batch_size=64", "resume=never")
    code, lines = dry_run(folder, capsys, *args)
    assert code == 2
    assert ["already contains a run" in line for line in lines] == [True]
    assert not (tmp_path / "cache" / "paceline" / "tokens").exists()


def test_data_are_read_after_the_choice_if_the_lengths_do_not_matter(tmp_path, capsys):
    code, lines = dry_run(tmp_path / "run", capsys, "per_device_train_batch_size=4")
    assert code == 0
    assert [line.partition(":")[0] for line in lines] == ["strategy", "data"]
