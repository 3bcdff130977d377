"""Start, stop and resume runs. A run is a process in its own session, so it outlives the server."""

import asyncio
import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from paceline.core.errors import ERROR_FILE, EXIT_DONE, ConfigError, RunError
from paceline.core.event_log import parse_event, tail_events
from paceline.core.events import RunStartEvent
from paceline.core.files import write_atomic, write_json_atomic
from paceline.core.formatting import finite
from paceline.core.processes import host_name, pid_alive
from paceline.core.run_dir import RunDir, is_launching, lock_run
from paceline.web.files import JSONObject, json_inside, read_inside, stat_inside
from paceline.web.folders import Folders
from paceline.web.jobs.commands import error_of
from paceline.web.responses import Conflict

CONFIG, OUTPUT, START = "panel.yaml", "console.log", "panel.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_WAIT_S = 1.0
_TAIL_BYTES = 1 << 16


@dataclass
class Launched:
    """A run that this server started.

    Args:
        log_start: the size of its output file before this start.
        events_before: the size of its event log before this start.
        error_file: the file for the record of its error.
        is_new: the run's folder was created for this start.
        config_before: the config that a resume has replaced; None if it replaced none.
        is_stopping: the run was asked to stop.
    """

    folder: Path
    process: subprocess.Popen[bytes]
    log_start: int
    events_before: int
    error_file: Path
    is_new: bool
    config_before: str | None = None
    is_stopping: bool = False

    def has_events(self) -> bool:
        """Return whether the run has written an event since it was started."""
        with contextlib.suppress(OSError):
            return RunDir(self.folder).events.stat().st_size > self.events_before
        return False

    def output(self) -> str:
        """Return what the run has printed since it was started."""
        with contextlib.suppress(OSError), open(self.folder / OUTPUT, "rb") as handle:
            size = handle.seek(0, os.SEEK_END)
            handle.seek(max(self.log_start, size - _TAIL_BYTES))
            return handle.read().decode("utf-8", "replace")
        return ""


def check_name(folder: Path, name: str) -> Path:
    """Return the folder of a new run called ``name``.

    Raises:
        ConfigError: the name is not allowed, or it is taken.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            "`{name}` is not a valid name for a run",
            code="invalid-run-name",
            allowed="1 to 100 letters, digits, `-`, `_` and `.`; the first a letter or a digit",
            name=name[:120],
        )
    run = folder / name
    if os.path.lexists(run):
        raise ConfigError(
            "`{name}` already exists in {folder}",
            code="run-exists",
            fix="choose another name, or resume that run",
            name=name,
            folder=folder,
        )
    return run


class RunLauncher:
    """Starts runs.

    Attributes:
        by_folder: the runs that it started.
        stop_requests: for each run that was asked to stop, the process that received the request.
    """

    def __init__(self, folders: Folders) -> None:
        self.folders = folders
        self.stop_requests: dict[Path, int] = {}
        self.by_folder: dict[Path, Launched] = {}
        self._scratch: TemporaryDirectory[str] | None = None

    def close(self) -> None:
        """Remove the files of this server. Runs continue."""
        if self._scratch is not None:
            self._scratch.cleanup()

    def _error_file(self) -> Path:
        """Return the path of a new file for the record of an error."""
        if self._scratch is None:
            self._scratch = TemporaryDirectory(prefix="paceline-panel-")
        return Path(self._scratch.name) / f"{secrets.token_hex(8)}.json"

    def start(self, name: str, yaml: str) -> Launched:
        """Start a new run in its own folder, which also gets the config as it was typed."""
        run = check_name(self.folders.served, name)
        try:
            run.mkdir()
            write_atomic(run / CONFIG, yaml)
            config = self.folders.named(run / CONFIG)
            return self._launch(run, [config], self.folders.start, is_new=True)
        except OSError as error:
            _remove(run)
            raise RunError(
                "cannot write {run}: {reason}",
                code="run-not-written",
                fix="free some disk space, or serve another folder",
                run=run,
                reason=error.strerror,
            ) from error

    def resume(self, run: Path, yaml: str | None, allow_config_change: bool) -> Launched:
        """Resume a run from its latest checkpoint, with the config ``yaml`` if it is given."""
        if is_locked(run):
            raise ConfigError(
                "{run} is already running",
                code="already-running",
                fix="wait until it ends, or stop it first",
                run=run.name,
            )
        config, cwd = run / CONFIG, started_from(run, self.folders.start)
        config_before = None
        if yaml is not None:
            config_before = (read_inside(config) or b"").decode("utf-8", "replace")
            write_atomic(config, yaml)
        elif stat_inside(config) is None:
            config = RunDir(run).config
        if stat_inside(config) is None:
            raise ConfigError(
                "{run} has no config to resume with",
                code="no-config-to-resume",
                fix="start a new run",
                run=run,
            )
        args = [str(config), f"output_dir={run}", "resume=auto"]
        if allow_config_change:
            args.append("--allow-config-change")
        launched = self._launch(run, args, cwd, is_new=False)
        launched.config_before = config_before
        return launched

    def _launch(self, run: Path, args: Sequence[str], cwd: Path, is_new: bool) -> Launched:
        events, error_file = RunDir(run).events, self._error_file()
        env = {"NO_COLOR": "1", "PYTHONUNBUFFERED": "1", ERROR_FILE: str(error_file)}
        # A symbolic link in place of the output file is not followed.
        with open(run / OUTPUT, "ab", opener=_open_no_follow) as output:
            log_start = os.fstat(output.fileno()).st_size
            process = subprocess.Popen(
                [sys.executable, "-m", "paceline", "sft", "--config", *args],
                cwd=cwd, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                env={**os.environ, **env}, start_new_session=True,
            )  # fmt: skip
        # Waiting for the process keeps it from becoming a zombie.
        threading.Thread(target=process.wait, name=f"wait-{run.name}", daemon=True).start()
        write_json_atomic(
            run / START,
            {"pid": process.pid, "host": host_name(), "cwd": str(cwd), "time": time.time()},
        )
        events_before = events.stat().st_size if events.exists() else 0
        launched = Launched(run, process, log_start, events_before, error_file, is_new)
        self.by_folder[run] = launched
        return launched

    async def wait(self, launched: Launched, timeout_s: float = _WAIT_S) -> bool:
        """Wait until the run writes an event or ends. Return False if it is still preparing.

        Raises:
            ConfigError: the run ended with exit code 2. Its folder is removed if it was new.
            RunError: the run failed before its first event.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if launched.has_events():
                return True
            if launched.process.poll() is not None:
                self.check_ended(launched)
                return True
            await asyncio.sleep(0.05)
        return False

    def check_ended(self, launched: Launched) -> None:
        """Raise the error of a run that ended before its first event."""
        code = launched.process.returncode
        if code in (None, EXIT_DONE) or launched.has_events() or launched.is_stopping:
            return
        self.by_folder.pop(launched.folder, None)
        otherwise = f"the run ended with exit code {code} before its first event"
        error = error_of(launched.error_file, code, otherwise, launched.output())
        if launched.is_new and not RunDir(launched.folder).is_run():
            _remove(launched.folder)
        if launched.config_before:
            write_atomic(launched.folder / CONFIG, launched.config_before)
        elif launched.config_before is not None:
            (launched.folder / CONFIG).unlink(missing_ok=True)
        raise error


def _open_no_follow(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o644)


def _remove(run: Path) -> None:
    """Remove what :meth:`RunLauncher.start` created, and nothing else."""
    for name in (CONFIG, OUTPUT, START):
        (run / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        run.rmdir()


# -- runs in progress, whoever started them
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
    """Return the working directory that a run was started in. Its relative paths begin there."""
    start = _run_start(run)
    for cwd in (_panel_start(run).get("cwd"), start.get("cwd")):
        if isinstance(cwd, str) and Path(cwd).is_dir():
            return Path(cwd)
    output = start.get("output_dir")
    parts = Path(output).parts if isinstance(output, str) and not Path(output).is_absolute() else ()
    if parts and ".." not in parts and run.parts[-len(parts) :] == parts:
        return Path(*run.parts[: -len(parts)])
    return otherwise


def stop(run: Path, launches: RunLauncher, now: bool = False) -> int:
    """Ask a run to stop after its current step, with a checkpoint.

    Args:
        run: the folder of the run.
        launches: the runs that this server started.
        now: repeat the request, which ends the run at once.

    Returns:
        The process that received the signal.

    Raises:
        ConfigError: the run is not in progress, or it runs on another host.
        Conflict: the run was already asked to stop.
    """
    launched = launches.by_folder.get(run)
    pid, seen_at = _launcher(run, launched)
    # A pidfd refers to this process even if its number is given to another one meanwhile. Older
    # kernels and other systems do not have it.
    handle = None
    with contextlib.suppress(OSError, AttributeError):
        handle = os.pidfd_open(pid)
    try:
        if not (pid_alive(pid, seen_at) and _may_be_run(pid)):
            raise ConfigError(
                "{run} is not running: its process {pid} no longer exists",
                code="not-running",
                fix="resume it",
                run=run.name,
                pid=pid,
            )
        if launches.stop_requests.get(run) == pid and not now:
            raise Conflict(
                "{run} is already stopping",
                code="already-stopping",
                fix="wait for its checkpoint, or end it now",
                run=run.name,
            )
        launches.stop_requests[run] = pid
        if launched is not None:
            launched.is_stopping = True
            # Its page shows this if it ends before its first event. A full disk does not matter.
            with contextlib.suppress(OSError):
                write_json_atomic(run / START, {**_panel_start(run), "is_stopping": True})
        if handle is None:
            os.kill(pid, signal.SIGTERM)
        else:
            signal.pidfd_send_signal(handle, signal.SIGTERM)
    except OSError as error:
        raise RunError(
            "cannot stop {run} (process {pid}): {reason}",
            code="not-stoppable",
            fix="stop it as the user who started it",
            run=run.name,
            pid=pid,
            reason=error.strerror,
        ) from error
    finally:
        if handle is not None:
            os.close(handle)
    return pid


def _launcher(run: Path, launched: Launched | None) -> tuple[int, float]:
    """Return the process that handles a run's signals, and a time at which it existed."""
    if launched is not None and launched.process.poll() is None:
        return launched.process.pid, time.time()
    start, panel_start = _run_start(run), _panel_start(run)
    started_at, launched_at = finite(start.get("time")), finite(panel_start.get("time")) or 0.0
    if started_at is not None and started_at >= launched_at:
        pid, host = start.get("launcher") or start.get("pid"), start.get("host")
        if host != host_name():
            raise ConfigError(
                "{run} runs on host {host}, not on this one",
                code="on-another-host",
                fix="stop it on {host}, for example with Ctrl-C",
                run=run.name,
                host=host,
            )
        if isinstance(pid, int) and pid > 1 and is_locked(run):
            return pid, started_at
    else:
        launcher = panel_start.get("pid")
        if isinstance(launcher, int) and launcher > 1 and panel_start.get("host") == host_name():
            return launcher, launched_at
    raise ConfigError(
        "{run} is not running on this host",
        code="not-on-this-host",
        fix="reload the page. A run that is still starting in a terminal can be stopped there with"
        " Ctrl-C",
        run=run.name,
    )


def _may_be_run(pid: int) -> bool:
    """Return whether a process can be a run, by its command line. True if that is unknown."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return True
    return any(name in command for name in (b"python", b"paceline", b"torchrun"))


def _run_start(run: Path) -> RunStartEvent:
    """Return the newest ``run_start`` event near the end or the beginning of a run's log; empty if
    there is none."""
    path = RunDir(run).events
    starts = [event for event in tail_events(path) if event["type"] == "run_start"]
    if not starts and path.exists():
        head = (read_inside(path, 1 << 20) or b"").split(b"\n")
        parsed = [parse_event(line) for line in head if b'"run_start"' in line]
        starts = [event for event in parsed if event and event["type"] == "run_start"]
    return starts[-1] if starts else {}


def _panel_start(run: Path) -> JSONObject:
    """Return what the panel that started the run has recorded."""
    return json_inside(run / START) or {}
