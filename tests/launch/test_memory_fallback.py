"""Runs that run out of memory continue with smaller memory settings: before the first step, in the
middle, and in an evaluation, under several strategies and on several hosts."""

import json
import re
from pathlib import Path

import pytest
from commands import MICRO, digest, events, report, run, start, wait_for_step

pytestmark = pytest.mark.usefixtures("own_cache", "without_memory_history")

CALLBACK = f"callbacks=[{Path(__file__).with_name('memory_limit.py')}:MemoryLimit]"
SIZE = "train_args.per_device_train_batch_size"
ACCUMULATION = "train_args.gradient_accumulation_steps"
OPEN = tuple(arg for arg in MICRO if not arg.startswith("per_device_train_batch_size="))
SETTINGS = (*OPEN, "max_steps=6", "save_steps=2", "split_dataset_ratio=0.1", "eval_steps=3")
#: Up to 512 tokens of four samples do not fit, up to 256 of two do.
LIMIT = ("task_args.max_tokens=256",)
MODES = {
    "ddp": ("parallel.mode=ddp", "parallel.num_gpus=2"),
    "zero3": ("parallel.mode=zero3", "parallel.num_gpus=2"),
    # Each rank has all tokens, and the callback counts the tokens of a rank.
    "tensor": (
        "parallel.mode=tensor",
        "parallel.num_gpus=2",
        "parallel.sequence_parallel=false",
    ),
    "pipeline": ("parallel.mode=pipeline", "parallel.num_gpus=2"),
}
CASES = {
    "first": (),
    "middle": ("task_args.from_step=3",),
    "evaluation": ("task_args.phase=evaluation",),
}


def final_losses(folder: Path) -> list[float]:
    """Return the loss of each step, as the last attempt logged it."""
    by_step = {event["step"]: event["loss"] for event in events(folder, "step")}
    return [by_step[step] for step in sorted(by_step)]


def arguments(folder: Path, *args: str) -> tuple[str, ...]:
    return (*SETTINGS, f"output_dir={folder}", *args)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """The losses of runs that fit, by mode."""
    results: dict[str, list[float]] = {}

    class Runs(dict[str, list[float]]):
        def __missing__(self, mode: str) -> list[float]:
            folder = tmp_path_factory.mktemp(mode) / "run"
            run(*arguments(folder, *MODES[mode]))
            self[mode] = final_losses(folder)
            return self[mode]

    return Runs(results)


def soak_except(*quick: tuple[str, str]) -> list[object]:
    return [
        pytest.param(mode, case, marks=[] if (mode, case) in quick else [pytest.mark.soak])
        for mode in MODES
        for case in CASES
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "case"), soak_except(("ddp", "middle"), ("ddp", "evaluation"), ("zero3", "first"))
)
def test_run_continues(
    mode: str, case: str, undisturbed: dict[str, list[float]], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    stderr = run(*arguments(folder, *MODES[mode], CALLBACK, *LIMIT, *CASES[case])).stderr
    assert final_losses(folder) == pytest.approx(undisturbed[mode], rel=1e-5)
    [event] = events(folder, "memory_fallback")
    if case == "evaluation":
        assert event["settings"] == {"train_args.per_device_eval_batch_size": 2}
        assert event["phase"] == "evaluation"
    else:
        assert event["settings"] == {SIZE: 2, ACCUMULATION: 2}
    if case == "first":
        assert event["step"] is None
        assert "Restarting all ranks from the beginning with" in stderr
    else:
        assert event["step"] >= 3
        assert re.search(r"Restarting all ranks from the checkpoint of step [24] with", stderr)
    assert report(folder)["memory_fallbacks"] == [event]


@pytest.mark.slow
@pytest.mark.soak
def test_killed_run_resumes_with_what_worked_bit_for_bit(own_cache: Path, tmp_path: Path) -> None:
    args = (*MODES["ddp"], CALLBACK, *LIMIT, *CASES["middle"])
    run(*arguments(tmp_path / "whole", *args))
    (own_cache / "memory-settings.json").unlink()  # the next run would use them
    process = start(*arguments(tmp_path / "killed", *args))
    wait_for_step(tmp_path / "killed", 5, process)
    process.kill()
    process.wait()
    run(*arguments(tmp_path / "killed", *args))
    assert len(events(tmp_path / "killed", "memory_fallback")) == 1
    assert digest(tmp_path / "killed") == digest(tmp_path / "whole")


@pytest.mark.slow
def test_what_worked_is_used_by_the_next_run_of_this_kind(tmp_path: Path) -> None:
    args = (*MODES["ddp"], CALLBACK, *LIMIT)
    run(*arguments(tmp_path / "first", *args))
    second = tmp_path / "second"
    stderr = run(*arguments(second, *args)).stderr
    assert events(second, "memory_fallback") == []
    text = "memory: per_device_train_batch_size=2 gradient_accumulation_steps=2, as in an earlier"
    assert text in stderr
    third = arguments(tmp_path / "third", *args)
    planned = json.loads(run(*third, "--json", verb="plan").stdout)
    assert planned["run"]["settings"] == {SIZE: 2, ACCUMULATION: 2}
    assert any("as in an earlier run" in note for note in planned["notes"])
    without = run(*third, "--json", "--no-history", verb="plan").stdout
    assert json.loads(without)["run"]["settings"] == {}
    # The run in the output folder keeps its settings in any case.
    resumed = run(*arguments(second, *args), "--json", "--no-history", verb="plan").stdout
    assert json.loads(resumed)["run"]["settings"] == {SIZE: 2, ACCUMULATION: 2}


@pytest.mark.slow
def test_smaller_settings_are_tried_in_order_and_at_most_five_times(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    stderr = run(
        *arguments(folder, *MODES["ddp"], CALLBACK, "task_args.max_tokens=1"), expect=1
    ).stderr
    tried = [each.strip() for each in stderr.split("Restarting all ranks")[1:]]
    assert [each.partition(" with ")[2].partition(";")[0] for each in tried] == [
        "per_device_train_batch_size=2 gradient_accumulation_steps=2",
        "per_device_train_batch_size=1 gradient_accumulation_steps=4",
        "gradient_checkpointing=selective",
        "gradient_checkpointing=full",
    ]  # nothing else is open on a CPU
    assert "Out of memory" in stderr.splitlines()[-1]
