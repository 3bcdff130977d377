"""`per_device_train_batch_size: auto`: the largest micro-batch that fits, with the same result."""

from dataclasses import replace
from pathlib import Path

import pytest
from commands import events, losses, run

from paceline.config.load import load_config
from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.launch.batch_size import largest_that_fits, with_batch_size
from paceline.parallel.registry import layout
from paceline.planner.estimate import USABLE, estimate
from paceline.planner.hardware import cpu_machine
from paceline.planner.micro_batch import micro_batch
from paceline.planner.model_profile import describe

TASK = Path(__file__).with_name("small_memory_task.py")


def _train(folder: Path, *args: str) -> str:
    settings = (
        "model=x",
        "dataset=x",
        "max_steps=4",
        "parallel.device=cpu",
        "parallel.num_gpus=2",
        "parallel.mode=ddp",
    )
    notes = f"task_args.notes={folder.parent / folder.name}.notes"
    task = f"task={TASK}:SmallMemoryTask"
    return run(task, notes, *settings, *args, f"output_dir={folder}", verb="train").stderr


def test_out_of_memory_restarts_with_smaller_micro_batches(tmp_path: Path) -> None:
    fixed, auto = tmp_path / "fixed", tmp_path / "auto"
    _train(fixed, "per_device_train_batch_size=1", "gradient_accumulation_steps=8")
    size = ("auto_find_batch_size=true", "per_device_train_batch_size=8")
    stderr = _train(auto, *size, "gradient_accumulation_steps=1")
    assert "restarting the ranks with micro-batches of 4 × 2 accumulation" in stderr
    assert "restarting the ranks with micro-batches of 2 × 4 accumulation" in stderr
    assert "micro-batches of 1 " not in stderr
    # the same global batches, and two faults that are recorded
    assert losses(auto) == pytest.approx(losses(fixed), rel=1e-6)
    starts = [event["derived"]["micro_batch_size"] for event in events(auto, "run_start")]
    assert starts[-1] == 2
    sizes = (tmp_path / "auto.notes").read_text().split()
    assert sizes[-1] == "2"


def test_auto_is_read_as_the_switch(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("{model: x, dataset: y, per_device_train_batch_size: auto}")
    args = load_config(path).config.train_args
    assert args.auto_find_batch_size
    assert args.per_device_train_batch_size == 4
    path.write_text("{model: x, dataset: y, per_device_train_batch_size: most}")
    with pytest.raises(ConfigError, match="whole number"):
        load_config(path)


def test_largest_predicted_size_is_chosen() -> None:
    # no other test tokenizes this dataset, so its lengths are unknown throughout
    sizes = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 3}
    config = Config.model_validate(
        {"model": "builtin:qwen2-micro", "dataset": "builtin:python-docs#61", "train_args": sizes}
    )
    single = layout(config.parallel, 1, "single")
    trial = with_batch_size(config, 12, 2)
    unlimited = cpu_machine(1, None, measure=False, memory_bytes=2**50)
    of_twelve = estimate(single, trial, describe(trial), micro_batch(trial), unlimited).total
    for memory_bytes, expected in ((2**50, 24), (of_twelve / USABLE + 2**20, 12), (2**20, 1)):
        machine = replace(unlimited, memory_bytes=round(memory_bytes))
        args = largest_that_fits(config, single, machine).train_args
        assert args.per_device_train_batch_size == expected
        assert args.gradient_accumulation_steps == 24 // expected
