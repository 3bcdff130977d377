"""The state of a run for the list, from the two ends of its event log and from what is appended to
it."""

import os
import time
from collections import deque
from typing import Any, TypedDict, cast

from paceline.core.event_log import CommandTimes, command_start, throughput
from paceline.core.events import EvalEvent, Event, RunEndEvent, RunStartEvent, StepEvent
from paceline.core.formatting import clean, finite
from paceline.core.processes import process_alive, run_alive
from paceline.core.run_dir import RunDir, holder_alive
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
from paceline.web.runs.log_lines import is_restart, is_step, parse, parse_without_ranks

_MAX_READ_BYTES = 1 << 20  # of a longer log, the middle is not read
_HEAD_BYTES = 1 << 16
# A run whose process no longer exists may be restarting for this long.
_RESTART_S = 5.0
# A run on another host is reported if its log is this old, because its process cannot be checked.
_OLD_LOG_S = 120.0
_RECENT_STEPS = 30  # used to estimate speed
# The time per step is a mean in which the newest 200 steps or so count most, so that an evaluation
# or a slow step hardly changes the remaining time.
_DECAY_PER_STEP = 0.995
_STEP_KEYS = (
    "time",
    "step",
    "epoch",
    "loss",
    "reward",
    "learning_rate",
    "tokens",
    "samples",
    "step_time_s",
    "fill",
    "sources",
)


class RunFigures(TypedDict):
    """The figures of a run in its log and its report; None if unknown."""

    started_at: float | None
    updated_at: float | None
    step: int | None
    steps: int | None
    epoch: float | None
    epochs: float | None
    loss: float | None
    eval_loss: float | None
    reward: float | None
    eval_reward: float | None
    strategy: str | None
    world_size: int | None
    device: str | None
    model: str | None
    task: str | None
    tokens_per_second: float | None
    mfu: float | None
    wall_s: float | None
    eta_s: float | None
    restarts: int | None


class RunState(RunFigures):
    """``status`` is empty, waiting, live, lost, done, stopped or failed; ``problem``: what is
    wrong."""

    status: str
    problem: str | None


class MeanStepTime:
    """The mean time per step, evaluations and checkpoints included. Older steps count less."""

    def __init__(self) -> None:
        self._total_s = self._weight = 0.0
        self._last: tuple[int, float] | None = None

    def add(self, event: StepEvent) -> None:
        """Take note of the next logged step."""
        step, time_s = _integer(event.get("step")), finite(event.get("time"))
        if step is None or time_s is None:
            return
        if self._last is not None and step > self._last[0] and time_s >= self._last[1]:
            count = step - self._last[0]
            decay = _DECAY_PER_STEP**count
            share = (1 - decay) / count
            self._total_s = self._total_s * decay + share * (time_s - self._last[1])
            self._weight = self._weight * decay + share * count
        self._last = step, time_s

    @property
    def mean_s(self) -> float | None:
        """The seconds per step; None before the second step."""
        return self._total_s / self._weight if self._weight else None


class RunSummary:
    """Computes the state of one run. :meth:`refresh` reads what is new, and nothing if the files
    have the same size and time as before.

    Attributes:
        position: the byte up to which the log was read.
        is_complete: every line was read, not only the ends of the log.
        start: the newest ``run_start``; empty if there is none.
        commands: when the commands that worked on the run were given.
        report: the content of report.json.
    """

    def __init__(self, run_dir: RunDir) -> None:
        self.run_dir = run_dir
        self._key: tuple[int, ...] | None = None
        self._report_key: tuple[int, int] | None = None
        self._figures: RunFigures | None = None
        self.report: JSONObject | None = None
        self._reset()

    def _reset(self) -> None:
        self.position = 0
        self.is_complete = True
        self.start: RunStartEvent = {}
        self.end: RunEndEvent | None = None
        self.eval: EvalEvent | None = None
        self.num_starts = 0
        self.num_restarts = 0
        self.commands = CommandTimes()
        self.updated_at: float | None = None
        self.resumed_at: int | None = None
        #: The newest steps since the last start, with :data:`_STEP_KEYS` only.
        self.steps: deque[StepEvent] = deque(maxlen=_RECENT_STEPS)
        self._step_time = MeanStepTime()

    def refresh(self) -> None:
        self._read_report()
        status = stat_inside(self.run_dir.events)
        key = None if status is None else (status.st_ino, status.st_size, status.st_mtime_ns)
        if key == self._key:
            return
        was_read = status is not None and self._key is not None and status.st_ino == self._key[0]
        if status is None or not was_read or status.st_size < self.position:
            self._reset()
        self._key, self._figures = key, None
        handle = open_inside(self.run_dir.events) if status is not None else None
        if handle is not None and status is not None:
            with handle:
                self._read(handle.fileno(), status.st_size)

    def _read(self, file: int, size: int) -> None:
        if size - self.position > _MAX_READ_BYTES:
            if self.position == 0:
                self._add_lines(os.pread(file, _HEAD_BYTES, 0))
            self.is_complete = False
            self.end = None  # more events follow it
            self.steps.clear()
            self._step_time = MeanStepTime()
            self.position = size - _MAX_READ_BYTES
            tail = os.pread(file, _MAX_READ_BYTES, self.position)
            skipped = tail.find(b"\n") + 1
            self.position += skipped + self._add_lines(tail[skipped:])
        else:
            self.position += self._add_lines(os.pread(file, size - self.position, self.position))

    def _add_lines(self, block: bytes) -> int:
        """Take the complete lines of a block. Return their size in bytes."""
        size = block.rfind(b"\n") + 1
        # Steps are parsed at the end, because only the newest ones are needed.
        steps: deque[bytes] = deque(maxlen=_RECENT_STEPS)
        for line in block[:size].split(b"\n")[:-1]:
            if is_step(line):
                steps.append(line)
            elif line and (event := parse(line)) is not None:
                if event["type"] in ("run_start", "resume"):
                    if steps and (last := parse_without_ranks(steps[-1])) is not None:
                        self.updated_at = finite(last.get("time")) or self.updated_at
                    steps.clear()
                    self.steps.clear()
                    self._step_time = MeanStepTime()
                self._add_event(event)
        for line in steps:
            event = parse_without_ranks(line)
            if event is not None:
                step = {key: value for key, value in event.items() if key in _STEP_KEYS}
                self.steps.append(cast(StepEvent, step))
                self._step_time.add(self.newest)
        times = (self.updated_at, finite(self.newest.get("time")))
        self.updated_at = max((time for time in times if time is not None), default=None)
        return size

    def _add_event(self, event: Event) -> None:
        ended_at = self.updated_at  # of what came before, if this is the start of another command
        self.updated_at = finite(event.get("time")) or ended_at
        if event["type"] == "run_start":
            self.num_starts += 1
            self.num_restarts += is_restart(self.start, event)
            self.commands.add(event, ended_at)
            self.eval = self.eval if event.get("resumed_from_step") else None
            self.start, self.end, self.resumed_at = event, None, event.get("resumed_from_step")
        elif event["type"] == "resume":
            self.resumed_at = event.get("step")
        elif event["type"] == "eval":
            self.eval = event
        elif event["type"] == "run_end":
            self.end = event

    def _read_report(self) -> None:
        status = stat_inside(self.run_dir.report)
        key = None if status is None else (status.st_size, status.st_mtime_ns)
        if key != self._report_key:
            self._report_key, self._figures = key, None
            self.report = json_inside(self.run_dir.report) if key is not None else None

    # -- what is derived from it
    def state(self) -> RunState:
        """Return the state of the run as of the last :meth:`refresh`."""
        status, problem = self._status()
        if self._figures is None:
            self._figures = self._read_figures()
        state: RunState = {"status": status, **self._figures, "problem": problem}
        steps, step = state["steps"], state["step"]
        step_s = self._step_time.mean_s or finite(self.newest.get("step_time_s"))
        if status == "live" and steps and step and step_s:
            state["eta_s"] = max(0, steps - step) * step_s
        return state

    def _read_figures(self) -> RunFigures:
        start, derived = self.start, as_object(self.start.get("derived"))
        config, model = as_object(start.get("config")), as_object(start.get("model"))
        newest, report = self.newest, (self.report or {}) if self.end is not None else {}
        step = _integer(newest.get("step"))
        tokens_per_second = self._measure_speed()
        started_at = command_start(self.commands.first or {})
        eval_loss = self.eval.get("loss") if self.eval else report.get("final_eval_loss")
        restarts = _integer(report.get("restarts"))
        if self.is_complete:
            restarts = self.num_restarts if self.num_starts else None
        return {
            "started_at": started_at,
            "updated_at": self.updated_at,
            "step": _integer(self.resumed_at) if step is None else step,
            "steps": _integer(derived.get("steps")),
            "epoch": finite(newest.get("epoch")),
            "epochs": finite(derived.get("epochs")),
            "loss": finite(newest.get("loss")),
            "eval_loss": finite(eval_loss),
            "reward": finite(newest.get("reward")),
            "eval_reward": finite(as_object((self.eval or {}).get("metrics")).get("reward")),
            "strategy": as_text(start.get("strategy")),
            "world_size": _integer(start.get("world_size")),
            "device": as_text(start.get("device")),
            "model": as_text(model.get("name") or config.get("model")),
            "task": as_text(config.get("task")),
            "tokens_per_second": finite(report.get("tokens_per_second")) or tokens_per_second,
            "mfu": finite(report.get("mfu") or newest.get("mfu")),
            "wall_s": self._wall_s(),
            "eta_s": None,
            "restarts": restarts,
        }

    def _wall_s(self) -> float | None:
        """Return how long all commands took, as report.html does."""
        latest_s = finite((self.end or {}).get("wall_s"))
        started_at, updated_at = self.commands.started_at, self.updated_at
        if latest_s is None and started_at is not None and updated_at is not None:
            latest_s = max(0.0, updated_at - started_at)
        return None if latest_s is None else self.commands.earlier_s + latest_s

    @property
    def newest(self) -> StepEvent:
        return self.steps[-1] if self.steps else {}

    def _measure_speed(self) -> float | None:
        """Return the tokens per second within steps, over the newest steps."""
        with_tokens = [step for step in list(self.steps)[-10:] if step.get("tokens") is not None]
        rates = [rate for step in with_tokens if (rate := throughput(step)[0]) is not None]
        return sum(rates) / len(rates) if rates else None

    def _status(self) -> tuple[str, str | None]:
        if not self.start and not self.steps:
            return self._status_before_events()
        if self.end is None:
            return self._status_without_end()
        if self._is_starting_again():
            return "waiting", None
        status = self.end.get("status")
        if status == "done":
            return status, None
        reason = clean(self.end["reason"])[:2000] if self.end.get("reason") else None
        return "stopped" if status == "stopped" else "failed", reason

    def _status_before_events(self) -> tuple[str, str | None]:
        is_started = self._is_launcher_alive()
        if is_started or holder_alive(self.run_dir):
            return "waiting", None
        if is_started is False and self._read_panel_start().get("is_stopping") is True:
            return "stopped", "the run was stopped before its first event"
        if is_started is False:
            output = tail_inside(self.run_dir.root / OUTPUT, 1 << 13) or b""
            last_line = output.decode("utf-8", errors="replace").strip().rpartition("\n")[2]
            return "failed", clean(last_line)[:2000] or "the run ended before its first event"
        return "empty", "no events, and no process is running"

    def _is_starting_again(self) -> bool:
        """Return whether a process is resuming a run that has ended."""
        ended_at = finite((self.end or {}).get("time")) or 0.0
        lock = stat_inside(self.run_dir.lock)
        if lock is not None and lock.st_mtime > ended_at and holder_alive(self.run_dir):
            return True
        start = stat_inside(self.run_dir.root / START)
        return start is not None and start.st_mtime > ended_at and bool(self._is_launcher_alive())

    def _read_panel_start(self) -> JSONObject:
        return json_inside(self.run_dir.root / START) or {}

    def _is_launcher_alive(self) -> bool | None:
        """Return whether the process that the panel started exists; None if the run was not started
        from a panel, or on another host."""
        started = self._read_panel_start()
        return process_alive(started.get("pid"), started.get("host"), started.get("time"))

    def _status_without_end(self) -> tuple[str, str | None]:
        since_event_s = time.time() - (self.updated_at or time.time())
        is_alive = run_alive(self.start)
        # The newest `run_start` may be in the part of the log that was not read.
        if is_alive is not True and not self.is_complete:
            is_held = holder_alive(self.run_dir)
            is_alive = is_alive if is_held is None else is_held
        if is_alive is False and since_event_s > _RESTART_S:
            return "lost", f"process {self.start.get('pid')} ended without a final event"
        if is_alive is None and since_event_s > _OLD_LOG_S:
            host = clean(self.start.get("host") or "unknown")
            text = f"no events for over {_OLD_LOG_S / 60:.0f} minutes; the process on host {host}"
            return "live", f"{text} cannot be checked from this host"
        loss = self.newest.get("loss")
        if loss is not None and finite(loss) is None:
            return "live", f"the loss of step {self.newest.get('step')} is {clean(loss)[:20]}"
        return "live", None


def _integer(value: Any) -> int | None:
    figure = finite(value)
    return None if figure is None or abs(figure) > 1 << 53 else int(figure)
