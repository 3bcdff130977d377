"""A host that does not see the run's folder: it gets the checkpoint that a life goes on from, and leaves a note of where the
run lies. See :mod:`paceline.launch.depot` for the other end."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from paceline.config.schema import Config
from paceline.core.errors import ConfigError, RunError
from paceline.core.files import human_bytes, sha256_file, write_json_atomic
from paceline.core.run_dir import RunDir, lock_run
from paceline.engine import checkpoint
from paceline.engine.carry import TRIES, Carry, Lost, ask, read_frame, read_into, read_some
from paceline.engine.checkpoint_format import MANIFEST, is_file_of_checkpoint
from paceline.engine.checkpoint_verify import read_manifest

Say = Callable[[str, str], None]

NOTE = "elsewhere.json"
_FETCHED = ".fetched"
_CHUNK_BYTES = 1 << 22
_PROBE_BYTES, _LARGE_PROBE_BYTES = 1 << 18, 1 << 24
_SHORT_S = 0.1
_FETCHES = 3  # where the link breaks
_PATIENCE_S = 10.0  # of a link to the depot, while this host's own beats are heard
_SEEN_WITHIN_S = 10.0  # a file that another host has written
#: File systems of one machine: what another host has written there is never seen, now or later.
_LOCAL = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "f2fs", "vfat", "ntfs3", "apfs", "ramfs"}
)


@dataclass(frozen=True)
class Elsewhere:
    """The run's folder is another host's. ``path``: of this host's copy of the checkpoint that the run goes on from, if any."""

    path: Path | None


class RoundOver(Exception):
    """The round, or the run, was over while a checkpoint was fetched."""


class Apart:
    """This host's part in a run whose folder it does not see.

    Args:
        head: ``address:port`` by which the hosts meet.
    """

    def __init__(self, config: Config, head: str, say: Say) -> None:
        self.config, self.head, self.say = config, head, say
        self.run_dir = RunDir(Path(config.output_dir))
        self._copies = RunDir(self.run_dir.root / _FETCHED)
        self._rate: float | None = None
        self._lock: IO[str] | None = None
        self.fetched: dict[str, Any] | None = None  # size_bytes and wall_s of what this life needed

    def prepare(self, depot: dict[str, Any], address: str) -> Carry:
        """Reach the depot, measure the way there, and claim the place for copies in this host's own folder.

        Raises:
            ConfigError: the config needs the folder on every host; or no way leads to the depot.
        """
        if self.config.recovery.rewind_on_spike:
            raise ConfigError(
                f"`recovery.rewind_on_spike` reads checkpoints on all hosts, and `output_dir: {self.run_dir.root}` is not the "
                "head's folder here",
                fix="put `output_dir` on a file system that all hosts share, or set `recovery.rewind_on_spike: false`",
            )
        if self._lock is None:
            self._copies.root.mkdir(parents=True, exist_ok=True)
            try:
                self._lock = lock_run(self._copies, wait_s=10.0)
            except RunError as error:
                raise ConfigError(error.what, fix=error.fix) from error
        carry = Carry(address, int(depot["port"]), str(depot["token"]), sends=True)
        try:
            self._rate = self._rate or _measure(carry)
        except (OSError, Lost, ValueError) as error:
            raise ConfigError(
                f"this host shares no folder with the head, and its way to {carry.address}:{carry.port}, where checkpoints are "
                f"taken in, is closed: {error}",
                fix="open the ports between the hosts, or put `output_dir` on a file system that all hosts share",
            ) from error
        return replace(carry, link_bytes_s=self._rate)

    def take(self, carry: Carry, told: dict[str, Any], is_over: Callable[[], bool]) -> Elsewhere:
        """The checkpoint that the head goes on from: this host's copy where it has it, else fetched, with every file's SHA-256
        as the manifest says it.

        Args:
            told: ``name``, ``step`` and ``manifest`` (its SHA-256) of it; ``name`` None: the run begins.

        Raises:
            ConfigError: a run of this host's own lies in the folder, and is further; the checkpoint cannot be fetched.
            RoundOver: ``is_over()`` meanwhile.
        """
        self.fetched = None
        self._check_own_run(told["name"], told["step"])
        if told["name"] is None:
            return Elsewhere(None)
        copy = self._copies.checkpoints / Path(str(told["name"])).name
        for path in (copy, Path(self.config.resume)):
            if _is_copy(path, told["manifest"]):
                return Elsewhere(path)
        start, tries = time.monotonic(), 0
        while True:
            tries += 1
            try:
                size_bytes = _fetch(carry, copy, told["manifest"], is_over)
                break
            except (Lost, OSError, ValueError, KeyError, TypeError) as error:
                if is_over():
                    raise RoundOver from error
                if isinstance(error, Lost) and tries < _FETCHES:
                    continue
                raise ConfigError(
                    f"the checkpoint {copy.name} of the head {self.head} could not be fetched to {copy.parent}: "
                    f"{getattr(error, 'strerror', None) or error}",
                    fix="see that there is room here, and that the link to the head is sound; the same command goes on from it",
                ) from error
        self.fetched = {"name": copy.name, "size_bytes": size_bytes, "wall_s": time.monotonic() - start}
        self.say("info", fetched_text(self.fetched))
        return Elsewhere(copy)

    def leave_note(self) -> None:
        """Of where the run lies, so that none is begun anew here by mistake."""
        told = {"head": self.head, "output_dir": str(self.run_dir.root), "text": _TEXT}
        try:
            write_json_atomic(self.run_dir.root / NOTE, told)
        except OSError as error:
            self.say("warning", f"{self.run_dir.root / NOTE} cannot be written: {error.strerror or error}")

    def _check_own_run(self, name: str | None, step: int) -> None:
        own = checkpoint.committed(self.run_dir.checkpoints)
        if own and checkpoint.step_of(own[-1]) > step:
            raise ConfigError(
                f"`output_dir: {self.run_dir.root}` holds a run on this host, with {own[-1].name}, and the head {self.head} "
                f"{'has none' if name is None else f'goes on from {name}'}: the head's folder is the run's",
                fix="make this host the head (`parallel.rdzv_endpoint`), copy its folder to the head, or move it away here",
            )

    def close(self) -> None:
        """The copies are not needed any more; the note stays."""
        if self._lock is not None:
            shutil.rmtree(self._copies.root, ignore_errors=True)
            with suppress(OSError):
                self.run_dir.root.rmdir()  # where no rank has run
            self._lock.close()
            self._lock = None


_TEXT = "The run lies on its head, in the same folder: log, report, checkpoints and model. This host took part in it."


def fetched_text(fetched: dict[str, Any]) -> str:
    wall_s, size_bytes = max(fetched["wall_s"], 1e-3), fetched["size_bytes"]
    rate = f"{human_bytes(size_bytes / wall_s)}/s"
    return f"fetched {fetched['name']} from the head: {human_bytes(size_bytes)} in {wall_s:.1f} s ({rate}), every SHA-256 right"


def sees(file: Path, token: str) -> bool:
    """Whether this host sees what the head has written into ``file``."""
    deadline = time.monotonic() + _seen_within_s(file.parent)
    while True:
        try:
            if file.read_text() == token:
                return True
        except OSError:
            pass
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)


def _seen_within_s(folder: Path) -> float:
    """How long what another host has written may take to be seen here: on a disk of this machine it is there at once, or
    never."""
    here = folder.absolute()
    while not here.exists():
        here = here.parent
    try:
        device = os.stat(here).st_dev
        numbers = f"{os.major(device)}:{os.minor(device)}"
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            fields, _, kind = line.partition(" - ")
            if fields.split()[2] == numbers:
                return 0.0 if kind.split()[0] in _LOCAL else _SEEN_WITHIN_S
    except (OSError, IndexError):
        pass
    return _SEEN_WITHIN_S


def note_problem(run_dir: RunDir) -> ConfigError | None:
    """What is wrong with beginning a run in a folder whose run lies on another host."""
    note = run_dir.root / NOTE
    if run_dir.is_run() or not note.is_file():
        return None
    try:
        head = json.loads(note.read_text())["head"]
    except (OSError, ValueError, KeyError, TypeError):
        head = "another host"
    return ConfigError(
        f"`output_dir: {run_dir.root}` is that of a run that lies on its head, {head}, and not here ({NOTE})",
        fix=f"start it with that head, copy the folder from there to here, or delete {note} to begin a new run",
    )


def _measure(carry: Carry) -> float:
    """Bytes a second to the depot."""
    rate = 0.0
    for size_bytes in (_PROBE_BYTES, _LARGE_PROBE_BYTES):
        with ask(carry, _PATIENCE_S, do="probe", size_bytes=size_bytes) as link:
            start = time.monotonic()
            link.sendall(bytes(size_bytes))
            read_frame(link)
            wall_s = max(time.monotonic() - start, 1e-6)
        rate = size_bytes / wall_s
        if wall_s > _SHORT_S:
            break
    return rate


def _is_copy(path: Path, manifest: str) -> bool:
    try:
        return sha256_file(path / MANIFEST) == manifest and checkpoint.verify(path) is None
    except OSError:
        return False


def _fetch(carry: Carry, copy: Path, manifest: str, is_over: Callable[[], bool]) -> int:
    """Fetch what the head offers to ``copy``, which appears whole or not at all. Returns its bytes."""
    shutil.rmtree(copy.parent, ignore_errors=True)
    aside = copy.parent / f".{copy.name}.tmp"
    aside.mkdir(parents=True)
    with ask(carry, _PATIENCE_S, do="manifest") as link:
        link.settimeout(_PATIENCE_S)
        raw = bytearray(int(read_frame(link)["size_bytes"]))
        read_into(link, memoryview(raw))
    if hashlib.sha256(raw).hexdigest() != manifest:
        raise ValueError("its manifest arrived damaged")
    (aside / MANIFEST).write_bytes(raw)
    files = read_manifest(aside)
    needed = sum(size_bytes for size_bytes, _ in files.values())
    free = shutil.disk_usage(aside).free
    if needed > free:
        raise ValueError(f"it needs {needed:,} bytes ({human_bytes(needed)}) here, and {human_bytes(free)} are free")
    for name, (size_bytes, sha256) in files.items():
        if not is_file_of_checkpoint(name):
            raise ValueError(f"its manifest names {name!r}")
        for _ in range(TRIES):
            if _fetch_file(carry, name, aside / name, size_bytes, is_over) == sha256:
                break
        else:
            raise ValueError(f"{name} arrives with another SHA-256 than its manifest says")
    os.replace(aside, copy)
    return needed + len(raw)


def _fetch_file(carry: Carry, name: str, path: Path, size_bytes: int, is_over: Callable[[], bool]) -> str:
    """Returns its SHA-256."""
    digest, left = hashlib.sha256(), size_bytes
    memory = memoryview(bytearray(min(_CHUNK_BYTES, max(1, size_bytes))))
    asked_at = time.monotonic()
    with ask(carry, _PATIENCE_S, do="file", name=name) as link, open(path, "wb", buffering=0) as handle:
        link.settimeout(_PATIENCE_S)
        if read_frame(link)["size_bytes"] != size_bytes:
            return ""
        while left:
            if time.monotonic() - asked_at > 0.5:
                asked_at = time.monotonic()
                if is_over():
                    raise RoundOver
            chunk = memory[: read_some(link, memory[: min(left, len(memory))])]
            left -= len(chunk)
            digest.update(chunk)
            while len(chunk):
                chunk = chunk[handle.write(chunk) :]
    return digest.hexdigest()
