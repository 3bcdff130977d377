"""Checkpoints of ranks that do not see the run's folder: real Gloo ranks of which half have another
`output_dir`, as on a host without shared storage."""

import os
import resource
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import faulty_task
import pytest
import torch
import yaml
from commands import MICRO, digest, events, losses
from ranks import run_ranks

from paceline.checkpoint import store
from paceline.checkpoint.format import name_of
from paceline.checkpoint.integrity import verify
from paceline.checkpoint.saver import CheckpointManager
from paceline.checkpoint.transfer import open_checkpoint, transfer_text
from paceline.config.load import load_config
from paceline.core.errors import RunError
from paceline.core.event_log import EventLog, read_events
from paceline.core.stop import StopFlag
from paceline.data.order import SampleOrder
from paceline.distributed import side_group
from paceline.distributed.communicator import Communicator
from paceline.distributed.environment import RankEnv
from paceline.distributed.side_group import CHUNK_BYTES, SideGroup
from paceline.distributed.traffic import TRAFFIC
from paceline.launch.layout import choose_layout
from paceline.launch.preflight import prepare_run
from paceline.parallel.state import TensorShard
from paceline.train.run_spec import RunSpec
from paceline.train.setup import run_rank

pytestmark = pytest.mark.slow

META = {"strategy": "made up", "world_size": 2, "config": {}}
# of float32: a part of a rank takes several chunks, and the last one is not full
FEW, ELEMENTS = 20, 3 * CHUNK_BYTES // 4 + 10


# -- the saver alone
def a_share(step: int, world: Communicator) -> list[TensorShard]:
    """Of rank 0 few elements."""
    start, end = (
        (0, FEW)
        if world.is_rank_zero
        else (FEW + ELEMENTS * (world.rank - 1), FEW + ELEMENTS * world.rank)
    )
    values = torch.arange(start, end, dtype=torch.float32) + step
    return [TensorShard("model/weight", values, (num_elements(world.size),), (start,), flat=True)]


def num_elements(num_ranks: int) -> int:
    return FEW + ELEMENTS * (num_ranks - 1)


def saver_of(world: Communicator, root: Path, background: bool = True) -> CheckpointManager:
    """Rank 0 sees ``root``, the others do not."""
    folder = (
        root / "checkpoints"
        if world.is_rank_zero
        else root.parent / f"other-{world.rank}" / "checkpoints"
    )
    log = EventLog(root / "events.jsonl" if world.is_rank_zero else None)
    return CheckpointManager(
        world,
        folder,
        None,
        log,
        background=background,
        side=SideGroup.open(world, world.is_rank_zero),
    )


def save(saver: CheckpointManager, step: int, must_succeed: bool = False) -> str | None:
    try:
        saver.save(step, lambda: a_share(step, saver.world), META, must_succeed=must_succeed)
        saver.finish()
    except RunError as error:
        return str(error)
    return None


def outcomes(root: Path) -> dict[int, str | None]:
    return {
        event["step"]: event.get("error")
        for event in read_events(root / "events.jsonl")
        if event["type"] == "checkpoint"
    }


def save_and_read(world: Communicator, root: Path) -> dict[str, Any]:
    saver = saver_of(world, root)
    save(saver, 1)
    save(saver, 2, must_succeed=True)
    before = TRAFFIC.total
    shape = (num_elements(world.size),)
    with open_checkpoint(saver.folder / name_of(2), saver.side) as opened:
        full = opened.read("model/weight", (0,), shape)
        middle = opened.read_flat("model/weight", FEW - 5, 10)
        none = opened.read_flat("model/weight", 7, 0)
        refused = None
        try:
            opened.read("model/other", (0,), (3,))
        except Exception as error:
            refused = str(error)
        again = opened.read_flat("model/weight", 0, 2)  # after a refusal the two ends still agree
    return {
        "full": full,
        "middle": middle,
        "none": none.numel(),
        "refused": refused,
        "again": again,
        "meta": opened.meta["strategy"],
        "counted": TRAFFIC.total - before,
    }


def test_what_is_sent_is_written_and_read_back(tmp_path: Path) -> None:
    root = tmp_path / "run"
    root.mkdir()
    results = run_ranks(save_and_read, 3, root)
    expected = torch.arange(num_elements(3), dtype=torch.float32) + 2
    for result in results:
        assert torch.equal(result["full"], expected)
        assert torch.equal(result["middle"], expected[FEW - 5 : FEW + 5])
        assert torch.equal(result["again"], expected[:2])
        assert (result["none"], result["meta"], result["counted"]) == (0, "made up", 0)
        assert "model/other" in result["refused"]
    assert outcomes(root) == {1: None, 2: None}
    assert [verify(path) for path in store.committed(root / "checkpoints")] == [None, None]
    assert not list(tmp_path.glob("other-*"))  # nothing is written on the hosts without the folder


def save_with_faults(world: Communicator, root: Path) -> list[str | None]:
    saver = saver_of(world, root)
    errors = [save(saver, 1)]
    # Step 2: a byte changes between the two ends.
    if not world.is_rank_zero:
        flip_a_byte(saver)
    errors.append(save(saver, 2))
    # Step 3: the connection is given up in the middle of a part; nothing moves on it any longer.
    if world.is_rank_zero:
        side_group.STALL_TIMEOUT_S = 1.0
    else:
        stall_once(saver)
    errors.append(save(saver, 3))
    side_group.STALL_TIMEOUT_S = 60.0
    # Step 4: as if nothing had happened, over new connections. Step 5: a state that a checkpoint
    # cannot hold.
    errors.append(save(saver, 4))
    kind = torch.float32 if world.is_rank_zero else torch.complex128
    bad = [TensorShard.full(f"model/{world.rank}", torch.ones(3, dtype=kind))]
    saver.save(5, lambda: bad, META, must_succeed=False)
    saver.finish()
    errors.append(None)
    errors.append(save(saver, 6, must_succeed=True))
    return errors


def flip_a_byte(saver: CheckpointManager) -> None:
    assert saver.side is not None
    send, done = saver.side._send, []

    def flipped(peer: int, data: Any) -> Any:
        if len(data) == CHUNK_BYTES and not done:
            done.append(1)
            data[CHUNK_BYTES // 2] ^= 1
        return send(peer, data)

    saver.side._send = flipped  # type: ignore[method-assign]


def stall_once(saver: CheckpointManager) -> None:
    """The sender's third chunk is late by more than the receiver waits."""
    side = saver.side
    assert side is not None
    send, num_chunks = type(side)._send, []

    def late(peer: int, data: Any) -> Any:
        if len(data) == CHUNK_BYTES:
            num_chunks.append(1)
            if len(num_chunks) == 3:
                time.sleep(3.0)
        return send(side, peer, data)

    side._send = late  # type: ignore[method-assign]


def test_a_fault_of_a_transfer_fails_that_save_only(tmp_path: Path) -> None:
    root = tmp_path / "run"
    root.mkdir()
    results = run_ranks(save_with_faults, 2, root)
    assert results == [[None] * 6] * 2
    errors = outcomes(root)
    assert [step for step, error in errors.items() if error is None] == [1, 4, 6]
    assert "different SHA-256" in str(errors[2])
    assert "did not arrive: nothing arrived for 1 s" in str(errors[3])
    assert "complex128, which a checkpoint cannot store" in str(errors[5])
    assert sorted(path.name for path in (root / "checkpoints").iterdir()) == [
        name_of(step) for step in (1, 4, 6)
    ]
    assert all(verify(path) is None for path in store.committed(root / "checkpoints"))


def save_and_die(world: Communicator, root: Path) -> None:
    saver = saver_of(world, root)
    save(saver, 1)
    if world.rank == 1:
        side = saver.side
        assert side is not None
        send = side._send

        def die(peer: int, data: Any) -> Any:
            if len(data) == CHUNK_BYTES:
                os.kill(os.getpid(), signal.SIGKILL)
            return send(peer, data)

        side._send = die  # type: ignore[method-assign]
    saver.save(2, lambda: a_share(2, world), META, must_succeed=False)
    saver.finish(run_failed=True)


def test_a_rank_that_dies_while_it_sends(tmp_path: Path) -> None:
    root = tmp_path / "run"
    root.mkdir()
    with pytest.raises(AssertionError, match="rank 1 died"):
        run_ranks(save_and_die, 3, root)
    assert [path.name for path in (root / "checkpoints").iterdir()] == [name_of(1)]
    assert "the shards of rank 1 did not arrive: the connection was closed" in str(
        outcomes(root)[2]
    )


def save_where_files_may_not_grow(world: Communicator, root: Path) -> list[str | None]:
    saver = saver_of(world, root, background=False)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if world.is_rank_zero:
        resource.setrlimit(resource.RLIMIT_FSIZE, (CHUNK_BYTES * 3 // 2, before[1]))
    errors = [save(saver, 1)]
    if world.is_rank_zero:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return [*errors, save(saver, 2, must_succeed=True)]


def test_a_part_that_cannot_be_written_whole(tmp_path: Path) -> None:
    root = tmp_path / "run"
    root.mkdir()
    assert run_ranks(save_where_files_may_not_grow, 3, root) == [[None, None]] * 3
    errors = outcomes(root)
    assert "File too large (on rank 1)" in str(errors[1])
    assert errors[2] is None
    assert [path.name for path in (root / "checkpoints").iterdir()] == [name_of(2)]


def test_what_a_save_costs_is_reported() -> None:
    assert transfer_text([0], 1e6, 600)[1].endswith("its ranks own the entire state")
    level, text = transfer_text([1_000_000, 1_000_000], 1e6, 600)
    assert level == "info"
    assert "each save sends about 1.9 MiB to it, which takes about 2.0 s" in text
    level, text = transfer_text([49 << 30], 118e6, 600)
    assert level == "warning"
    assert "set it to 1784" in text


# -- whole runs
#: name → (ranks, overrides, whether ranks other than 0 send anything)
MODES: dict[str, tuple[int, tuple[str, ...], bool]] = {
    "zero3": (2, ("parallel.mode=zero3",), True),
    "ddp": (2, ("parallel.mode=ddp",), False),
    "ddp-topk": (
        2,
        ("parallel.mode=ddp", "compression.method=topk", "compression.ratio=0.1"),
        True,
    ),
    "tensor": (2, ("parallel.mode=tensor",), True),
    "pipeline": (2, ("parallel.mode=pipeline",), True),
    "local_sgd": (2, ("parallel.mode=local_sgd", "local_sgd.sync_every=2"), True),
    "diloco": (2, ("parallel.mode=diloco", "local_sgd.sync_every=2"), True),
    "shard2-tensor2": (4, ("parallel.shard=2", "parallel.tensor=2"), True),
}
SHORT = [pytest.param(mode, marks=() if mode == "zero3" else pytest.mark.soak) for mode in MODES]


def planned(mode: str, folder: Path, *extra_args: str) -> RunSpec:
    """The job of a run in ``folder``, as rank 0 plans it."""
    num_ranks, overrides, _ = MODES[mode]
    args = (
        *MICRO,
        *overrides,
        *extra_args,
        f"output_dir={folder}",
        f"parallel.num_gpus={num_ranks}",
        "train_args.max_steps=8",
    )
    args = (
        *args,
        "train_args.save_steps=2",
        "train_args.logging_steps=1",
        "train_args.save_total_limit=null",
    )
    return job_of(
        {key: yaml.safe_load(value) for key, value in (arg.split("=", 1) for arg in args)},
        num_ranks,
    )


def job_of(values: dict[str, Any], num_ranks: int) -> RunSpec:
    loaded = load_config(None, values)
    layout = choose_layout(
        loaded.config,
        num_ranks,
        "cpu",
        RankEnv(0, num_ranks, 0, num_ranks),
    )
    prepared = prepare_run(
        loaded,
        started_at=time.time(),
        layout=layout,
        device_type="cpu",
        devices=None,
    )
    return prepared.spec


def run_job(env: RankEnv, job: RunSpec, other: Path | None, kill_at: int | None = None) -> str:
    """The second half of the ranks have ``other`` as their `output_dir`. With ``kill_at`` the last
    rank kills itself when the log of the run has that step."""
    root = Path(job.config.output_dir)
    if other is not None and env.rank >= env.world_size // 2:
        job = replace(
            job,
            config=job.config.model_copy(update={"output_dir": str(other)}),
            sees_run_folder=False,
            resume_from=None,  # rank 0 says where the run resumes from
        )
    os.environ["RANK"] = str(env.rank)
    if kill_at is not None and env.rank == env.world_size - 1:
        threading.Thread(target=kill_after, args=(root, kill_at), daemon=True).start()
    return str(run_rank(job, env, StopFlag())["status"])


def kill_after(root: Path, step: int) -> None:
    while not (root / "events.jsonl").exists() or not any(
        event["step"] >= step for event in events(root, "step")
    ):
        time.sleep(0.005)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.soak
@pytest.mark.parametrize("mode", SHORT)
def test_kill_and_resume_without_shared_folder(mode: str, tmp_path: Path) -> None:
    num_ranks, _, sends = MODES[mode]
    shared, split, other = tmp_path / "shared", tmp_path / "split", tmp_path / "other"
    assert (
        run_ranks(run_job, num_ranks, planned(mode, shared), None, init_process_group=False)
        == ["done"] * num_ranks
    )
    with pytest.raises(AssertionError, match=rf"rank {num_ranks - 1} died"):
        run_ranks(run_job, num_ranks, planned(mode, split), other, 5, init_process_group=False)
    job = planned(mode, split)
    assert job.resume_from is not None
    assert (
        run_ranks(run_job, num_ranks, job, other, init_process_group=False) == ["done"] * num_ranks
    )
    assert digest(split) == digest(shared)
    assert not other.exists()
    by_step = {event["step"]: event["loss"] for event in events(split, "step")}
    assert [by_step[step] for step in sorted(by_step)] == losses(shared)
    notices = [
        event["text"]
        for event in events(split, "notice")
        if "do not share the run's folder" in event["text"]
    ]
    assert notices
    assert all(("each save sends" in notice) == sends for notice in notices)
    # What travels for checkpoints is not counted. After a resume, modes that count by period have
    # no figure at first.
    counted = [
        {event["step"]: event["traffic"] for event in events(folder, "step") if event["traffic"]}
        for folder in (split, shared)
    ]
    assert counted[0]
    assert counted[0].items() <= counted[1].items()


@pytest.mark.soak
def test_a_rollback_without_shared_folder(tmp_path: Path) -> None:
    """The loss jumps at step 11, on the rank that does not see the folder."""
    order = SampleOrder(faulty_task.SAMPLES, 16, 7)
    # 15 steps are one epoch, in which each sample comes once
    bad = [int(order.micro_batches(10, 2)[1][0])]
    for name, other in (("shared", None), ("split", tmp_path / "other")):
        flags = tmp_path / f"{name}-flags"
        flags.mkdir()
        values = {
            "model": "small",
            "dataset": "made-by-the-task",
            "task": f"{Path(faulty_task.__file__)}:Faulty",
            "task_args": {"flags": str(flags), "bad": bad, "times": 1e6},
            "output_dir": str(tmp_path / name),
            "parallel": {"num_gpus": 2, "device": "cpu", "mode": "zero3"},
            "recovery": {
                "rollback_on_loss_spike": True,
                "loss_spike_factor": 30,
                "loss_spike_window": 6,
            },
            "train_args": {
                "per_device_train_batch_size": 8,
                "max_steps": 15,
                "learning_rate": 3e-3,
                "seed": 7,
            },
        }
        values["train_args"].update(
            lr_scheduler_type="constant", save_steps=4, save_total_limit=None, logging_steps=1
        )
        assert run_ranks(run_job, 2, job_of(values, 2), other, init_process_group=False) == [
            "done",
            "done",
        ]
    for name in ("shared", "split"):
        assert [
            (event["step"], event["to_step"]) for event in events(tmp_path / name, "rewind")
        ] == [(11, 8)]
    assert digest(tmp_path / "split") == digest(tmp_path / "shared")
    assert not (tmp_path / "other").exists()
