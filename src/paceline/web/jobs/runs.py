"""Starting, stopping and resuming runs. A run is a process of its own session: it outlives the
server, and owes it nothing."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from paceline.core.errors import EXIT_DONE, ConfigError, RunError
from paceline.core.event_log import parse_event, tail_events
from paceline.core.events import RunStartEvent
from paceline.core.files import write_atomic, write_json_atomic
from paceline.core.formatting import finite
from paceline.core.launch_lock import is_launching
from paceline.core.processes import host_name, pid_alive
from paceline.core.run_dir import RunDir, lock_run
from paceline.web.files import JSONObject, json_inside, read_inside, stat_inside
from paceline.web.jobs.commands import error_of
from paceline.web.responses import Conflict

CONFIG, OUTPUT, START = "panel.yaml", "console.log", "panel.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_WAIT_S = 20.0
_TAIL_BYTES = 1 << 16


@dataclass
class Launched:
    """A run that this server started. ``log_start``: where in its output file this start begins."""

    folder: Path
    process: subprocess.Popen[bytes]
    log_start: int
    events_before: int
    fresh: bool
    config_before: str | None = None  # where a resume has put another in its place
    stopping: bool = False

    def shows(self) -> bool:
        """Whether the run has begun to write."""
        with contextlib.suppress(OSError):
            return RunDir(self.folder).events.stat().st_size > self.events_before
        return False

    def output(self) -> str:
        """What it has printed since it was started."""
        with contextlib.suppress(OSError), open(self.folder / OUTPUT, "rb") as handle:
            size = handle.seek(0, os.SEEK_END)
            handle.seek(max(self.log_start, size - _TAIL_BYTES))
            return handle.read().decode("utf-8", "replace")
        return ""


def check_name(folder: Path, name: str) -> Path:
    """The folder of a new run called ``name``.

    Raises:
        ConfigError: no such name may be given, or it is taken.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"`{name[:120]}` is no name for a run",
            allowed="1 to 100 letters, digits, `-`, `_` and `.`; a letter or digit first",
        )
    run = folder / name
    if os.path.lexists(run):
        raise ConfigError(
            f"there is a `{name}` already in {folder}",
            fix="choose another name, or resume that run",
        )
    return run


class RunLauncher:
    """The runs that this server started, by their folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: dict[Path, int] = {}  # to stop: a run, and its process at that time
        self._by_folder: dict[Path, Launched] = {}

    def find(self, run: Path) -> Launched | None:
        return self._by_folder.get(run)

    def all(self) -> list[Launched]:
        return list(self._by_folder.values())

    def start(self, name: str, yaml: str) -> Launched:
        """Start a new run in its own folder, with the config as it was typed beside it."""
        run = check_name(self.folder, name)
        try:
            run.mkdir()
            write_atomic(run / CONFIG, yaml)
            return self._launch(run, [f"{name}/{CONFIG}"], self.folder, fresh=True)
        except OSError as error:
            _remove(run)
            raise RunError(
                f"{run} cannot be written: {error.strerror}",
                fix="free some space, or serve another folder",
            ) from error

    def resume(self, run: Path, yaml: str | None, allow_config_change: bool) -> Launched:
        """Go on with a run from its newest checkpoint; with ``yaml`` by that config."""
        if is_locked(run):
            raise ConfigError(f"{run.name} is going on", fix="wait for its end, or stop it first")
        config, cwd = run / CONFIG, started_from(run, self.folder)
        before = None
        if yaml is not None:
            before = (read_inside(config) or b"").decode("utf-8", "replace")
            write_atomic(config, yaml)
        elif stat_inside(config) is None:
            config = RunDir(run).config
        if stat_inside(config) is None:
            raise ConfigError(f"{run} has no config to go on with", fix="start a new run")
        words = [
            str(config),
            f"output_dir={run}",
            "resume=auto",
            *["--allow-config-change"] * allow_config_change,
        ]
        one = self._launch(run, words, cwd, fresh=False)
        one.config_before = before
        return one

    def _launch(self, run: Path, words: Sequence[str], cwd: Path, fresh: bool) -> Launched:
        events = RunDir(run).events
        with _append(run / OUTPUT) as output:
            begins = os.fstat(output.fileno()).st_size
            process = subprocess.Popen(
                [sys.executable, "-m", "paceline", "sft", "--config", *words],
                cwd=cwd, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                env={**os.environ, "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )  # fmt: skip
        # no zombie is left behind
        threading.Thread(target=process.wait, name=f"wait-{run.name}", daemon=True).start()
        write_json_atomic(
            run / START,
            {"pid": process.pid, "host": host_name(), "cwd": str(cwd), "time": time.time()},
        )
        one = Launched(run, process, begins, events.stat().st_size if events.exists() else 0, fresh)
        self._by_folder[run] = one
        return one

    async def wait(self, one: Launched, timeout_s: float = _WAIT_S) -> bool:
        """Until the run shows, or has ended. False where neither has come: it is still preparing.

        Raises:
            ConfigError: it ended with exit code 2, with its own words; a folder that was made for
                it is gone again.
            RunError: it failed.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if one.shows():
                return True
            if one.process.poll() is not None:
                self.check_ended(one)
                return True
            await asyncio.sleep(0.05)
        return False

    def check_ended(self, one: Launched) -> None:
        """Raise what a run that ended before it showed has said."""
        code = one.process.returncode
        if code in (None, EXIT_DONE) or one.shows() or one.stopping:
            return
        error = error_of(one.output(), code, f"the run ended with exit code {code} before it began")
        self._by_folder.pop(one.folder, None)
        if one.fresh and not RunDir(one.folder).is_run():
            _remove(one.folder)
        if one.config_before:
            write_atomic(one.folder / CONFIG, one.config_before)
        elif one.config_before is not None:
            (one.folder / CONFIG).unlink(missing_ok=True)
        raise error


def _append(path: Path) -> IO[bytes]:
    """A file of a run's folder to write on at its end; a link is not followed.

    Raises:
        OSError: it is one, or it cannot be written.
    """
    return open(
        os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644),
        "ab",
    )


def _remove(run: Path) -> None:
    """Take away what :meth:`RunLauncher.start` made, and nothing else."""
    for name in (CONFIG, OUTPUT, START):
        (run / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        run.rmdir()


# -- runs that go on, whoever started them
def is_locked(run: Path) -> bool:
    """Return whether a run is starting or running in the folder."""
    if is_launching(RunDir(run)):
        return True
    if not RunDir(run).lock.exists():
        return False
    try:
        lock_run(RunDir(run), wait_s=0.0, sign=False).close()
    except (RunError, OSError):
        return True
    return False


def started_from(run: Path, otherwise: Path) -> Path:
    """The folder in which a run was started: that from which its relative paths count."""
    told = _started(run).get("cwd")
    if isinstance(told, str) and Path(told).is_dir():
        return Path(told)
    output = _run_start(run).get("output_dir")
    parts = Path(output).parts if isinstance(output, str) and not Path(output).is_absolute() else ()
    if parts and ".." not in parts and run.parts[-len(parts) :] == parts:
        return Path(*run.parts[: -len(parts)])
    return otherwise


def stop(run: Path, launches: RunLauncher, now: bool = False) -> int:
    """Ask a run to stop: it finishes its step and writes a checkpoint. ``now``: a second time,
    which ends it at once.

    Returns:
        The process that was told.

    Raises:
        ConfigError: it is not going on, or not on this host, or what has its number is another
            process.
        Conflict: it was asked already.
    """
    launched = launches.find(run)
    pid, before = _launcher(run, launched)
    handle = _open_handle(pid)
    try:
        if not (pid_alive(pid, before) and _is_python(pid)):
            raise ConfigError(
                f"{run.name} is not going on: its process {pid} is gone", fix="resume it"
            )
        if launches.asked.get(run) == pid and not now:  # a second signal would end it at once
            raise Conflict(
                f"{run.name} is stopping already", fix="wait for its checkpoint, or end it at once"
            )
        launches.asked[run] = pid
        if launched is not None:
            launched.stopping = True
        if handle is None:
            os.kill(pid, signal.SIGTERM)
        else:
            signal.pidfd_send_signal(handle, signal.SIGTERM)
    except OSError as error:
        raise RunError(
            f"{run.name} cannot be stopped: {error.strerror} (process {pid})",
            fix="stop it as the user who started it",
        ) from error
    finally:
        if handle is not None:
            os.close(handle)
    return pid


def _launcher(run: Path, launched: Launched | None) -> tuple[int, float]:
    """Process that answers a run's signals, and a time at which it was there."""
    if launched is not None and launched.process.poll() is None:
        return launched.process.pid, time.time()
    start, panel = _run_start(run), _started(run)
    began, launched_at = finite(start.get("time")), finite(panel.get("time")) or 0.0
    if began is not None and began >= launched_at:
        pid, host = start.get("launcher") or start.get("pid"), start.get("host")
        if host != host_name():
            raise ConfigError(
                f"{run.name} runs on host {host}, not on this one",
                fix="stop it there, e.g. with Ctrl-C",
            )
        if isinstance(pid, int) and pid > 1 and is_locked(run):
            return pid, began
    else:
        started = panel.get("pid")
        if isinstance(started, int) and started > 1 and panel.get("host") == host_name():
            return started, launched_at
    raise ConfigError(
        f"{run.name} is not going on, as far as can be seen from here",
        fix=(
            "reload the page; a run that is only starting in a terminal is stopped there, with"
            " Ctrl-C"
        ),
    )


def _is_python(pid: int) -> bool:
    """Whether a process may be a run's, by its command line (where the system shows it)."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return True
    return any(word in command for word in (b"python", b"paceline", b"torchrun"))


def _open_handle(pid: int) -> int | None:
    """A handle of a process that stays with it when its number goes to another; None if the system
    has none."""
    with contextlib.suppress(OSError, AttributeError):  # an older kernel, another system
        return os.pidfd_open(pid)
    return None


def _run_start(run: Path) -> RunStartEvent:
    """The newest ``run_start`` of a run; empty if there is none near the ends of its log."""
    path = RunDir(run).events
    starts = [event for event in tail_events(path) if event["type"] == "run_start"]
    if not starts and path.exists():  # long ago: it is near the beginning
        head = (read_inside(path, 1 << 20) or b"").split(b"\n")
        parsed = [parse_event(line) for line in head if b'"run_start"' in line]
        starts = [event for event in parsed if event and event["type"] == "run_start"]
    return starts[-1] if starts else {}


def _started(run: Path) -> JSONObject:
    return json_inside(run / START) or {}
