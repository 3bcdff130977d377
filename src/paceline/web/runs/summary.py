"""Where a run stands, for the list: from the ends of its event log, and from what is added to
it."""

import os
import time
from collections import deque
from typing import Any, TypedDict, cast

from paceline.core.events import EvalEvent, Event, RunEndEvent, RunStartEvent, StepEvent
from paceline.core.formatting import clean, finite, throughput
from paceline.core.processes import holder_alive, process_alive, run_alive
from paceline.core.run_dir import RunDir
from paceline.web.files import (
    JSONObject,
    as_object,
    as_text,
    json_inside,
    open_inside,
    stat_inside,
    tail_inside,
)
from paceline.web.jobs.runs import OUTPUT, START
from paceline.web.runs.log_lines import is_step, parse, parse_without_ranks

_WHOLE_BYTES = 1 << 20  # of a log longer than this the middle is not read
_HEAD_BYTES = 1 << 16
# a process that is gone is declared so after this long without an event: it may be restarting
_QUIET_S = 5.0
_SAY_QUIET_S = 120.0  # a log this old is worth a word, where the process cannot be looked at
_RECENT = 30  # step lines that speed and the time left follow from
_STEP_KEYS = ("time", "step", "loss", "tokens", "samples", "step_time_s")


class RunFigures(TypedDict):
    """What a run's log and report say; None if it is not known."""

    started_at: float | None
    updated_at: float | None
    step: int | None
    steps: int | None
    loss: float | None
    eval_loss: float | None
    strategy: str | None
    world_size: int | None
    device: str | None
    model: str | None
    task: str | None
    tokens_per_second: float | None
    wall_s: float | None
    eta_s: float | None
    restarts: int | None


class RunState(RunFigures):
    """With ``status`` (empty, waiting, live, lost, done, stopped or failed), and what is wrong."""

    status: str
    problem: str | None


class RunSummary:
    """What the list shows of one run. :meth:`refresh` reads what is new; nothing is read where size
    and time are as before."""

    def __init__(self, run_dir: RunDir) -> None:
        self.run_dir = run_dir
        # Looked at again and again:
        self.events, self.report_file, self.lock = run_dir.events, run_dir.report, run_dir.lock
        self.started = run_dir.root / START
        self._key: tuple[int, ...] | None = None
        self._report_key: tuple[int, int] | None = None
        self._figures: RunFigures | None = None
        self._pace: tuple[float | None, float | None] = (None, None)
        self.report: JSONObject | None = None
        self._reset()

    def _reset(self) -> None:
        self.position = 0
        self.whole = True  # every line was read
        self.first_start: RunStartEvent | None = None
        self.start: RunStartEvent = {}
        self.end: RunEndEvent | None = None
        self.eval: EvalEvent | None = None
        self.num_starts = 0
        self.updated_at: float | None = None
        self.resumed_at: int | None = None
        # the newest of this life, what is wanted of them
        self.steps: deque[StepEvent] = deque(maxlen=_RECENT)

    def refresh(self) -> None:
        self._read_report()
        found = stat_inside(self.events)
        key = None if found is None else (found.st_ino, found.st_size, found.st_mtime_ns)
        if key == self._key:
            return
        if (
            found is None
            or self._key is None
            or found.st_ino != self._key[0]
            or found.st_size < self.position
        ):
            self._reset()
        self._key, self._figures = key, None
        handle = open_inside(self.events) if found is not None else None
        if handle is not None:
            with handle:
                self._read(handle.fileno(), found.st_size if found is not None else 0)

    def _read(self, file: int, size: int) -> None:
        if size - self.position > _WHOLE_BYTES:
            if self.position == 0:
                self._feed(os.pread(file, _HEAD_BYTES, 0))
            self.whole = False
            self.end = None  # something came after it
            self.steps.clear()
            self.position = size - _WHOLE_BYTES
            tail = os.pread(file, _WHOLE_BYTES, self.position)
            skipped = tail.find(b"\n") + 1
            self.position += skipped + self._feed(tail[skipped:])
        else:
            self.position += self._feed(os.pread(file, size - self.position, self.position))

    def _feed(self, block: bytes) -> int:
        """Take the whole lines of a block; how many bytes they are."""
        whole = block[: block.rfind(b"\n") + 1]
        steps: deque[bytes] = deque(maxlen=_RECENT)  # not parsed, for most go by
        for line in whole.split(b"\n")[:-1]:
            if is_step(line):
                steps.append(line)
            elif line and (event := parse(line)) is not None:
                if event["type"] in ("run_start", "resume"):  # what was before is of another life
                    steps.clear()
                    self.steps.clear()
                self._take(event)
        for line in steps:
            event = parse_without_ranks(line)
            if event is not None:
                kept = {key: value for key, value in event.items() if key in _STEP_KEYS}
                self.steps.append(cast(StepEvent, kept))
        times = [
            one for one in (self.updated_at, finite(self.newest.get("time"))) if one is not None
        ]
        self.updated_at = max(times, default=None)
        return len(whole)

    def _take(self, event: Event) -> None:
        self.updated_at = finite(event.get("time")) or self.updated_at
        if event["type"] == "run_start":
            self.num_starts += 1
            fresh = not event.get("resumed_from_step")
            self.first_start = event if fresh or self.first_start is None else self.first_start
            self.eval = None if fresh else self.eval
            self.start, self.end, self.resumed_at = event, None, event.get("resumed_from_step")
        elif event["type"] == "resume":
            self.resumed_at = event.get("step")
        elif event["type"] == "eval":
            self.eval = event
        elif event["type"] == "run_end":
            self.end = event

    def _read_report(self) -> None:
        found = stat_inside(self.report_file)
        key = None if found is None else (found.st_size, found.st_mtime_ns)
        if key != self._report_key:
            self._report_key, self._figures = key, None
            self.report = json_inside(self.report_file) if key is not None else None

    # What follows from it.

    def summary(self) -> RunState:
        """As ``GET /api/runs`` gives it, without note and tags. What is not known is None."""
        status, problem = self._status()
        if self._figures is None:
            self._figures = self._read_figures()
        state: RunState = {"status": status, **self._figures, "problem": problem}
        seconds, steps, step = self._pace[0], state["steps"], state["step"]
        if status == "live" and steps and step and seconds:
            state["eta_s"] = max(0, steps - step) * seconds
        return state

    def _read_figures(self) -> RunFigures:
        """What the lines that were read say; the same until there are more."""
        start, derived = self.start, as_object(self.start.get("derived"))
        config, model = as_object(start.get("config")), as_object(start.get("model"))
        newest, report = self.newest, (self.report or {}) if self.end is not None else {}
        step = _whole(newest.get("step"))
        self._pace = self._measure_pace()
        began = finite((self.first_start or {}).get("time"))
        wall_s = finite(report.get("wall_s")) if self.num_starts == 1 else None
        if wall_s is None and began is not None and self.updated_at is not None:
            wall_s = max(0.0, self.updated_at - began)
        return {
            "started_at": began,
            "updated_at": self.updated_at,
            "step": _whole(self.resumed_at) if step is None else step,
            "steps": _whole(derived.get("steps")),
            "loss": finite(newest.get("loss")),
            "eval_loss": (
                finite((self.eval or {}).get("loss"))
                if self.eval
                else finite(report.get("final_eval_loss"))
            ),
            "strategy": as_text(start.get("strategy")),
            "world_size": _whole(start.get("world_size")),
            "device": as_text(start.get("device")),
            "model": as_text(model.get("name") or config.get("model")),
            "task": as_text(config.get("task")),
            "tokens_per_second": finite(report.get("tokens_per_second")) or self._pace[1],
            "wall_s": wall_s,
            "eta_s": None,
            "restarts": self._restarts(report),
        }

    @property
    def newest(self) -> StepEvent:
        return self.steps[-1] if self.steps else {}

    def _measure_pace(self) -> tuple[float | None, float | None]:
        """(seconds a step, evaluations and checkpoints among them; tokens a second in steps), of
        the newest step lines."""
        if not self.steps:
            return None, None
        counted = [one for one in list(self.steps)[-10:] if one.get("tokens") is not None]
        rates = [rate for one in counted if (rate := throughput(one)[0]) is not None]
        per_second = sum(rates) / len(rates) if rates else None
        first, last = self.steps[0], self.steps[-1]
        made = (_whole(last.get("step")) or 0) - (_whole(first.get("step")) or 0)
        times = finite(first.get("time")), finite(last.get("time"))
        if made > 0 and times[0] is not None and times[1] is not None and times[1] > times[0]:
            return (times[1] - times[0]) / made, per_second
        return finite(last.get("step_time_s")), per_second

    def _restarts(self, report: JSONObject) -> int | None:
        if self.whole:
            return max(0, self.num_starts - 1) if self.num_starts else None
        return _whole(report.get("restarts"))

    def _status(self) -> tuple[str, str | None]:
        if not self.start and not self.steps:
            return self._not_begun()
        if self.end is None:
            return self._going()
        if self._starts_again():
            return "waiting", None
        status = self.end.get("status")
        reason = clean(self.end["reason"])[:2000] if self.end.get("reason") else None
        if status == "done":
            return status, None
        return status if status == "stopped" else "failed", reason

    def _not_begun(self) -> tuple[str, str | None]:
        started = self._launcher_alive()
        if started or holder_alive(self.run_dir):
            return "waiting", None
        if started is False:
            output = tail_inside(self.run_dir.root / OUTPUT, 1 << 13) or b""
            last = output.decode("utf-8", errors="replace").strip().rpartition("\n")[2]
            return "failed", clean(last)[:2000] or "it ended before its first event"
        return "empty", "it has written no event, and no process works on it"

    def _starts_again(self) -> bool:
        """Whether a process has taken up a run that has ended."""
        ended_at = finite((self.end or {}).get("time")) or 0.0
        lock = stat_inside(self.lock)
        if lock is not None and lock.st_mtime > ended_at and holder_alive(self.run_dir):
            return True
        told = stat_inside(self.started)
        return told is not None and told.st_mtime > ended_at and bool(self._launcher_alive())

    def _launcher_alive(self) -> bool | None:
        """Whether the process is there that a panel started; None where none did, or on another
        host."""
        told = json_inside(self.started) or {}
        return process_alive(told.get("pid"), told.get("host"), told.get("time"))

    def _going(self) -> tuple[str, str | None]:
        quiet_s = time.time() - (self.updated_at or time.time())
        alive = run_alive(self.start)
        # the newest `run_start` may be one that was not read
        if alive is not True and not self.whole:
            held = holder_alive(self.run_dir)
            alive = alive if held is None else held
        if alive is False and quiet_s > _QUIET_S:
            pid = self.start.get("pid")
            return "lost", f"its process {pid} is gone and it wrote no end"
        if alive is None and quiet_s > _SAY_QUIET_S:
            host = self.start.get("host") or "unknown"
            return (
                "live",
                (
                    f"no event for a long time; it is on host {clean(host)}, so it cannot be seen"
                    " whether it is alive"
                ),
            )
        newest = self.newest
        if newest.get("loss") is not None and finite(newest["loss"]) is None:
            return "live", f"the loss of step {newest.get('step')} is {clean(newest['loss'])[:20]}"
        return "live", None


def _whole(value: Any) -> int | None:
    figure = finite(value)
    return None if figure is None or abs(figure) > 1 << 53 else int(figure)
