"""A process is killed at each file system call of a save. The next start of the run finds a valid
checkpoint and removes incomplete files."""

from __future__ import annotations

import builtins
import io
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import free_port, run_ranks

from paceline.checkpoint import store
from paceline.checkpoint.format import name_of, step_of
from paceline.checkpoint.integrity import verify
from paceline.checkpoint.saver import CheckpointManager
from paceline.core.event_log import EventLog
from paceline.distributed.communicator import Communicator, init_communicator
from paceline.distributed.environment import RankEnv
from paceline.parallel.state import TensorShard

META = {"strategy": "made up", "world_size": 1, "config": {}}
ELEMENTS = 1_200
KEEP = 2


def make_shards(step: int, rank: int, size: int) -> list[TensorShard]:
    values = torch.arange(ELEMENTS // size, dtype=torch.float32) + step + rank * ELEMENTS // size
    return [TensorShard("model/weight", values, (ELEMENTS,), (ELEMENTS // size * rank,), flat=True)]


def single_rank() -> Communicator:
    return Communicator(RankEnv(0, 1, 0, 1), torch.device("cpu"))


def make_manager(
    world: Communicator, folder: Path, first_step: int, background: bool
) -> CheckpointManager:
    manager = CheckpointManager(world, folder, KEEP, EventLog(None), background=background)
    manager.first_step = manager.last_step = first_step
    return manager


def save_checkpoint(manager: CheckpointManager, step: int) -> None:
    world = manager.world
    manager.save(step, lambda: make_shards(step, world.rank, world.size), META, must_succeed=False)
    manager.finish()


# -- initial states of the folder in which a run saves step 3
def save_two_checkpoints(folder: Path) -> None:
    manager = make_manager(single_rank(), folder, 0, background=False)
    for step in (1, 2):
        save_checkpoint(manager, step)


def save_and_damage_later_steps(folder: Path) -> None:
    """Add damaged checkpoints of steps 3 and 4, so that the run resumes from step 2."""
    save_two_checkpoints(folder)
    for step in (3, 4):
        shutil.copytree(folder / name_of(2), folder / name_of(step))
        (folder / name_of(step) / "meta.json").write_text("{}")


START = {
    "two_checkpoints": save_two_checkpoints,
    "damaged_later_steps": save_and_damage_later_steps,
}


# -- killing the process
class CallInterrupter:
    """Counts the file system calls of this process below ``folder``, and kills it before call
    ``kill_at``, or in the middle of it if it is a write."""

    def __init__(self, folder: Path, kill_at: int, log: Path | None) -> None:
        self.folder, self.kill_at, self.log = str(folder), kill_at, log
        self.number = 0

    def install(self) -> None:
        for name in ("replace", "rename", "unlink", "remove", "rmdir", "mkdir", "open", "fsync"):
            setattr(os, name, self._wrap_call(name, getattr(os, name)))
        builtins.open = io.open = self._wrap_open(io.open)  # type: ignore[assignment]

    def reached(self, call: str) -> bool:
        self.number += 1
        if self.log is not None:
            handle = _open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(handle, f"{call}\n".encode())
            os.close(handle)
        return self.number == self.kill_at

    def _wrap_call(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(path: Any, *args: Any, **kwargs: Any) -> Any:
            full = self._path(path, kwargs.get("dir_fd"))
            if full.startswith(self.folder) and self.reached(
                f"{name} {full.removeprefix(self.folder)}"
            ):
                kill_process()
            return original(path, *args, **kwargs)

        return wrapped

    @staticmethod
    def _path(path: Any, dir_fd: int | None) -> str:
        if isinstance(path, int):
            return os.readlink(f"/proc/self/fd/{path}")
        return (
            os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), path)
            if dir_fd is not None
            else os.fspath(path)
        )

    def _wrap_open(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            writes = (
                not isinstance(path, int)
                and os.fspath(path).startswith(self.folder)
                and mode[0] in "wax"
            )
            if not writes:
                return original(path, mode, *args, **kwargs)
            name = os.fspath(path).removeprefix(self.folder)
            if self.reached(f"create {name}"):
                kill_process()
            return _InterruptedFile(original(path, mode, *args, **kwargs), name, self)

        return wrapped


class _InterruptedFile:
    def __init__(self, handle: Any, name: str, interrupter: CallInterrupter) -> None:
        self._handle, self._name, self._interrupter = handle, name, interrupter

    def __enter__(self) -> _InterruptedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)

    def write(self, data: Any) -> Any:
        if self._interrupter.reached(f"write {self._name}"):
            self._handle.write(data[: len(data) // 2])
            self._handle.flush()
            kill_process()
        return self._handle.write(data)


_open = os.open


def kill_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# -- one attempt: `size` processes save step 3, and rank `victim` is killed at call `kill_at`
def attempt_save(
    folder: Path, size: int, victim: int, kill_at: int, background: bool, log: Path | None = None
) -> bool:
    """Return whether the victim was killed."""
    port = free_port()
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            _run_rank(
                folder,
                rank,
                size,
                port,
                CallInterrupter(folder, kill_at, log) if rank == victim else None,
                background,
            )
        children.append(child)
    _, status = os.waitpid(children.pop(victim), 0)
    killed = os.WIFSIGNALED(status)
    # Kill the other ranks as a launcher does, after a short time in which they continue.
    deadline = time.monotonic() + 0.3
    for child in children:
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if killed and time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.002)
    assert killed or status == 0
    return killed


def _run_rank(
    folder: Path,
    rank: int,
    size: int,
    port: int,
    interrupter: CallInterrupter | None,
    background: bool,
) -> None:
    code = 1
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        world = single_rank()
        if size > 1:
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            world = init_communicator(RankEnv(rank, size, rank, size), "cpu", 30.0)
        manager = make_manager(world, folder, 2, background)
        if interrupter is not None:
            interrupter.install()
        save_checkpoint(manager, 3)
        world.barrier()
        code = 0
    finally:
        os._exit(code)


def digest(path: Path) -> str:
    return str(store.inspect(path)["digest"])


def kill_at_each_call(
    _world: Communicator, root: Path, start: str, size: int, victim: int, background: bool
) -> list[str]:
    """Kill a save at each call in turn. Return the calls of an uninterrupted save, from its log."""
    expected_digests = {}
    reference = root / "reference"
    for step in (2, 3):
        expected_digests[step] = digest(
            store.save(reference, step, {"model/weight": _full_tensor(step)}, META).path
        )
    log, folder = root / "log", root / "run"
    kill_at, killed = 0, True
    while killed or kill_at == 1:
        START[start](folder)
        killed = attempt_save(
            folder, size, victim, kill_at, background, log if kill_at == 0 else None
        )
        if kill_at == 0:
            assert not killed
            killed = True
        path, _ = store.latest_valid(folder)
        assert path is not None, kill_at
        assert path.name in ("step-00000002", "step-00000003"), kill_at
        step = step_of(path.name)
        assert digest(path) == expected_digests[step], kill_at
        assert step == 3 or killed
        manager = make_manager(single_rank(), folder, step, background)  # the next start of the run
        assert not list(folder.glob(".*")), kill_at
        save_checkpoint(manager, step + 1)
        assert store.latest_valid(folder) == (folder / name_of(step + 1), []), kill_at
        assert verify(path) is None, kill_at  # the checkpoint from which it resumed
        assert len(store.committed(folder)) == KEEP, kill_at
        shutil.rmtree(folder)
        kill_at += 1
    calls = log.read_text().splitlines()
    # Every call was interrupted, and the last attempt completed.
    assert kill_at - 1 == len(calls) + 1
    return calls


def _full_tensor(step: int) -> torch.Tensor:
    return torch.arange(ELEMENTS, dtype=torch.float32) + step


@pytest.mark.soak
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("start", list(START))
def test_killed_save_never_loses_checkpoints(tmp_path: Path, start: str, background: bool) -> None:
    (calls,) = run_ranks(kill_at_each_call, 1, tmp_path, start, 1, 0, background)
    log_text = "\n".join(calls)
    for call in (
        "mkdir /.step-00000003.",
        "write /.step-00000003.",  # a shard, the index, the manifest
        "/state-00000-of-00001.safetensors",
        "/index.json",
        "/meta.json",
        "/manifest.json",
        "fsync /.step-00000003.",
        "replace /.step-00000003.",  # the commit
        "replace /step-00000001",  # the pruning
        "unlink /.step-00000001.",
        "rmdir /.step-00000001.",
    ):
        assert call in log_text, call
    assert "fsync " in calls  # of the folder itself


@pytest.mark.soak
@pytest.mark.parametrize("victim", [0, 1])
def test_killed_rank_of_two_never_loses_checkpoints(tmp_path: Path, victim: int) -> None:
    (calls,) = run_ranks(kill_at_each_call, 1, tmp_path, "two_checkpoints", 2, victim, True)
    assert any("state-0000" in call for call in calls)
    assert any("manifest.json" in call for call in calls) == (victim == 0)
