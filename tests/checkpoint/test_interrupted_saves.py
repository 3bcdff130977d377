"""A save is cut at every place where it touches the disk: a real process is killed there, and the
next start finds a whole checkpoint and leaves no debris."""

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


def parts_of(step: int, rank: int, size: int) -> list[TensorShard]:
    values = torch.arange(ELEMENTS // size, dtype=torch.float32) + step + rank * ELEMENTS // size
    return [TensorShard("model/weight", values, (ELEMENTS,), (ELEMENTS // size * rank,), flat=True)]


def alone() -> Communicator:
    return Communicator(RankEnv(0, 1, 0, 1), torch.device("cpu"))


def saver_of(
    world: Communicator, folder: Path, first_step: int, background: bool
) -> CheckpointManager:
    saver = CheckpointManager(world, folder, KEEP, EventLog(None), background=background)
    saver.first_step = saver.last_step = first_step
    return saver


def save(saver: CheckpointManager, step: int) -> None:
    world = saver.world
    saver.save(step, lambda: parts_of(step, world.rank, world.size), META, must_succeed=False)
    saver.finish()


# -- folders as a run finds them, in which it saves step 3
def usual(folder: Path) -> None:
    saver = saver_of(alone(), folder, 0, background=False)
    for step in (1, 2):
        save(saver, step)


def rolled_back(folder: Path) -> None:
    """Goes on from step 2, for what an earlier life wrote beyond it is damaged."""
    usual(folder)
    for step in (3, 4):
        shutil.copytree(folder / name_of(2), folder / name_of(step))
        (folder / name_of(step) / "meta.json").write_text("{}")


START = {"usual": usual, "rolled_back": rolled_back}


# -- the cut
class Cutter:
    """Numbers what this process does below ``folder``, and kills it before number ``at``; in a
    write, half-way."""

    def __init__(self, folder: Path, at: int, log: Path | None) -> None:
        self.folder, self.at, self.log = str(folder), at, log
        self.number = 0

    def install(self) -> None:
        for name in ("replace", "rename", "unlink", "remove", "rmdir", "mkdir", "open", "fsync"):
            setattr(os, name, self._before(name, getattr(os, name)))
        builtins.open = io.open = self._opening(io.open)  # type: ignore[assignment]

    def hit(self, what: str) -> bool:
        self.number += 1
        if self.log is not None:
            handle = _open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(handle, f"{what}\n".encode())
            os.close(handle)
        return self.number == self.at

    def _before(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(path: Any, *args: Any, **kwargs: Any) -> Any:
            full = self._path(path, kwargs.get("dir_fd"))
            if full.startswith(self.folder) and self.hit(
                f"{name} {full.removeprefix(self.folder)}"
            ):
                die()
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

    def _opening(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            writes = (
                not isinstance(path, int)
                and os.fspath(path).startswith(self.folder)
                and mode[0] in "wax"
            )
            if not writes:
                return original(path, mode, *args, **kwargs)
            name = os.fspath(path).removeprefix(self.folder)
            if self.hit(f"create {name}"):
                die()
            return _Writing(original(path, mode, *args, **kwargs), name, self)

        return wrapped


class _Writing:
    def __init__(self, handle: Any, name: str, cutter: Cutter) -> None:
        self._handle, self._name, self._cutter = handle, name, cutter

    def __enter__(self) -> _Writing:
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)

    def write(self, data: Any) -> Any:
        if self._cutter.hit(f"write {self._name}"):
            self._handle.write(data[: len(data) // 2])
            self._handle.flush()
            die()
        return self._handle.write(data)


_open = os.open


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# -- one attempt: `size` processes save step 3, and `victim` is killed at `at`
def attempt(
    folder: Path, size: int, victim: int, at: int, background: bool, log: Path | None = None
) -> bool:
    """True where the victim was killed."""
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
                Cutter(folder, at, log) if rank == victim else None,
                background,
            )
        children.append(child)
    _, status = os.waitpid(children.pop(victim), 0)
    killed = os.WIFSIGNALED(status)
    # as a launcher ends the others; they may have some time to do harm
    deadline = time.monotonic() + 0.3
    for child in children:
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if killed and time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.002)
    assert killed or status == 0
    return killed


def _run_rank(
    folder: Path, rank: int, size: int, port: int, cutter: Cutter | None, background: bool
) -> None:
    code = 1
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        world = alone()
        if size > 1:
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            world = init_communicator(RankEnv(rank, size, rank, size), "cpu", 30.0)
        saver = saver_of(world, folder, 2, background)
        if cutter is not None:
            cutter.install()
        save(saver, 3)
        world.barrier()
        code = 0
    finally:
        os._exit(code)


def digest(path: Path) -> str:
    return str(store.inspect(path)["digest"])


def sweep(
    _world: Communicator, root: Path, start: str, size: int, victim: int, background: bool
) -> list[str]:
    """Kill at each place in turn. Returns the places, as a save that was let through has logged
    them."""
    wanted = {}
    reference = root / "reference"
    for step in (2, 3):
        wanted[step] = digest(
            store.save(reference, step, {"model/weight": _full_tensor(step)}, META).path
        )
    log, folder = root / "log", root / "run"
    at, killed = 0, True
    while killed or at == 1:
        START[start](folder)
        killed = attempt(folder, size, victim, at, background, log if at == 0 else None)
        if at == 0:
            assert not killed
            killed = True
        path, _ = store.latest_valid(folder)
        assert path is not None, at
        assert path.name in ("step-00000002", "step-00000003"), at
        step = step_of(path.name)
        assert digest(path) == wanted[step], at
        assert step == 3 or killed
        saver = saver_of(alone(), folder, step, background)  # the next start
        assert not list(folder.glob(".*")), at
        save(saver, step + 1)
        assert store.latest_valid(folder) == (folder / name_of(step + 1), []), at
        assert verify(path) is None, at  # that which it went on from
        assert len(store.committed(folder)) == KEEP, at
        shutil.rmtree(folder)
        at += 1
    places = log.read_text().splitlines()
    assert at - 1 == len(places) + 1  # each place had its turn, and one more was no place
    return places


def _full_tensor(step: int) -> torch.Tensor:
    return torch.arange(ELEMENTS, dtype=torch.float32) + step


@pytest.mark.soak
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("start", list(START))
def test_a_run_that_is_killed_anywhere_in_a_save(
    tmp_path: Path, start: str, background: bool
) -> None:
    (places,) = run_ranks(sweep, 1, tmp_path, start, 1, 0, background)
    log_text = "\n".join(places)
    for place in (
        "mkdir /.step-00000003.",
        "write /.step-00000003.",  # a part, the index, the manifest
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
        assert place in log_text, place
    assert "fsync " in places  # of the folder itself


@pytest.mark.soak
@pytest.mark.parametrize("victim", [0, 1])
def test_one_of_two_ranks_that_is_killed_anywhere_in_a_save(tmp_path: Path, victim: int) -> None:
    (places,) = run_ranks(sweep, 1, tmp_path, "usual", 2, victim, True)
    assert any("state-0000" in place for place in places)
    assert any("manifest.json" in place for place in places) == (victim == 0)
