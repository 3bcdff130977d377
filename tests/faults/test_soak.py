"""Inject every fault into real runs. docs/how-to/fault-injection.md has the table of the results.

To update the table: PACELINE_WRITE_TABLE=1 make soak.
"""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import digest, events, run, start
from disks import mount_tmpfs
from injector import FAULTS, SAVE_STEPS, Fault, at_its_end, in_training, send_nothing
from lab import (
    MODES,
    SMALL,
    add_result,
    add_row,
    count_lost_steps,
    make_task_args,
    replace_args,
    run_with_faults,
)
from live import LiveRun
from test_full_disk import fill as fill_up

from paceline.core.event_log import effective_steps, read_events

pytestmark = [pytest.mark.alone, pytest.mark.slow, pytest.mark.soak]

# fault → number of times that it is injected in each mode
KILLS = {"kill -9 of a rank": 50, "kill -9 of the launcher": 2, "kill -9 of the fork server": 2}
EVALUATION_ARGS = (
    *SMALL, *MODES["ddp"], "max_steps=120", "split_dataset_ratio=0.2",
    "per_device_eval_batch_size=1", f"eval_steps={SAVE_STEPS}", "async_save=false",
)  # fmt: skip


@pytest.mark.parametrize("mode", list(MODES))
def test_kills_at_random_times(mode: str, tmp_path: Path) -> None:
    args = (*SMALL, *MODES[mode], "max_steps=240")
    reference = run_with_faults(tmp_path / "reference", args, [], seed=0)
    assert reference.leftovers == []
    pending = [name for name, number in KILLS.items() for _ in range(number)]
    random.Random(mode).shuffle(pending)
    seed = 0
    while pending:
        seed += 1
        result = run_with_faults(tmp_path / f"run-{seed}", args, pending, seed)
        add_result(mode, result, result.digest == reference.digest)
        assert (result.digest, result.leftovers) == (reference.digest, []), result
        pending = pending[result.injected.total() :]


@pytest.fixture(scope="module")
def reference_digest(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the digest of a run with evaluations and without faults."""
    return run_with_faults(
        tmp_path_factory.mktemp("reference") / "run", EVALUATION_ARGS, [], seed=0
    ).digest


@pytest.mark.parametrize("workers", [0, 2])
def test_sigterm_in_any_phase(workers: int, reference_digest: str, tmp_path: Path) -> None:
    faults = [fault for fault in FAULTS if fault.startswith("SIGTERM")]
    args = (*EVALUATION_ARGS, f"dataloader_num_workers={workers}")
    result = run_with_faults(
        tmp_path / "run", args, random.Random(workers).sample(faults, len(faults)), seed=workers
    )
    add_result(f"ddp, {workers} loader workers", result, result.digest == reference_digest)
    assert sorted(result.injected) == sorted(faults)
    assert (result.digest, result.leftovers) == (reference_digest, [])
    assert set(result.lost_steps.values()) == {
        0
    }  # each attempt has saved the step at which it stopped


def test_sigstop_briefly_and_permanently(reference_digest: str, tmp_path: Path) -> None:
    """A rank that is stopped briefly is not restarted. One that is stopped permanently is reported,
    killed and restarted."""
    args = (*EVALUATION_ARGS, "recovery.hang_warning_s=3", "recovery.hang_timeout_s=6")
    result = run_with_faults(tmp_path / "short", args, ["SIGSTOP of a rank, 2 s"] * 6, seed=1)
    add_result("ddp", result, result.digest == reference_digest)
    assert (result.digest, result.leftovers, result.starts) == (reference_digest, [], 1)
    result = run_with_faults(tmp_path / "long", args, ["SIGSTOP of a rank, for good"] * 4, seed=2)
    add_result("ddp", result, result.digest == reference_digest)
    assert (result.digest, result.leftovers, result.starts) == (reference_digest, [], 5)
    for fault in events(tmp_path / "long", "fault"):
        assert f"rank {fault['ranks'][0]} on" in fault["reason"]
        assert "SIGSTOP" in fault["reason"]


def test_damaged_shards_and_edited_config(reference_digest: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def edit_config(folder: Path) -> None:
        before = read_files(folder)
        output = run(
            *replace_args(EVALUATION_ARGS, ["learning_rate=0.5"]), f"output_dir={folder}", expect=2
        ).stderr
        assert "train_args.learning_rate" in output
        assert read_files(folder) == before

    kill = FAULTS["kill -9 of the launcher"]
    edit = replace(
        kill, name="a config edited before a resume", trigger=in_training, damage=edit_config
    )
    result = run_with_faults(
        folder,
        EVALUATION_ARGS,
        [*(fault for fault in FAULTS if fault.startswith("a shard")), edit],
        seed=3,
    )
    add_result("ddp", result, result.digest == reference_digest)
    assert len(result.injected) == 4
    assert (result.digest, result.leftovers) == (reference_digest, [])


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the contents of all files but the hidden locks: a command that is refused removes the
    lock of a launcher that was killed."""
    paths = [path for path in sorted(folder.rglob("[!.]*")) if path.is_file()]
    return {str(path): path.read_bytes() for path in paths}


def test_world_size_changes_from_4_to_2_to_4(tmp_path: Path) -> None:
    args = replace_args(EVALUATION_ARGS, ["parallel.num_gpus=4"])
    run_with_faults(tmp_path / "reference", args, [], seed=0)
    stop = replace(
        FAULTS["SIGTERM to the launcher, in training"], name="a world of 4 → 2 → 4 ranks"
    )
    attempts = [replace(stop, new_args=(f"parallel.num_gpus={number}",)) for number in (2, 4)]
    result = run_with_faults(tmp_path / "run", args, attempts, seed=4)
    assert result.leftovers == []
    starts = events(tmp_path / "run", "run_start")
    assert [start["world_size"] for start in starts] == [4, 2, 4]
    assert {start["derived"]["global_batch_size"] for start in starts} == {8}
    assert read_losses(tmp_path / "run") == pytest.approx(
        read_losses(tmp_path / "reference"), rel=1e-5
    )
    add_row(stop.name, "ddp", 1, lost=0, equal="1e-5")


def read_losses(folder: Path) -> list[float]:
    return [event["loss"] for event in effective_steps(read_events(folder / "events.jsonl"))]


@pytest.mark.parametrize("victim", [0, 1])
def test_kill_at_each_operation_of_a_save(victim: int, tmp_path: Path) -> None:
    args = [
        *make_task_args(tmp_path, "lab_task.py", num_ranks=2, mode="zero3", cut=True, rank=victim),
        "save_total_limit=1",
    ]
    name = f"kill -9 of rank {victim} at each place of a save"
    result = run_with_faults(tmp_path / "run", args, [], seed=0)
    cuts = (tmp_path / "flags" / "cuts").read_text().splitlines()
    reference = run_with_faults(tmp_path / "reference", args, [], seed=0)
    lost_steps = count_lost_steps(tmp_path / "run", [(0.0, Fault(name, in_training, send_nothing))])
    add_row(
        name, "zero3", len(cuts), lost=lost_steps[name], equal=result.digest == reference.digest
    )
    assert (result.digest, result.leftovers) == (reference.digest, [])
    assert result.starts == len(cuts) + 1
    operations = {cut.partition(" ")[0] for cut in cuts}
    assert operations >= {"open", "fsync", "replace"}, cuts
    if victim == 0:  # rank 0 creates and renames the folder, and prunes the previous checkpoint
        assert operations >= {"mkdir", "unlink"}, cuts
        assert any(".old" in cut for cut in cuts), cuts


def test_flipped_bit_and_nan_on_one_rank(tmp_path: Path) -> None:
    args = make_task_args(tmp_path, "../faulty_task.py", num_ranks=3)
    reference = run_with_faults(tmp_path / "reference", args, [], seed=0)
    flip = {"rank": 1, "call": 18, "name": "2.weight"}
    result = run_with_faults(
        tmp_path / "flipped",
        make_task_args(tmp_path, "../faulty_task.py", num_ranks=3, flip=flip),
        [],
        seed=0,
    )
    name = "a parameter's bit flipped on one rank"
    lost_steps = count_lost_steps(
        tmp_path / "flipped", [(0.0, Fault(name, in_training, send_nothing))]
    )
    add_row(name, "ddp", 1, lost=lost_steps[name], equal=result.digest == reference.digest)
    assert [event["ranks"] for event in events(tmp_path / "flipped", "drift")] == [[1]]
    assert (result.digest, result.leftovers) == (reference.digest, [])

    args = make_task_args(tmp_path, "../faulty_task.py", num_ranks=3, bad=[3, 77, 120])
    reference = run_with_faults(tmp_path / "skipping", args, [], seed=0)
    result = run_with_faults(tmp_path / "killed", args, ["kill -9 of a rank"] * 3, seed=5)
    skipped = [event["step"] for event in events(tmp_path / "skipping", "skipped")]
    add_row(
        "NaN on one rank", "ddp", len(skipped), lost=None, equal=result.digest == reference.digest
    )
    assert skipped
    assert {len(event["ranks"]) for event in events(tmp_path / "skipping", "skipped")} == {1}
    assert (result.digest, result.leftovers) == (reference.digest, [])


def test_slow_rank_and_skipped_collective(tmp_path: Path) -> None:
    args = make_task_args(tmp_path, "lab_task.py", num_ranks=3, base_s=0.05)
    reference = run_with_faults(tmp_path / "reference", args, [], seed=0)
    slow = make_task_args(
        tmp_path, "lab_task.py", num_ranks=3, base_s=0.05, fault="slow", rank=2, from_step=20
    )
    result = run_with_faults(tmp_path / "slow", slow, [], seed=0)
    stragglers = events(tmp_path / "slow", "straggler")
    assert [event["rank"] for event in stragglers] == [2]
    assert 20 <= stragglers[0]["step"] < 30
    assert (result.digest, result.leftovers, result.starts) == (reference.digest, [], 1)
    add_row("a rank slower by 200 ms (named)", "ddp", 1, lost=None, equal=True)

    skip = make_task_args(
        tmp_path, "lab_task.py", num_ranks=3, base_s=0.05, fault="skip", rank=1, from_step=20
    )
    fault = Fault("a collective that one rank leaves out", at_its_end, send_nothing, exit_code=1)
    result = run_with_faults(tmp_path / "skipped", skip, [fault], seed=0)
    add_result("ddp", result, result.digest == reference.digest)
    assert (result.digest, result.leftovers) == (reference.digest, [])


def test_temporarily_full_disk(tmp_path: Path) -> None:
    args = replace_args(EVALUATION_ARGS, ["save_total_limit=1", "async_save=true"])
    reference = run_with_faults(tmp_path / "reference", args, [], seed=0)
    name = "a disk that is full for a while"
    with mount_tmpfs(tmp_path / "small", "size=48m") as mounted:
        if not mounted:
            return
        ballast = tmp_path / "small" / "ballast"

        def fill(run: LiveRun, _random: random.Random) -> None:
            def failed() -> bool:
                # filled repeatedly, because pruning a checkpoint frees space
                fill_up(ballast, leave_bytes=300_000)
                return any(
                    event.get("error") for event in run.events() if event["type"] == "checkpoint"
                )

            run.wait(failed)
            ballast.unlink()

        result = run_with_faults(
            tmp_path / "small" / "run", args, [Fault(name, with_two_saves, fill)] * 3, seed=6
        )
        add_row(
            name, "ddp", result.injected[name], lost=None, equal=result.digest == reference.digest
        )
        assert (result.digest, result.leftovers, result.injected[name]) == (reference.digest, [], 3)


def with_two_saves(run: LiveRun, _random: random.Random) -> bool:
    """Wait for two more checkpoints, so that at least one is complete."""
    num_saves = len(successful_saves(run))
    return run.wait(lambda: len(successful_saves(run)) > num_saves + 1)


def successful_saves(run: LiveRun) -> list[Any]:
    return [
        event for event in run.events() if event["type"] == "checkpoint" and not event.get("error")
    ]


NUM_PAIRS, NUM_PARALLEL_PAIRS = 50, 5
TINY = (
    "model=builtin:mlp", "task=classify", "dataset=builtin:digits", "parallel.device=cpu",
    "parallel.num_gpus=2", "max_steps=4", "save_steps=2",
)  # fmt: skip


def test_fifty_pairs_of_simultaneous_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two runs of a pair start simultaneously with an empty cache; five pairs run in
    parallel."""
    digests: set[str] = set()
    for first in range(0, NUM_PAIRS, NUM_PARALLEL_PAIRS):
        runs = []
        for number in range(first, first + NUM_PARALLEL_PAIRS):
            monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"cache-{number}"))
            runs += [
                (
                    tmp_path / f"{number}-{name}",
                    start(*TINY, f"output_dir={tmp_path}/{number}-{name}"),
                )
                for name in "ab"
            ]
        for folder, process in runs:
            _, output = process.communicate(timeout=300)
            assert process.returncode == 0, output
            digests.add(digest(folder))
    assert len(digests) == 1
    add_row("two runs started at once", "ddp", NUM_PAIRS, lost=None, equal=True)
