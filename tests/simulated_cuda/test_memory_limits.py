"""Runs on simulated devices whose memory another process takes: before the first step, in the
middle, and in an evaluation. The allocator's limit, which counts the results of operations, lets
them run out of memory; they continue with smaller memory settings and the same losses.

The devices have the memory of an H100, so nothing is chosen in advance.
"""

import re
from pathlib import Path

import memory_callbacks
import pytest
from commands import events, report
from device_runs import equal_rows, run_on
from memory_callbacks import EVALUATION, TRAINING, read_sizes

from paceline.core.files import cache_dir

pytestmark = pytest.mark.slow

SIZE = "train_args.per_device_train_batch_size"
ACCUMULATION = "train_args.gradient_accumulation_steps"
EVAL_SIZE = "train_args.per_device_eval_batch_size"
MODES = ("ddp", "zero3", "tensor", "pipeline")
CASES = {
    "first": (),
    "middle": ("task_args.from_step=3",),
    "evaluation": ("task_args.phase=evaluation",),
}
#: Share of the memory that activations and temporary tensors take, which is left to a run.
SHARE = 0.8


@pytest.fixture(autouse=True)
def no_history() -> None:
    """Keep the settings that worked in one test from being used in the next one."""
    (cache_dir() / "memory-settings.json").unlink(missing_ok=True)


def train(folder: Path, mode: str, callback: str, *args: str) -> str:
    callbacks = f"callbacks=[{memory_callbacks.__file__}:{callback}]"
    return run_on(
        "cuda", "model=builtin:qwen2-micro", *equal_rows(folder, 128), "precision=32",
        f"parallel.mode={mode}", "parallel.num_gpus=2", "max_steps=5", "save_steps=2",
        "split_dataset_ratio=0.1", "eval_steps=3", "evaluation.num_samples=0", callbacks,
        f"output_dir={folder}", *args,
    ).stderr  # fmt: skip


def final_losses(folder: Path) -> list[float]:
    """Return the loss of each step, as the last attempt logged it."""
    by_step = {event["step"]: event["loss"] for event in events(folder, "step")}
    return [by_step[step] for step in sorted(by_step)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of runs without a limit, by mode."""

    class Runs(dict[str, Path]):
        def __missing__(self, mode: str) -> Path:
            folder = tmp_path_factory.mktemp(mode) / "run"
            train(folder, mode, "MemoryProbe")
            assert events(folder, "memory_fallback") == []
            self[mode] = folder
            return folder

    return Runs()


def limit_bytes(folder: Path, phase: str) -> int:
    """Return a limit that the run in a folder exceeds in a phase, on the rank that uses most."""
    sizes = read_sizes(folder)
    return max(round(each["state"] + SHARE * (each[phase] - each["state"])) for each in sizes)


def soak_except(*quick: tuple[str, str]) -> list[object]:
    return [
        pytest.param(mode, case, marks=[] if (mode, case) in quick else [pytest.mark.soak])
        for mode in MODES
        for case in CASES
    ]


@pytest.mark.parametrize(("mode", "case"), soak_except(("pipeline", "first"), ("zero3", "middle")))
def test_run_continues(mode: str, case: str, undisturbed: dict[str, Path], tmp_path: Path) -> None:
    folder, phase = tmp_path / "run", EVALUATION if case == "evaluation" else TRAINING
    limit = f"task_args.limit_bytes={limit_bytes(undisturbed[mode], phase)}"
    stderr = train(folder, mode, "MemoryLimit", limit, *CASES[case])
    [event] = events(folder, "memory_fallback")
    assert report(folder)["memory_fallbacks"] == [event]
    assert re.search(r"Out of memory on cuda:[01]: [\d.]+ MiB in use, [\d.]+ \w+ requested", stderr)
    if case == "evaluation":
        assert event["settings"] == {EVAL_SIZE: 2}
        assert event["phase"] == "evaluation"
    else:
        assert event["settings"] == {SIZE: 2, ACCUMULATION: 2}
    if case == "first":
        assert event["step"] is None
    else:
        assert event["step"] >= 3
    assert final_losses(folder) == pytest.approx(final_losses(undisturbed[mode]), rel=1e-5)
