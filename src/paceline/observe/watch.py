"""``paceline watch RUN``: follow a run from another terminal. It only reads the run's events; the
run does not notice."""

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

# a process that is gone is declared so after this long without an event: it may be restarting
_QUIET_S = 5.0
_SAY_QUIET_S = 120.0  # an event log this old is worth a word, where the process cannot be looked at
_HISTORY_LINES = 40  # plain step lines printed for what happened before the watcher came


def watch(run: Path, stream: TextIO | None = None, once: bool = False) -> int:
    """Show a run from its start and follow it to its end. Ctrl-C leaves; the run goes on.

    Args:
        run: the run's folder (a file inside it will do).
        stream: where to write, standard error by default.
        once: show where it stands and return.

    Returns:
        Exit code: 0, or 1 where the run failed or its process is gone without an end.

    Raises:
        ConfigError: there is no run at ``run``.
        BrokenPipeError: ``stream`` was closed by its reader.
    """
    run_dir = find_run(run)
    console = Console(stream)
    try:
        return _Watcher(run_dir, console, once).follow()
    except KeyboardInterrupt:
        console.close()
        console.say("left; the run is not touched.")
        return EXIT_DONE
    finally:
        console.close()


def find_run(run: Path) -> RunDir:
    """The run at ``run``, or a ConfigError that names the runs there are."""
    folder = run.parent if run.is_file() else run
    if RunDir(folder).is_run():
        return RunDir(folder)
    around = [place for place in (folder, folder.parent, Path("output")) if place.is_dir()]
    known = list(dict.fromkeys(str(found) for place in around for found in _runs_below(place)))
    close = nearest(str(run), known) or nearest(folder.name, [Path(name).name for name in known])
    match = next((name for name in known if name == close or Path(name).name == close), None)
    listed = ", ".join(([match] if match else []) + [name for name in known if name != match][:4])
    what = f"There is no run at `{run}`" + ("" if folder.exists() else " (no such folder)")
    raise ConfigError(
        what,
        allowed=(
            "the `output_dir` of a"
            f" run{f'; runs found: {listed}' if listed else ', which holds its events.jsonl'}"
        ),
        fix=f"`paceline watch {match or (known[0] if known else './output/RUN')}`",
    )


def _runs_below(place: Path) -> list[Path]:
    """Run folders one and two levels below ``place``, the latest first."""
    try:
        folders = [
            path
            for pattern in ("*", "*/*")
            for path in place.glob(pattern)
            if (path / "events.jsonl").is_file()
        ]
        return sorted(folders, key=lambda path: path.stat().st_mtime, reverse=True)[:20]
    except OSError:
        return []


class _Watcher:
    """Feeds a run's events to a console and decides, whenever there is none for a moment, whether
    to go on waiting."""

    def __init__(self, run_dir: RunDir, console: Console, once: bool) -> None:
        self.run_dir, self.console, self.once = run_dir, console, once
        self.exit_code = EXIT_DONE
        # what happened before the watcher came; None once it has been shown
        self._history: list[Event] | None = []
        self._start: RunStartEvent = {}
        self._last: Event | None = None
        self._said_quiet = False

    def follow(self) -> int:
        for event in follow_events(self.run_dir.events, stop=self._over):
            if self._history is not None:
                self._history.append(event)
            else:
                self._show(event)
        return self.exit_code

    def _show(self, event: Event) -> None:
        self._last, self._said_quiet = event, False
        if event["type"] == "run_start":
            self._start = event
        self.console(event)

    def _over(self) -> bool:
        """Called when every event there is has been read: True ends the watch, with
        ``exit_code``."""
        if self._history is not None:
            self._show_history()
        if self.console.broken:  # `paceline watch RUN | head`
            raise BrokenPipeError("nobody reads what is printed")
        if self._last is not None and self._last["type"] == "run_end":
            self.exit_code = EXIT_FAILED if self._last.get("status") == "failed" else EXIT_DONE
            return True
        quiet_s = time.time() - (
            formatting.finite(self._last and self._last.get("time")) or time.time()
        )
        alive = run_alive(self._start)
        if alive is False and (self.once or quiet_s > _QUIET_S):
            self._say_gone(quiet_s)
            return True
        if alive is None and self._start and quiet_s > _SAY_QUIET_S and not self._said_quiet:
            self._said_quiet = True
            self.console.say(
                f"warning: no event for {formatting.duration(quiet_s)}; the run is on host"
                f" {self._start.get('host') or 'unknown'}, so from here it cannot be seen whether"
                " it is alive.",
                "yellow",
            )
        return self.once

    def _show_history(self) -> None:
        history, self._history = self._history or [], None
        if not history:
            waiting = "." if self.once else "; waiting for the first one (Ctrl-C leaves)."
            self.console.say(f"{self.run_dir.root}: no event yet{waiting}")
        for event in _thinned(history, self.console):
            self._show(event)

    def _say_gone(self, quiet_s: float) -> None:
        self.exit_code = EXIT_FAILED
        self.console.close()
        self.console.say(
            f"The run died: its process {self._start.get('pid')} is gone and it wrote no end "
            f"(last event {formatting.duration(quiet_s)} ago).",
            "bold red",
        )
        self.console.say(
            f"To go on: {resume_hint(str(self.run_dir.root), self._start.get('config') or {})}"
        )


def _thinned(history: list[Event], console: Console) -> Iterator[Event]:
    """The events before the watcher came; on a plain stream with at most about ``_HISTORY_LINES``
    of their steps."""
    steps = [index for index, event in enumerate(history) if event["type"] == "step"]
    if console.live or len(steps) <= _HISTORY_LINES:
        yield from history
        return
    every = -(-len(steps) // _HISTORY_LINES)
    kept = {*steps[::every], steps[0], steps[-1]}
    console.say(
        f"of {len(steps):,} past steps about one in {every} is shown; all are in events.jsonl"
    )
    yield from (
        event for index, event in enumerate(history) if event["type"] != "step" or index in kept
    )
