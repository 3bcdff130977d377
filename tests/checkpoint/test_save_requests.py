"""Periodic saves, pausing until a save succeeds, and leftover checkpoints of earlier attempts."""

import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from disks import mount_tmpfs
from ranks import run_ranks

from paceline.checkpoint import saver, store
from paceline.checkpoint.format import name_of, step_of
from paceline.checkpoint.integrity import verify
from paceline.checkpoint.reader import read_state
from paceline.checkpoint.saver import CheckpointManager
from paceline.core.errors import RunError
from paceline.core.event_log import EventLog, read_events
from paceline.core.log import log_to_events
from paceline.distributed.communicator import Communicator
from paceline.distributed.environment import RankEnv
from paceline.parallel.state import TensorShard

META = {"strategy": "made up", "world_size": 1, "config": {}}


def single_rank() -> Communicator:
    return Communicator(RankEnv(0, 1, 0, 1), torch.device("cpu"))


def make_shards(value: float = 1.0, elements: int = 10) -> list[TensorShard]:
    return [TensorShard.full("model/weight", torch.full((elements,), value))]


def steps_of(folder: Path) -> list[int]:
    return [step_of(path.name) for path in store.committed(folder)]


def notices(root: Path) -> list[str]:
    return [
        event["text"] for event in read_events(root / "events.jsonl") if event["type"] == "notice"
    ]


def save_attempts(root: Path) -> list[tuple[int, bool]]:
    events = read_events(root / "events.jsonl")
    return [
        (event["step"], bool(event.get("error")))
        for event in events
        if event["type"] == "checkpoint"
    ]


# -- periodic saves
def test_save_is_due_after_interval(tmp_path: Path) -> None:
    with CheckpointManager(
        single_rank(), tmp_path, None, EventLog(None), background=False, every_s=3600.0
    ) as manager:
        assert manager.next_request() == 0.0
        manager.every_s = 1e-9
        assert manager.next_request() == 1.0
        manager.accept_request(1.0, manager.num_begun)
        assert manager.is_due(1)
        manager.save(1, make_shards, META, must_succeed=False)
        assert not manager.is_due(1)
        manager.accept_request(1.0, 0)  # a request that precedes the latest save
        assert not manager.is_due(1)
        manager.every_s = None
        assert manager.next_request() == 0.0


def test_no_save_is_requested_while_one_is_in_flight(tmp_path: Path) -> None:
    may_continue = threading.Event()
    with CheckpointManager(
        single_rank(), tmp_path, None, EventLog(None), background=True, every_s=1e-9
    ) as manager:
        original = manager._staging.copy
        manager._staging.copy = lambda shards: [  # type: ignore[method-assign]
            _BlockedShard(shard, may_continue) for shard in original(shards)
        ]
        manager.save(1, make_shards, META, must_succeed=False)
        assert [manager.next_request() for _ in range(3)] == [0.0] * 3
        may_continue.set()
        manager.finish()
        assert manager.next_request() == 1.0
    assert steps_of(tmp_path) == [1]


class _BlockedShard:
    """A shard whose tensor is not available to background threads until ``may_continue`` is set."""

    def __init__(self, shard: TensorShard, may_continue: threading.Event) -> None:
        self._shard, self._may_continue = shard, may_continue

    def __getattr__(self, name: str) -> Any:
        if name == "tensor" and threading.current_thread() is not threading.main_thread():
            assert self._may_continue.wait(60)
        return getattr(self._shard, name)


# -- pausing
def limit_file_size(size_bytes: int) -> None:
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (size_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    )


@contextmanager
def pausing_manager(
    world: Communicator, root: Path, log: Path | None = None, **options: Any
) -> Iterator[CheckpointManager]:
    saver._RETRY_S = 0.05
    events = EventLog(log or root / "events.jsonl") if world.is_rank_zero else EventLog(None)
    with (
        log_to_events(events),
        CheckpointManager(
            world, root / "checkpoints", None, events, pause=True, **options
        ) as manager,
    ):
        yield manager


def make_rank_shard(world: Communicator, value: float) -> list[TensorShard]:
    return [
        TensorShard(
            "model/weight",
            torch.full((75_000,), value),
            (75_000 * world.size,),
            (75_000 * world.rank,),
            flat=True,
        )
    ]


def pause_until_file_size_limit_is_lifted(world: Communicator, root: Path) -> None:
    with pausing_manager(world, root, background=False) as manager:
        manager.save(1, lambda: make_rank_shard(world, 1.0), META, must_succeed=False)
        if world.rank == 1:
            limit_file_size(100_000)
            threading.Timer(1.0, limit_file_size, [resource.RLIM_INFINITY]).start()
        manager.save(2, lambda: make_rank_shard(world, 2.0), META, must_succeed=False)
        assert manager.last_step == 2
    world.barrier()


@pytest.mark.soak
def test_training_pauses_until_checkpoint_can_be_written(tmp_path: Path) -> None:
    run_ranks(pause_until_file_size_limit_is_lifted, 2, tmp_path)
    assert steps_of(tmp_path / "checkpoints") == [1, 2]
    assert read_state(tmp_path / "checkpoints" / "step-00000002")[
        "model/weight"
    ].unique().tolist() == [2.0]
    # reported once, regardless of the number of retries
    assert save_attempts(tmp_path) == [(1, False), (2, True), (2, False)]
    paused, continued = notices(tmp_path)
    assert "training is paused at step 2" in paused
    assert "File too large (on rank 1)" in paused
    assert "continues after a pause of" in continued


def stop_while_paused(world: Communicator, root: Path) -> list[str | None]:
    stop_requested = threading.Event()
    errors: list[str | None] = []
    with pausing_manager(world, root, background=False, stop=stop_requested.is_set) as manager:
        manager.save(1, lambda: make_rank_shard(world, 1.0), META, must_succeed=False)
        limit_file_size(100_000)
        if world.rank == 1:  # a request on one rank is enough
            threading.Timer(0.5, stop_requested.set).start()
        manager.save(2, lambda: make_rank_shard(world, 2.0), META, must_succeed=False)
        for step in (2, 3):  # a stopped run tries once more for each step
            try:
                manager.save(step, lambda: make_rank_shard(world, 2.0), META, must_succeed=True)
            except RunError as error:
                errors.append(str(error))
    limit_file_size(resource.RLIM_INFINITY)
    world.barrier()
    return errors


def test_stop_ends_pause_and_keeps_last_valid_checkpoint(tmp_path: Path) -> None:
    errors, other_errors = run_ranks(stop_while_paused, 2, tmp_path)
    assert errors == other_errors
    assert len(errors) == 2
    assert all("could not be written" in text for text in errors)
    assert steps_of(tmp_path / "checkpoints") == [1]
    assert verify(tmp_path / "checkpoints" / "step-00000001") is None
    assert not list((tmp_path / "checkpoints").glob(".*"))


def test_background_failure_pauses_all_ranks(tmp_path: Path) -> None:
    """Only rank 0 learns of the failure; it requests a save, at which all ranks pause."""
    (tmp_path / "checkpoints").mkdir()
    with pausing_manager(single_rank(), tmp_path, background=True) as manager:
        limit_file_size(100_000)
        try:
            manager.save(1, lambda: make_shards(1.0, 75_000), META, must_succeed=False)
            deadline = time.monotonic() + 60
            while manager._pending is not None and time.monotonic() < deadline:
                manager.poll()
                time.sleep(0.01)
            threading.Timer(0.5, limit_file_size, [resource.RLIM_INFINITY]).start()
            request = manager.next_request()
            assert request > 1.0
            assert manager.next_request() == 0.0  # requested only once
            manager.accept_request(request, manager.num_begun)
            assert manager.is_due(1)
            manager.save(2, lambda: make_shards(2.0, 75_000), META, must_succeed=False)
        finally:
            limit_file_size(resource.RLIM_INFINITY)
    assert steps_of(tmp_path / "checkpoints") == [2]
    assert save_attempts(tmp_path) == [(1, True), (2, True), (2, False)]


def test_full_disk_error_states_missing_bytes(tmp_path: Path) -> None:
    with mount_tmpfs(tmp_path / "small", "size=500k") as mounted:
        if not mounted:
            return
        ballast = tmp_path / "small" / "ballast"
        ballast.write_bytes(bytes(400_000))
        threading.Timer(0.7, ballast.unlink).start()
        log = tmp_path / "events.jsonl"
        with pausing_manager(single_rank(), tmp_path / "small", log, background=False) as manager:
            manager.save(1, lambda: make_shards(1.0, 75_000), META, must_succeed=True)
        assert steps_of(tmp_path / "small" / "checkpoints") == [1]
        paused, _ = notices(tmp_path)
        assert f"{tmp_path}/small/checkpoints/step-00000001: No space left" in paused
        assert "it needs 300,000 bytes" in paused
        assert "missing: " in paused


# -- checkpoints of earlier attempts
def test_checkpoints_after_resumed_step_are_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for step in (10, 20, 30, 40):
        store.save(folder, step, {"model/weight": torch.ones(3)}, META)
    for step in (30, 40):
        (folder / name_of(step) / "meta.json").write_text("{}")
    assert store.latest_valid(folder)[0] == folder / "step-00000020"
    events = EventLog(tmp_path / "events.jsonl")
    with (
        log_to_events(events),
        CheckpointManager(single_rank(), folder, 2, events, background=False) as manager,
    ):
        manager.first_step = manager.last_step = 20
        # Nothing is removed before a new checkpoint exists.
        assert steps_of(folder) == [10, 20, 30, 40]
        manager.save(25, make_shards, META, must_succeed=False)
        assert steps_of(folder) == [20, 25]
        manager.save(30, make_shards, META, must_succeed=False)
        assert steps_of(folder) == [25, 30]
        manager.save(40, make_shards, META, must_succeed=False)
        assert steps_of(folder) == [30, 40]
    assert store.latest_valid(folder) == (folder / "step-00000040", [])
    (notice,) = notices(tmp_path)
    assert "removed step-00000030, step-00000040 from" in notice


def test_failed_save_removes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for step in (10, 20, 30):
        store.save(folder, step, {"model/weight": torch.ones(3)}, META)
    incomplete_shards = [TensorShard("model/weight", torch.ones(2), (4,), (0,), flat=True)]
    with CheckpointManager(single_rank(), folder, 1, EventLog(None), background=False) as manager:
        manager.first_step = manager.last_step = 20
        with pytest.raises(RunError):
            manager.save(25, lambda: incomplete_shards, META, must_succeed=True)
    assert steps_of(folder) == [10, 20, 30]
