"""``paceline watch RUN``: follow a run from another terminal. Reads only the events of the run."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from paceline.core import formatting
from paceline.core.errors import EXIT_DONE, EXIT_FAILED, ConfigError, nearest
from paceline.core.event_log import follow_events
from paceline.core.events import Event, RunStartEvent
from paceline.core.processes import run_alive
from paceline.core.run_dir import RunDir
from paceline.observe.console import Console, resume_hint

# A run whose process no longer exists may be restarting for this long.
_RESTART_S = 5.0
# A run on another host is reported if its log is this old, because its process cannot be checked.
_OLD_LOG_S = 120.0
_HISTORY_LINES = 40  # number of plain lines for the steps before watching began


def watch(run: Path, stream: TextIO | None = None, once: bool = False) -> int:
    """Show a run from its start and follow it to its end. Ctrl-C stops watching, not the run.

    Args:
        run: folder of the run, or a file in it.
        stream: where to print; standard error by default.
        once: whether to return after showing the current state.

    Returns:
        Exit code: 0, or 1 if the run failed or its process ended without a final event.

    Raises:
        ConfigError: there is no run at ``run``.
        BrokenPipeError: the reader of ``stream`` has closed it.
    """
    run_dir = find_run(run)
    console = Console(stream)
    try:
        return _Watcher(run_dir, console, once).follow()
    except KeyboardInterrupt:
        console.close()
        console.print("stopped watching; the run continues.")
        return EXIT_DONE
    finally:
        console.close()


def find_run(run: Path) -> RunDir:
    """Return the run in a folder, or the run to which a file belongs.

    Raises:
        ConfigError: there is no run at ``run``. The message lists runs in nearby folders.
    """
    folder = run.parent if run.is_file() else run
    if RunDir(folder).is_run():
        return RunDir(folder)
    parents = [path for path in (folder, folder.parent, Path("output")) if path.is_dir()]
    known = list(dict.fromkeys(str(path) for parent in parents for path in _runs_below(parent)))
    close = nearest(str(run), known) or nearest(folder.name, [Path(name).name for name in known])
    match = next((name for name in known if name == close or Path(name).name == close), None)
    shown = ([match] if match else []) + [name for name in known if name != match][:4]
    what = f"`{run}` is not a run" if folder.exists() else f"`{run}` not found"
    listed = f"; runs found: {', '.join(shown)}" if shown else ", a folder with an events.jsonl"
    raise ConfigError(
        what,
        code="no-run-to-watch",
        allowed="the `output_dir` of a run{listed}",
        fix="`paceline watch {shown}`",
        listed=listed,
        shown=shown[0] if shown else "./output/RUN",
    )


def _runs_below(parent: Path) -> list[Path]:
    """Return run folders one and two levels below ``parent``, the latest first."""
    try:
        folders = [
            path
            for pattern in ("*", "*/*")
            for path in parent.glob(pattern)
            if (path / "events.jsonl").is_file()
        ]
        return sorted(folders, key=lambda path: path.stat().st_mtime, reverse=True)[:20]
    except OSError:
        return []


class _Watcher:
    """Passes the events of a run to a console, and decides when to stop waiting for more."""

    def __init__(self, run_dir: RunDir, console: Console, once: bool) -> None:
        self.run_dir, self.console, self.once = run_dir, console, once
        self.exit_code = EXIT_DONE
        # The events before watching began, or None after they were shown.
        self._history: list[Event] | None = []
        self._start: RunStartEvent = {}
        self._last: Event | None = None
        self._has_warned = False

    def follow(self) -> int:
        for event in follow_events(self.run_dir.events, stop=self._is_over):
            if self._history is not None:
                self._history.append(event)
            else:
                self._show(event)
        return self.exit_code

    def _show(self, event: Event) -> None:
        self._last, self._has_warned = event, False
        if event["type"] == "run_start":
            self._start = event
        self.console(event)

    def _is_over(self) -> bool:
        """Return whether to stop watching, after all events so far have been read. Sets
        ``exit_code``."""
        if self._history is not None:
            self._show_history()
        if self.console.broken:  # for example `paceline watch RUN | head`
            raise BrokenPipeError("the reader of the output has closed it")
        if self._last is not None and self._last["type"] == "run_end":
            self.exit_code = EXIT_FAILED if self._last.get("status") == "failed" else EXIT_DONE
            return True
        last_time = formatting.finite(self._last and self._last.get("time")) or time.time()
        since_event_s = time.time() - last_time
        is_alive = run_alive(self._start)
        if is_alive is False and (self.once or since_event_s > _RESTART_S):
            self.exit_code = EXIT_FAILED
            self.console.close()
            hint = resume_hint(str(self.run_dir.root), self._start.get("config") or {})
            self.console.print(
                f"The run died: its process {self._start.get('pid')} ended without a final event"
                f" (last event {formatting.duration(since_event_s)} ago).",
                "bold red",
            )
            self.console.print(f"To resume: {hint}")
            return True
        is_old = is_alive is None and self._start and since_event_s > _OLD_LOG_S
        if is_old and not self._has_warned:
            self._has_warned = True
            self.console.print(
                f"warning: no events for {formatting.duration(since_event_s)}; the process on host"
                f" {self._start.get('host') or 'unknown'} cannot be checked from this host.",
                "yellow",
            )
        return self.once

    def _show_history(self) -> None:
        history, self._history = self._history or [], None
        if not history:
            waiting = "." if self.once else "; waiting for the first one (Ctrl-C to leave)."
            self.console.print(f"{self.run_dir.root}: no events yet{waiting}")
        for event in _thin_history(history, self.console):
            self._show(event)


def _thin_history(history: list[Event], console: Console) -> Iterator[Event]:
    """Yield the events before watching began. On a plain stream, yield only about
    ``_HISTORY_LINES`` of the steps."""
    steps = [index for index, event in enumerate(history) if event["type"] == "step"]
    if console.live or len(steps) <= _HISTORY_LINES:
        yield from history
        return
    every = -(-len(steps) // _HISTORY_LINES)
    selected = {*steps[::every], steps[0], steps[-1]}
    console.print(
        f"showing about one in {every} of {len(steps):,} past steps; all are in events.jsonl"
    )
    for index, event in enumerate(history):
        if event["type"] != "step" or index in selected:
            yield event
