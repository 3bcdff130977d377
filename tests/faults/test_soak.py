"""Every fault of the laboratory, done to real runs; what came of it is the table in
docs/how-to/fault-injection.md.

To write the table anew: PACELINE_WRITE_TABLE=1 make soak.
"""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import digest, events, run, start
from disks import mount_tmpfs
from injector import EVERY, FAULTS, Fault, at_its_end, in_training, send_nothing
from lab import MODES, SMALL, drive, note, note_driven, replaced, steps_lost, task_words
from live import LiveRun
from test_full_disk import fill as fill_up

from paceline.core.event_log import effective_steps, read_events

pytestmark = [pytest.mark.alone, pytest.mark.slow, pytest.mark.soak]

# for each mode
KILLS = {"kill -9 of a rank": 50, "kill -9 of the launcher": 2, "kill -9 of the fork server": 2}
EVALUATING = (
    *SMALL, *MODES["ddp"], "max_steps=120", "split_dataset_ratio=0.2",
    "per_device_eval_batch_size=1", f"eval_steps={EVERY}", "async_save=false",
)  # fmt: skip


@pytest.mark.parametrize("mode", list(MODES))
def test_kills_at_random_times(mode: str, tmp_path: Path) -> None:
    args = (*SMALL, *MODES[mode], "max_steps=240")
    undisturbed = drive(tmp_path / "undisturbed", args, [], seed=0)
    assert undisturbed.left == []
    pending = [name for name, number in KILLS.items() for _ in range(number)]
    random.Random(mode).shuffle(pending)
    seed = 0
    while pending:
        seed += 1
        result = drive(tmp_path / f"run-{seed}", args, pending, seed)
        note_driven(mode, result, result.digest == undisturbed.digest)
        assert (result.digest, result.left) == (undisturbed.digest, []), result
        pending = pending[result.tried.total() :]


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of an undisturbed run that evaluates."""
    return drive(tmp_path_factory.mktemp("spoken") / "run", EVALUATING, [], seed=0).digest


@pytest.mark.parametrize("workers", [0, 2])
def test_sigterm_at_any_place(workers: int, spoken: str, tmp_path: Path) -> None:
    faults = [fault for fault in FAULTS if fault.startswith("SIGTERM")]
    args = (*EVALUATING, f"dataloader_num_workers={workers}")
    result = drive(
        tmp_path / "run", args, random.Random(workers).sample(faults, len(faults)), seed=workers
    )
    note_driven(f"ddp, {workers} loader workers", result, result.digest == spoken)
    assert sorted(result.tried) == sorted(faults)
    assert (result.digest, result.left) == (spoken, [])
    assert set(result.lost.values()) == {0}  # each has committed the step that it stopped at


def test_stopped_processes(spoken: str, tmp_path: Path) -> None:
    """For a while: nobody is restarted. For good: named, ended, replaced."""
    args = (*EVALUATING, "recovery.hang_warning_s=3", "recovery.hang_timeout_s=6")
    result = drive(tmp_path / "short", args, ["SIGSTOP of a rank, 2 s"] * 6, seed=1)
    note_driven("ddp", result, result.digest == spoken)
    assert (result.digest, result.left, result.starts) == (spoken, [], 1)
    result = drive(tmp_path / "long", args, ["SIGSTOP of a rank, for good"] * 4, seed=2)
    note_driven("ddp", result, result.digest == spoken)
    assert (result.digest, result.left, result.starts) == (spoken, [], 5)
    for fault in events(tmp_path / "long", "fault"):
        assert f"rank {fault['ranks'][0]} on" in fault["reason"]
        assert "SIGSTOP" in fault["reason"]


def test_shards_that_are_harmed_and_a_config_that_is_edited(spoken: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def edited(folder: Path) -> None:
        before = contents(folder)
        output = run(
            *replaced(EVALUATING, ["learning_rate=0.5"]), f"output_dir={folder}", expect=2
        ).stderr
        assert "train_args.learning_rate" in output
        assert contents(folder) == before

    kill = FAULTS["kill -9 of the launcher"]
    edit = replace(kill, name="a config edited before a resume", moment=in_training, harm=edited)
    result = drive(
        folder,
        EVALUATING,
        [*(fault for fault in FAULTS if fault.startswith("a shard")), edit],
        seed=3,
    )
    note_driven("ddp", result, result.digest == spoken)
    assert len(result.tried) == 4
    assert (result.digest, result.left) == (spoken, [])


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_four_two_four_ranks(tmp_path: Path) -> None:
    args = replaced(EVALUATING, ["parallel.num_gpus=4"])
    drive(tmp_path / "whole", args, [], seed=0)
    stop = replace(
        FAULTS["SIGTERM to the launcher, in training"], name="a world of 4 → 2 → 4 ranks"
    )
    attempts = [replace(stop, then=(f"parallel.num_gpus={number}",)) for number in (2, 4)]
    result = drive(tmp_path / "run", args, attempts, seed=4)
    assert result.left == []
    starts = events(tmp_path / "run", "run_start")
    assert [start["world_size"] for start in starts] == [4, 2, 4]
    assert {start["derived"]["global_batch_size"] for start in starts} == {8}
    assert losses_of(tmp_path / "run") == pytest.approx(losses_of(tmp_path / "whole"), rel=1e-5)
    note(stop.name, "ddp", 1, lost=0, equal="1e-5")


def losses_of(folder: Path) -> list[float]:
    return [event["loss"] for event in effective_steps(read_events(folder / "events.jsonl"))]


@pytest.mark.parametrize("victim", [0, 1])
def test_killed_at_each_place_of_a_save(victim: int, tmp_path: Path) -> None:
    args = [
        *task_words(tmp_path, "lab_task.py", num_ranks=2, mode="zero3", cut=True, rank=victim),
        "save_total_limit=1",
    ]
    name = f"kill -9 of rank {victim} at each place of a save"
    result = drive(tmp_path / "run", args, [], seed=0)
    cuts = (tmp_path / "flags" / "cuts").read_text().splitlines()
    reference = drive(tmp_path / "whole", args, [], seed=0)
    lost = steps_lost(tmp_path / "run", [(0.0, Fault(name, in_training, send_nothing))])
    note(name, "zero3", len(cuts), lost=lost[name], equal=result.digest == reference.digest)
    assert (result.digest, result.left) == (reference.digest, [])
    assert result.starts == len(cuts) + 1
    done_to = {cut.partition(" ")[0] for cut in cuts}
    assert done_to >= {"open", "fsync", "replace"}, cuts
    if victim == 0:  # it makes the folder, names it, and prunes the one before
        assert done_to >= {"mkdir", "unlink"}, cuts
        assert any(".old" in cut for cut in cuts), cuts


def test_numbers_that_go_wrong_on_one_rank(tmp_path: Path) -> None:
    args = task_words(tmp_path, "../faulty_task.py", num_ranks=3)
    reference = drive(tmp_path / "whole", args, [], seed=0)
    flip = {"rank": 1, "call": 18, "name": "2.weight"}
    result = drive(
        tmp_path / "flipped",
        task_words(tmp_path, "../faulty_task.py", num_ranks=3, flip=flip),
        [],
        seed=0,
    )
    name = "a parameter's bit flipped on one rank"
    lost = steps_lost(tmp_path / "flipped", [(0.0, Fault(name, in_training, send_nothing))])
    note(name, "ddp", 1, lost=lost[name], equal=result.digest == reference.digest)
    assert [event["ranks"] for event in events(tmp_path / "flipped", "drift")] == [[1]]
    assert (result.digest, result.left) == (reference.digest, [])

    args = task_words(tmp_path, "../faulty_task.py", num_ranks=3, bad=[3, 77, 120])
    reference = drive(tmp_path / "skipping", args, [], seed=0)
    result = drive(tmp_path / "killed", args, ["kill -9 of a rank"] * 3, seed=5)
    skipped = [event["step"] for event in events(tmp_path / "skipping", "skipped")]
    note("NaN on one rank", "ddp", len(skipped), lost=None, equal=result.digest == reference.digest)
    assert skipped
    assert {len(event["ranks"]) for event in events(tmp_path / "skipping", "skipped")} == {1}
    assert (result.digest, result.left) == (reference.digest, [])


def test_a_slow_rank_and_a_collective_that_is_left_out(tmp_path: Path) -> None:
    args = task_words(tmp_path, "lab_task.py", num_ranks=3, base_s=0.05)
    reference = drive(tmp_path / "whole", args, [], seed=0)
    slow = task_words(
        tmp_path, "lab_task.py", num_ranks=3, base_s=0.05, fault="slow", rank=2, from_step=20
    )
    result = drive(tmp_path / "slow", slow, [], seed=0)
    named = events(tmp_path / "slow", "straggler")
    assert [event["rank"] for event in named] == [2]
    assert 20 <= named[0]["step"] < 30
    assert (result.digest, result.left, result.starts) == (reference.digest, [], 1)
    note("a rank slower by 200 ms (named)", "ddp", 1, lost=None, equal=True)

    skip = task_words(
        tmp_path, "lab_task.py", num_ranks=3, base_s=0.05, fault="skip", rank=1, from_step=20
    )
    fault = Fault("a collective that one rank leaves out", at_its_end, send_nothing, ends=1)
    result = drive(tmp_path / "skipped", skip, [fault], seed=0)
    note_driven("ddp", result, result.digest == reference.digest)
    assert (result.digest, result.left) == (reference.digest, [])


def test_a_disk_that_is_full_for_a_while(tmp_path: Path) -> None:
    args = replaced(EVALUATING, ["save_total_limit=1", "async_save=true"])
    reference = drive(tmp_path / "whole", args, [], seed=0)
    name = "a disk that is full for a while"
    with mount_tmpfs(tmp_path / "small", "size=48m") as mounted:
        if not mounted:
            return
        ballast = tmp_path / "small" / "ballast"

        def fill(run: LiveRun, _random: random.Random) -> None:
            def failed() -> bool:
                # a checkpoint that is pruned makes room again
                fill_up(ballast, leave_bytes=300_000)
                return any(
                    event.get("error") for event in run.events() if event["type"] == "checkpoint"
                )

            run.wait(failed)
            ballast.unlink()

        result = drive(
            tmp_path / "small" / "run", args, [Fault(name, with_two_saves, fill)] * 3, seed=6
        )
        note(name, "ddp", result.tried[name], lost=None, equal=result.digest == reference.digest)
        assert (result.digest, result.left, result.tried[name]) == (reference.digest, [], 3)


def with_two_saves(run: LiveRun, _random: random.Random) -> bool:
    """Two more, so that one is whole."""
    seen = len(saves(run))
    return run.wait(lambda: len(saves(run)) > seen + 1)


def saves(run: LiveRun) -> list[Any]:
    return [
        event for event in run.events() if event["type"] == "checkpoint" and not event.get("error")
    ]


PAIRS, AT_ONCE = 50, 5
TINY = (
    "model=builtin:mlp", "task=classify", "dataset=builtin:digits", "parallel.device=cpu",
    "parallel.num_gpus=2", "max_steps=4", "save_steps=2",
)  # fmt: skip


def test_fifty_pairs_of_runs_started_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two of a pair start at the same moment, with a cache in which there is nothing yet; five
    pairs at a time."""
    digests: set[str] = set()
    for first in range(0, PAIRS, AT_ONCE):
        begun = []
        for number in range(first, first + AT_ONCE):
            monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"cache-{number}"))
            begun += [
                (
                    tmp_path / f"{number}-{fault}",
                    start(*TINY, f"output_dir={tmp_path}/{number}-{fault}"),
                )
                for fault in "ab"
            ]
        for folder, process in begun:
            _, output = process.communicate(timeout=300)
            assert process.returncode == 0, output
            digests.add(digest(folder))
    assert len(digests) == 1
    note("two runs started at once", "ddp", PAIRS, lost=None, equal=True)
