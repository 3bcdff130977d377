"""Memory settings that the config leaves open: smaller ones after a rank ran out of memory, with
the same result, and what is stored about them."""

import json
from pathlib import Path

import pytest
from commands import MICRO, events, losses, report, run
from raised import raises_error

from paceline.config.load import load_config
from paceline.core.errors import ConfigError

pytestmark = pytest.mark.usefixtures("own_cache", "without_memory_history")

TASK = Path(__file__).with_name("small_memory_task.py")
SIZE = "train_args.per_device_train_batch_size"
ACCUMULATION = "train_args.gradient_accumulation_steps"
CONSTANT = "lr_scheduler_type=constant"  # other schedules depend on `max_steps`
RANKS = ("parallel.device=cpu", "parallel.num_gpus=2", "parallel.mode=ddp")


def train(folder: Path, *args: str, max_steps: int = 4, expect: int = 0) -> str:
    task = f"task={TASK}:SmallMemoryTask"
    notes = f"task_args.notes={folder.parent / folder.name}.notes"
    settings = (task, notes, "model=x", "dataset=x", f"max_steps={max_steps}", CONSTANT, *RANKS)
    output = f"output_dir={folder}"
    return run(*settings, *args, output, verb="train", expect=expect).stderr


@pytest.fixture(scope="module")
def fixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose micro-batches of one sample fit."""
    folder = tmp_path_factory.mktemp("fixed") / "run"
    train(folder, "per_device_train_batch_size=1", "gradient_accumulation_steps=4")
    return folder


def test_out_of_memory_restarts_with_smaller_micro_batches(tmp_path: Path, fixed: Path) -> None:
    folder = tmp_path / "run"
    stderr = train(folder)
    assert "Restarting all ranks from the beginning with per_device_train_batch_size=2" in stderr
    assert losses(folder) == pytest.approx(losses(fixed), rel=1e-6)  # the same global batches
    [event] = events(folder, "memory_fallback")
    assert event["before"] == {SIZE: 4, ACCUMULATION: 1}
    assert event["settings"] == {SIZE: 2, ACCUMULATION: 2}
    assert event["phase"] == "forward"
    assert event["step"] is None
    assert set(event["ranks"]) <= {0, 1}
    assert [each["settings"] for each in report(folder)["memory_fallbacks"]] == [event["settings"]]
    assert events(folder, "fault") == []


def test_what_was_chosen_stays_open(tmp_path: Path, fixed: Path) -> None:
    folder = tmp_path / "run"
    train(folder, max_steps=2)
    stored = json.loads((folder / "chosen.json").read_text())
    assert stored == {SIZE: 2, ACCUMULATION: 2}
    args = load_config(folder / "config.yaml").config.train_args
    assert not args.model_fields_set & {"per_device_train_batch_size"}
    # A run that resumes starts with what worked, also from its own config file.
    train(folder, "--allow-config-change", max_steps=3)
    config = str(folder / "config.yaml")
    run("--config", config, "--max_steps", "4", "--allow-config-change", verb="train")
    starts = [event["derived"]["micro_batch_size"] for event in events(folder, "run_start")]
    assert starts[-2:] == [2, 2]
    assert len(events(folder, "memory_fallback")) == 1
    assert json.loads((folder / "chosen.json").read_text()) == stored
    assert losses(folder) == pytest.approx(losses(fixed), rel=1e-6)


def test_an_edited_value_counts_as_set(tmp_path: Path) -> None:
    (tmp_path / "chosen.json").write_text(json.dumps({SIZE: 2, "parallel.cpu_offload": "none"}))
    config = tmp_path / "config.yaml"
    args = "train_args: {per_device_train_batch_size: 3}"
    config.write_text(f"model: x\ndataset: y\n{args}\nparallel: {{cpu_offload: none}}\n")
    loaded = load_config(config)
    assert loaded.config.train_args.per_device_train_batch_size == 3
    assert "per_device_train_batch_size" in loaded.config.train_args.model_fields_set
    assert "cpu_offload" not in loaded.config.parallel.model_fields_set
    assert any("`parallel.cpu_offload`" in text for _, text in loaded.notices)


def test_set_sizes_do_not_change(tmp_path: Path) -> None:
    stderr = train(tmp_path / "run", "per_device_train_batch_size=4", expect=1)
    assert "To fix: lower `per_device_train_batch_size` (now 4)" in stderr
    assert events(tmp_path / "run", "memory_fallback") == []


def test_find_batch_size_opens_both_sizes(tmp_path: Path) -> None:
    sizes = ("per_device_train_batch_size=8", "gradient_accumulation_steps=1")
    folder = tmp_path / "run"
    train(folder, *sizes, "auto_find_batch_size=true")
    settings = [event["settings"][SIZE] for event in events(folder, "memory_fallback")]
    assert settings == [4, 2]
    assert (tmp_path / "run.notes").read_text().split()[-1] == "2"


def test_auto_is_read_as_the_switch(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("{model: x, dataset: y, per_device_train_batch_size: auto}")
    args = load_config(path).config.train_args
    assert args.auto_find_batch_size
    assert args.per_device_train_batch_size == 4
    path.write_text("{model: x, dataset: y, per_device_train_batch_size: most}")
    with raises_error(ConfigError, code="wrong-type"):
        load_config(path)


def test_defaults_that_fit_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(*MICRO, "max_steps=1", f"output_dir={folder}")
    stored = json.loads((folder / "chosen.json").read_text())
    assert stored == {"train_args.gradient_checkpointing": "none"}
    assert load_config(folder / "config.yaml").config.train_args.recomputation == "none"
