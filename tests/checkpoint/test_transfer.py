"""Checkpoints of ranks without access to the run's folder: Gloo ranks of which half have another
`output_dir`, as on hosts without shared storage."""

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
from scripted_task import draft_on_cpu

from paceline.checkpoint import store
from paceline.checkpoint.format import name_of
from paceline.checkpoint.integrity import verify
from paceline.checkpoint.saver import CheckpointManager
from paceline.checkpoint.transfer import open_checkpoint, transfer_text
from paceline.config.load import load_config
from paceline.core.errors import RunError
from paceline.core.event_log import EventLog, read_events
from paceline.core.stop import StopFlag
from paceline.data.order.samples import SampleOrder
from paceline.distributed import side_group
from paceline.distributed.communicator import Communicator
from paceline.distributed.environment import RankEnv
from paceline.distributed.side_group import CHUNK_BYTES, SideGroup
from paceline.distributed.traffic import TRAFFIC
from paceline.launch import plan as planning
from paceline.launch.passes.layout import choose_layout
from paceline.parallel.state import TensorShard
from paceline.train.run_spec import RunSpec
from paceline.train.setup import run_rank

pytestmark = pytest.mark.slow

META = {"strategy": "made up", "world_size": 2, "config": {}}
# Numbers of float32 elements. The shard of a rank is sent in several chunks, the last one not full.
RANK_ZERO_ELEMENTS, ELEMENTS = 20, 3 * CHUNK_BYTES // 4 + 10


# -- CheckpointManager without a run
def make_shards(step: int, world: Communicator) -> list[TensorShard]:
    """Return the shard of this rank: a few elements on rank 0, many on the others."""
    start, end = (
        (0, RANK_ZERO_ELEMENTS)
        if world.is_rank_zero
        else (
            RANK_ZERO_ELEMENTS + ELEMENTS * (world.rank - 1),
            RANK_ZERO_ELEMENTS + ELEMENTS * world.rank,
        )
    )
    values = torch.arange(start, end, dtype=torch.float32) + step
    return [TensorShard("model/weight", values, (num_elements(world.size),), (start,), flat=True)]


def num_elements(num_ranks: int) -> int:
    return RANK_ZERO_ELEMENTS + ELEMENTS * (num_ranks - 1)


def make_manager(world: Communicator, root: Path, background: bool = True) -> CheckpointManager:
    """Create a manager that writes to ``root`` on rank 0, and has no access to it on the others."""
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


def save(manager: CheckpointManager, step: int, must_succeed: bool = False) -> str | None:
    try:
        manager.save(
            step, lambda: make_shards(step, manager.world), META, must_succeed=must_succeed
        )
        manager.finish()
    except RunError as error:
        return str(error)
    return None


def save_errors(root: Path) -> dict[int, str | None]:
    return {
        event["step"]: event.get("error")
        for event in read_events(root / "events.jsonl")
        if event["type"] == "checkpoint"
    }


def save_and_read(world: Communicator, root: Path) -> dict[str, Any]:
    manager = make_manager(world, root)
    save(manager, 1)
    save(manager, 2, must_succeed=True)
    traffic_before = TRAFFIC.total
    shape = (num_elements(world.size),)
    with open_checkpoint(manager.folder / name_of(2), manager.side) as reader:
        full = reader.read("model/weight", (0,), shape)
        middle = reader.read_flat("model/weight", RANK_ZERO_ELEMENTS - 5, 10)
        empty = reader.read_flat("model/weight", 7, 0)
        error_message = None
        try:
            reader.read("model/other", (0,), (3,))
        except Exception as error:
            error_message = str(error)
        # The connection works after an error.
        first_elements = reader.read_flat("model/weight", 0, 2)
    return {
        "full": full,
        "middle": middle,
        "empty": empty.numel(),
        "error": error_message,
        "first_elements": first_elements,
        "meta": reader.meta["strategy"],
        "traffic": TRAFFIC.total - traffic_before,
    }


def test_transferred_shards_are_written_and_read_back(tmp_path: Path) -> None:
    root = tmp_path / "run"
    root.mkdir()
    results = run_ranks(save_and_read, 3, root)
    expected = torch.arange(num_elements(3), dtype=torch.float32) + 2
    for result in results:
        assert torch.equal(result["full"], expected)
        assert torch.equal(
            result["middle"], expected[RANK_ZERO_ELEMENTS - 5 : RANK_ZERO_ELEMENTS + 5]
        )
        assert torch.equal(result["first_elements"], expected[:2])
        assert (result["empty"], result["meta"], result["traffic"]) == (0, "made up", 0)
        assert "model/other" in result["error"]
    assert save_errors(root) == {1: None, 2: None}
    assert [verify(path) for path in store.committed(root / "checkpoints")] == [None, None]
    assert not list(tmp_path.glob("other-*"))  # nothing is written on hosts without the folder


def save_with_faults(world: Communicator, root: Path) -> list[str | None]:
    manager = make_manager(world, root)
    errors = [save(manager, 1)]
    # Step 2: a byte changes during the transfer.
    if not world.is_rank_zero:
        flip_byte(manager)
    errors.append(save(manager, 2))
    # Step 3: the transfer stalls in the middle of a shard, and the receiver closes the connection.
    if world.is_rank_zero:
        side_group.STALL_TIMEOUT_S = 1.0
    else:
        stall_once(manager)
    errors.append(save(manager, 3))
    side_group.STALL_TIMEOUT_S = 60.0
    # Step 4 succeeds over new connections. Step 5: a dtype that a checkpoint cannot store.
    errors.append(save(manager, 4))
    kind = torch.float32 if world.is_rank_zero else torch.complex128
    unsupported = [TensorShard.full(f"model/{world.rank}", torch.ones(3, dtype=kind))]
    manager.save(5, lambda: unsupported, META, must_succeed=False)
    manager.finish()
    errors.append(None)
    errors.append(save(manager, 6, must_succeed=True))
    return errors


def flip_byte(manager: CheckpointManager) -> None:
    assert manager.side is not None
    send, flipped_chunks = manager.side._send, []

    def send_flipped(peer: int, data: Any) -> Any:
        if len(data) == CHUNK_BYTES and not flipped_chunks:
            flipped_chunks.append(1)
            data[CHUNK_BYTES // 2] ^= 1
        return send(peer, data)

    manager.side._send = send_flipped  # type: ignore[method-assign]


def stall_once(manager: CheckpointManager) -> None:
    """Delay the third chunk of the sender by more than the receiver's timeout."""
    side = manager.side
    assert side is not None
    send, num_chunks = type(side)._send, []

    def send_late(peer: int, data: Any) -> Any:
        if len(data) == CHUNK_BYTES:
            num_chunks.append(1)
            if len(num_chunks) == 3:
                time.sleep(3.0)
        return send(side, peer, data)

    side._send = send_late  # type: ignore[method-assign]


def test_transfer_fault_fails_only_that_save(tmp_path: Path) -> None:
    root = tmp_path / "run"
    root.mkdir()
    results = run_ranks(save_with_faults, 2, root)
    assert results == [[None] * 6] * 2
    errors = save_errors(root)
    assert [step for step, error in errors.items() if error is None] == [1, 4, 6]
    assert "different SHA-256" in str(errors[2])
    assert "did not arrive: nothing arrived for 1 s" in str(errors[3])
    assert "complex128, which a checkpoint cannot store" in str(errors[5])
    assert sorted(path.name for path in (root / "checkpoints").iterdir()) == [
        name_of(step) for step in (1, 4, 6)
    ]
    assert all(verify(path) is None for path in store.committed(root / "checkpoints"))


def save_and_die(world: Communicator, root: Path) -> None:
    manager = make_manager(world, root)
    save(manager, 1)
    if world.rank == 1:
        side = manager.side
        assert side is not None
        send = side._send

        def die_while_sending(peer: int, data: Any) -> Any:
            if len(data) == CHUNK_BYTES:
                os.kill(os.getpid(), signal.SIGKILL)
            return send(peer, data)

        side._send = die_while_sending  # type: ignore[method-assign]
    manager.save(2, lambda: make_shards(2, world), META, must_succeed=False)
    manager.finish(run_failed=True)


def test_rank_dies_during_transfer(tmp_path: Path) -> None:
    root = tmp_path / "run"
    root.mkdir()
    with pytest.raises(AssertionError, match="rank 1 died"):
        run_ranks(save_and_die, 3, root)
    assert [path.name for path in (root / "checkpoints").iterdir()] == [name_of(1)]
    assert "the shards of rank 1 did not arrive: the connection was closed" in str(
        save_errors(root)[2]
    )


def save_with_file_size_limit(world: Communicator, root: Path) -> list[str | None]:
    manager = make_manager(world, root, background=False)
    original_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if world.is_rank_zero:
        resource.setrlimit(resource.RLIMIT_FSIZE, (CHUNK_BYTES * 3 // 2, original_limit[1]))
    errors = [save(manager, 1)]
    if world.is_rank_zero:
        resource.setrlimit(resource.RLIMIT_FSIZE, original_limit)
    return [*errors, save(manager, 2, must_succeed=True)]


def test_shard_that_exceeds_file_size_limit(tmp_path: Path) -> None:
    root = tmp_path / "run"
    root.mkdir()
    assert run_ranks(save_with_file_size_limit, 3, root) == [[None, None]] * 3
    errors = save_errors(root)
    assert "File too large (on rank 1)" in str(errors[1])
    assert errors[2] is None
    assert [path.name for path in (root / "checkpoints").iterdir()] == [name_of(2)]


def test_transfer_cost_is_reported() -> None:
    assert transfer_text([0], 1e6)[1].endswith("its ranks own the entire state")
    level, text = transfer_text([1_000_000, 1_000_000], 1e6)
    assert level == "info"
    assert "each save sends about 1.9 MiB to it, which takes about 2.0 s" in text
    level, text = transfer_text([49 << 30], 118e6)
    assert level == "warning"
    assert "To save less often, raise `save_steps`" in text


# -- complete runs
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


def plan_run(mode: str, folder: Path, *extra_args: str) -> RunSpec:
    """Return the spec of a run in ``folder``, as the launcher prepares it."""
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
    return make_spec(
        {key: yaml.safe_load(value) for key, value in (arg.split("=", 1) for arg in args)},
        num_ranks,
    )


def make_spec(values: dict[str, Any], num_ranks: int) -> RunSpec:
    loaded = load_config(None, values)
    return planning.make_spec(planning.plan(draft_on_cpu(loaded, num_ranks), first=choose_layout))


def run_spec(env: RankEnv, spec: RunSpec, other: Path | None, kill_at: int | None = None) -> str:
    """Run the rank; the second half of the ranks use ``other`` as their `output_dir`. With
    ``kill_at``, the last rank kills itself when the event log contains that step."""
    root = Path(spec.config.output_dir)
    if other is not None and env.rank >= env.world_size // 2:
        spec = replace(
            spec,
            config=spec.config.model_copy(update={"output_dir": str(other)}),
            sees_run_folder=False,
            resume_from=None,  # rank 0 sends the checkpoint from which the run resumes
        )
    os.environ.update(
        RANK=str(env.rank),
        LOCAL_RANK=str(env.local_rank),
        WORLD_SIZE=str(env.world_size),
        LOCAL_WORLD_SIZE=str(env.local_world_size),
    )
    if kill_at is not None and env.rank == env.world_size - 1:
        threading.Thread(target=kill_after, args=(root, kill_at), daemon=True).start()
    return run_rank(spec, env, StopFlag()).status


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
        run_ranks(run_spec, num_ranks, plan_run(mode, shared), None, init_process_group=False)
        == ["done"] * num_ranks
    )
    with pytest.raises(AssertionError, match=rf"rank {num_ranks - 1} died"):
        run_ranks(run_spec, num_ranks, plan_run(mode, split), other, 5, init_process_group=False)
    spec = plan_run(mode, split)
    assert spec.resume_from is not None
    assert (
        run_ranks(run_spec, num_ranks, spec, other, init_process_group=False)
        == ["done"] * num_ranks
    )
    assert digest(split) == digest(shared)
    assert not other.exists()
    loss_by_step = {event["step"]: event["loss"] for event in events(split, "step")}
    assert [loss_by_step[step] for step in sorted(loss_by_step)] == losses(shared)
    notices = [
        event["text"]
        for event in events(split, "notice")
        if "do not share the run's folder" in event["text"]
    ]
    assert notices
    assert all(("each save sends" in notice) == sends for notice in notices)
    # Checkpoint transfers are not counted as traffic. After a resume, modes that measure traffic
    # per period have no value at first.
    traffic = [
        {event["step"]: event["traffic"] for event in events(folder, "step") if event["traffic"]}
        for folder in (split, shared)
    ]
    assert traffic[0]
    assert traffic[0].items() <= traffic[1].items()


@pytest.mark.soak
def test_rollback_without_shared_folder(tmp_path: Path) -> None:
    """The loss spikes at step 11 on the rank without access to the folder."""
    order = SampleOrder(faulty_task.SAMPLES, 16, 7)
    # 15 steps are one epoch, which contains each sample once.
    bad_samples = [int(order.micro_batches(10, 2)[1][0, 1])]
    for name, other in (("shared", None), ("split", tmp_path / "other")):
        flags = tmp_path / f"{name}-flags"
        flags.mkdir()
        values = {
            "model": "small",
            "dataset": "made-by-the-task",
            "task": f"{Path(faulty_task.__file__)}:Faulty",
            "task_args": {"flags": str(flags), "bad": bad_samples, "times": 1e6},
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
        assert run_ranks(run_spec, 2, make_spec(values, 2), other, init_process_group=False) == [
            "done",
            "done",
        ]
    for name in ("shared", "split"):
        assert [
            (event["step"], event["to_step"]) for event in events(tmp_path / name, "rollback")
        ] == [(11, 8)]
    assert digest(tmp_path / "split") == digest(tmp_path / "shared")
    assert not (tmp_path / "other").exists()
