"""Saves by several ranks, in the foreground and in the background: consistent snapshots, atomic
commits, and the same content for every layout."""

import itertools
import json
import os
import resource
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from disks import mount_tmpfs
from ranks import run_ranks
from safetensors.torch import save_file

from paceline.checkpoint import store
from paceline.checkpoint.integrity import verify
from paceline.checkpoint.reader import CheckpointReader, read_state
from paceline.checkpoint.saver import CheckpointManager
from paceline.core.errors import RunError
from paceline.core.event_log import EventLog, read_events
from paceline.core.files import sha256_file
from paceline.core.log import log_to_events
from paceline.distributed.communicator import Communicator
from paceline.distributed.environment import RankEnv
from paceline.parallel.state import TensorShard

META = {"strategy": "made up", "world_size": 3, "config": {}}


def full_state() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return {
        "model/weight": torch.randn(7, 5, generator=random),
        "model/cube": torch.randn(4, 3, 6, generator=random).to(torch.bfloat16),
        # larger than one block of the reader
        "model/wide": torch.randn(40, 80_000, generator=random),
        "model/vector": torch.randn(11, generator=random, dtype=torch.float64),
        # fewer rows than ranks
        "model/short": torch.randn(2, 9, generator=random).to(torch.float16),
        "buffer/flags": torch.rand(6, 4, generator=random) > 0.5,
        "buffer/none": torch.empty(0, 4),
        "optimizer/weight/step": torch.tensor(3.0),
        "schedule/step": torch.tensor(3),
    }


# -- layouts: the shards of a tensor on rank `rank` of `size`
def split_along(axis: int) -> Callable[[str, torch.Tensor, int, int], list[TensorShard]]:
    def split(name: str, value: torch.Tensor, rank: int, size: int) -> list[TensorShard]:
        length = value.shape[axis]
        start, end = (length * bound // size for bound in (rank, rank + 1))
        offset = [0] * value.dim()
        offset[axis] = start
        return [
            TensorShard(
                name, value.narrow(axis, start, end - start), tuple(value.shape), tuple(offset)
            )
        ]

    return split


def split_flat(pieces: int) -> Callable[[str, torch.Tensor, int, int], list[TensorShard]]:
    def split(name: str, value: torch.Tensor, rank: int, size: int) -> list[TensorShard]:
        edges = [value.numel() * index // (size * pieces) for index in range(size * pieces + 1)]
        intervals = list(itertools.pairwise(edges))[rank::size]
        flat = value.reshape(-1)
        return [
            TensorShard(name, flat[a:b], tuple(value.shape), (a,), flat=True) for a, b in intervals
        ]

    return split


def on_single_rank(name: str, value: torch.Tensor, rank: int, size: int) -> list[TensorShard]:
    return [TensorShard.full(name, value)] if len(name) % size == rank else []


LAYOUTS = {
    "single_rank": on_single_rank,
    "rows": split_along(0),
    "columns": split_along(-1),
    "contiguous": split_flat(1),
    "scattered": split_flat(2),
}


def make_shards(
    layout: str, rank: int, size: int, state: dict[str, torch.Tensor]
) -> list[TensorShard]:
    shards = []
    for name, value in state.items():
        split = LAYOUTS[layout] if value.dim() and value.numel() else on_single_rank
        shards += split(name, value, rank, size)
    return shards


def save_in_all_layouts(world: Communicator, root: Path) -> None:
    for layout in LAYOUTS:
        manager = CheckpointManager(
            world, root / layout, None, EventLog(None), background=layout != "rows"
        )
        manager.save(
            3,
            partial(make_shards, layout, world.rank, world.size, full_state()),
            META,
            must_succeed=False,
        )
        manager.finish()
    world.barrier()


def save_in_old_format(folder: Path) -> Path:
    """Write a checkpoint in the old format: one file with full tensors and without an index."""
    path = folder / "step-00000003"
    path.mkdir(parents=True)
    save_file(full_state(), str(path / "state.safetensors"))
    (path / "meta.json").write_text(json.dumps({**META, "step": 3}))
    files = {
        name: {"size_bytes": (path / name).stat().st_size, "sha256": sha256_file(path / name)}
        for name in ("state.safetensors", "meta.json")
    }
    (path / "manifest.json").write_text(json.dumps({"format": 1, "files": files}))
    return path


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("layouts")
    run_ranks(save_in_all_layouts, 3, root)
    save_in_old_format(root / "old")
    return {name: store.find(root / name) for name in (*LAYOUTS, "old")}


def test_digest_is_equal_for_every_layout(checkpoints: dict[str, Path]) -> None:
    contents = {name: store.inspect(path) for name, path in checkpoints.items()}
    for name, layout_contents in contents.items():
        assert layout_contents == contents["old"], name
    assert set(contents["old"]["tensors"]) == set(full_state())
    assert len(list(checkpoints["rows"].glob("state-*-of-00003.safetensors"))) == 3
    assert not list(checkpoints["rows"].glob("rank-*"))


@pytest.mark.parametrize("name", [*LAYOUTS, "old"])
def test_reads_any_block_and_any_flat_range(checkpoints: dict[str, Path], name: str) -> None:
    random = torch.Generator().manual_seed(1)

    def draw(high: int) -> int:
        return int(torch.randint(high + 1, (), generator=random))

    with CheckpointReader(checkpoints[name]) as reader:
        assert reader.tensors() == {
            key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in full_state().items()
        }
        for key, value in full_state().items():
            assert_identical(reader.read(key, (0,) * value.dim(), value.shape), value)
            for _ in range(4 if value.numel() > 1000 else 30):
                start = [draw(size) for size in value.shape]
                shape = [draw(size - first) for size, first in zip(value.shape, start, strict=True)]
                block = value[tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))]
                assert_identical(reader.read(key, start, shape), block)
                first = draw(value.numel())
                count = draw(value.numel() - first)
                assert_identical(
                    reader.read_flat(key, first, count), value.reshape(-1)[first : first + count]
                )
        wide = full_state()["model/wide"]
        # read in blocks of rows, row by row, and as a narrow slice
        for left, right in ((0, 79_000), (30_000, 52_000), (79_990, 80_000)):
            assert_identical(
                reader.read("model/wide", (0, left), (40, right - left)), wide[:, left:right]
            )


def assert_identical(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert torch.equal(actual, expected)


# -- content and reporting of a save
def single_rank() -> Communicator:
    return Communicator(RankEnv(0, 1, 0, 1), torch.device("cpu"))


def save_attempts(events: Path) -> list[tuple[int, bool]]:
    return [
        (event["step"], bool(event.get("error")))
        for event in read_events(events)
        if event["type"] == "checkpoint"
    ]


def test_background_save_is_consistent_snapshot(tmp_path: Path) -> None:
    weight = torch.arange(4_000_000, dtype=torch.float32)
    events = EventLog(tmp_path / "events.jsonl")
    with CheckpointManager(
        single_rank(), tmp_path / "checkpoints", 2, events, background=True
    ) as manager:
        for step in (1, 2, 3):
            weight.fill_(step)
            manager.save(
                step, lambda: [TensorShard.full("model/weight", weight)], META, must_succeed=False
            )
            weight.fill_(-1.0)  # training continues
            manager.poll()
    assert manager.last_step == 3
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == [
        "step-00000002",
        "step-00000003",
    ]
    for step in (2, 3):
        state = read_state(tmp_path / "checkpoints" / f"step-0000000{step}")
        assert state["model/weight"].unique().tolist() == [float(step)]
    assert save_attempts(tmp_path / "events.jsonl") == [(1, False), (2, False), (3, False)]
    for event in read_events(tmp_path / "events.jsonl"):
        assert event["size_bytes"] > 16_000_000
        assert event["path"].endswith(f"step-0000000{event['step']}")
        assert event["wall_s"] > 0
        assert event["blocked_s"] > 0


def test_failure_to_pin_memory_is_reported_once(tmp_path: Path) -> None:
    """Memory can be pinned only with an accelerator. Without one, pinning fails as it does if no
    more memory can be pinned."""
    weight = torch.ones(1000)
    world = Communicator(RankEnv(0, 1, 0, 1), torch.device("cuda"))
    events = EventLog(tmp_path / "events.jsonl")
    with (
        log_to_events(events),
        CheckpointManager(
            world, tmp_path / "checkpoints", None, events, background=True
        ) as manager,
    ):
        for step in (1, 2):
            manager.save(
                step, lambda: [TensorShard.full("model/weight", weight)], META, must_succeed=False
            )
    assert save_attempts(tmp_path / "events.jsonl") == [(1, False), (2, False)]
    notices = [
        event for event in read_events(tmp_path / "events.jsonl") if event["type"] == "notice"
    ]
    assert len(notices) == (0 if torch.accelerator.is_available() else 1)
    for notice in notices:
        assert notice["level"] == "warning"
        assert "is in pageable memory, because pinning it failed" in notice["text"]


def test_each_step_is_saved_once(tmp_path: Path) -> None:
    events = EventLog(tmp_path / "events.jsonl")
    calls = []

    def make_counted_shards() -> list[TensorShard]:
        calls.append(1)
        return [TensorShard.full("model/weight", torch.ones(3))]

    with CheckpointManager(
        single_rank(), tmp_path / "checkpoints", None, events, background=True
    ) as manager:
        manager.last_step = 4  # resumed
        manager.save(4, make_counted_shards, META, must_succeed=True)
        assert not calls
        manager.save(5, make_counted_shards, META, must_succeed=False)
        manager.save(
            5, make_counted_shards, META, must_succeed=True
        )  # waits for the save in flight
        assert store.find(tmp_path).name == "step-00000005"
    assert len(calls) == 1
    assert save_attempts(tmp_path / "events.jsonl") == [(5, False)]


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        (
            [TensorShard("model/weight", torch.ones(2), (4,), (0,), flat=True)],
            "they hold 2 elements, the tensor has 4",
        ),
        (
            [TensorShard("model/weight", torch.ones(3, 2), (4, 2), (start, 0)) for start in (0, 1)],
            "they hold 12 elements, the tensor has 8",
        ),
        (
            [
                TensorShard("model/weight", torch.ones(2, 2), (3, 2), (0, 0)),
                TensorShard("model/weight", torch.ones(1, 2), (3, 2), (1, 0)),
            ],
            "two of them overlap at offset",
        ),
        (
            [TensorShard("model/weight", torch.ones(2), (3, 2), (4,), flat=True)] * 3,
            "two of them overlap at offset",
        ),
        ([TensorShard("model/weight", torch.ones(4), (4,), (1,))], "exceeds the tensor"),
        (
            [
                TensorShard.full("model/weight", torch.ones(2)),
                TensorShard.full("model/weight", torch.ones(3)),
            ],
            "F32 [2] and F32 [3]",
        ),
    ],
)
def test_save_rejects_inconsistent_shards(
    tmp_path: Path, shards: list[TensorShard], message: str
) -> None:
    manager = CheckpointManager(
        single_rank(), tmp_path / "checkpoints", None, EventLog(None), background=False
    )
    with pytest.raises(RunError, match="could not be written") as caught:
        manager.save(1, lambda: shards, META, must_succeed=True)
    assert "model/weight" in str(caught.value)
    assert message in str(caught.value)
    assert list((tmp_path / "checkpoints").iterdir()) == []
    assert manager.last_step is None


# -- a rank that cannot write
def make_rank_shard(world: Communicator, value: float) -> list[TensorShard]:
    """Return a shard of 300 kB."""
    return [
        TensorShard(
            "model/weight",
            torch.full((75_000,), value),
            (75_000 * world.size,),
            (75_000 * world.rank,),
            flat=True,
        )
    ]


def limit_file_size(size_bytes: int) -> None:
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (size_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    )


def fail_on_a_rank(world: Communicator, root: Path) -> list[Any]:
    events = EventLog(root / "events.jsonl") if world.is_rank_zero else EventLog(None)
    errors = []

    def save_or_get_error(manager: CheckpointManager, step: int) -> str | None:
        try:
            manager.save(step, lambda: make_rank_shard(world, float(step)), META, must_succeed=True)
        except RunError as error:
            return str(error)
        return None

    with CheckpointManager(world, root / "checkpoints", None, events, background=True) as manager:
        errors.append(save_or_get_error(manager, 1))
        for failing_rank in (2, 0):
            step = 2 if failing_rank == 2 else 3
            if world.rank == failing_rank:
                limit_file_size(100_000)
            # training continues
            manager.save(step, lambda: make_rank_shard(world, 2.0), META, must_succeed=False)
            # The save at the end of the run tries once more.
            errors.append(save_or_get_error(manager, step))
            checkpoint_names = sorted(path.name for path in (root / "checkpoints").iterdir())
            world.barrier()
            limit_file_size(resource.RLIM_INFINITY)
            errors.append(checkpoint_names)
        errors.append(save_or_get_error(manager, 3))
    world.barrier()
    return errors


def test_write_error_on_one_rank_fails_save_on_all(tmp_path: Path) -> None:
    results = run_ranks(fail_on_a_rank, 3, tmp_path)
    assert results[0] == results[1] == results[2]
    first, error_on_two, names_after_two, error_on_zero, names_after_zero, last = results[0]
    assert (first, last) == (None, None)
    for error, rank in ((error_on_two, 2), (error_on_zero, 0)):
        assert f"File too large (on rank {rank})" in error
        assert "it needs 900,000 bytes" in error
        assert "earlier checkpoints are untouched" in error
    assert names_after_two == names_after_zero == ["step-00000001"]
    assert save_attempts(tmp_path / "events.jsonl") == [
        (1, False),
        (2, True),
        (2, True),
        (3, True),
        (3, True),
        (3, False),
    ]
    assert store.find(tmp_path).name == "step-00000003"


def save_two_checkpoints(world: Communicator, root: Path) -> list[str | None]:
    errors: list[str | None] = []
    for step in (1, 2):
        manager = CheckpointManager(
            world, root / "checkpoints", None, EventLog(None), background=step == 2
        )
        manager.save(step, lambda: make_rank_shard(world, 1.0), META, must_succeed=False)
        try:
            manager.save(step, lambda: make_rank_shard(world, 1.0), META, must_succeed=True)
            errors.append(None)
        except RunError as error:
            errors.append(str(error))
        manager.finish()
    world.barrier()
    return errors


def test_disk_with_space_for_one_checkpoint(tmp_path: Path) -> None:
    with mount_tmpfs(tmp_path / "small", "size=1500k") as mounted:
        if not mounted:
            return
        errors = run_ranks(save_two_checkpoints, 3, tmp_path / "small")
        assert errors[0] == errors[1] == errors[2]
        assert errors[0][0] is None
        assert "step 2 could not be written" in errors[0][1]
        assert "No space left on device" in errors[0][1]
        assert [path.name for path in (tmp_path / "small" / "checkpoints").iterdir()] == [
            "step-00000001"
        ]
        assert verify(tmp_path / "small" / "checkpoints" / "step-00000001") is None


def test_error_if_folder_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    events = EventLog(tmp_path / "events.jsonl")
    manager = CheckpointManager(
        single_rank(), tmp_path / "file" / "checkpoints", None, events, background=True
    )
    manager.save(
        1, lambda: [TensorShard.full("model/weight", torch.ones(3))], META, must_succeed=False
    )
    assert save_attempts(tmp_path / "events.jsonl") == [(1, True)]
    with pytest.raises(RunError, match="Not a directory"):
        manager.save(
            1, lambda: [TensorShard.full("model/weight", torch.ones(3))], META, must_succeed=True
        )


# -- killed during a save
def die_during_save(world: Communicator, root: Path, victim: int) -> None:
    events = EventLog(root / "events.jsonl") if world.is_rank_zero else EventLog(None)
    manager = CheckpointManager(world, root / "checkpoints", None, events, background=True)
    manager.save(1, lambda: make_rank_shard(world, 1.0), META, must_succeed=True)
    if world.rank == victim:
        # The kernel kills the process when its file reaches this size.
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        limit_file_size(100_000)
    manager.save(2, lambda: make_rank_shard(world, 2.0), META, must_succeed=False)
    manager.finish(run_failed=True)


def test_rank_killed_during_save(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="rank 1 died"):
        run_ranks(die_during_save, 2, tmp_path, 1)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    assert verify(tmp_path / "checkpoints" / "step-00000001") is None
    error = read_events(tmp_path / "events.jsonl")[-1]["error"]
    assert "rank 1 ended" in error


def test_run_killed_during_save(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="rank 0 died"):
        run_ranks(die_during_save, 1, tmp_path, 0)
    folder = tmp_path / "checkpoints"
    (incomplete_save,) = folder.glob(".*")
    assert os.stat(incomplete_save / "state-00000-of-00001.safetensors").st_size == 100_000
    assert store.latest_valid(folder) == (folder / "step-00000001", [])
    # the next start of the run
    CheckpointManager(single_rank(), folder, None, EventLog(None), background=True)
    assert [path.name for path in folder.iterdir()] == ["step-00000001"]
