"""After a fault: whether the ranks are started again, and from where."""

import logging
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import TypedDict

from paceline.checkpoint import store
from paceline.checkpoint.format import step_of
from paceline.config.schema import Config
from paceline.core.errors import Outcome
from paceline.core.event_log import EventLog, tail_events
from paceline.core.events import Event, Fault
from paceline.core.formatting import counted
from paceline.core.log import CONSOLE_ONLY, recorded_notices
from paceline.core.run_dir import RunDir
from paceline.train.run_spec import RunSpec

logger = logging.getLogger(__name__)

_AGAIN = " To go on: give the same command again; it resumes from the newest checkpoint."
_REPEATS = (
    " Repeating the command would fail in the same way: fix the cause first. The newest checkpoint"
    " is kept."
)
_REPEATS_WITHOUT_CHECKPOINT = (
    " Repeating the command would fail in the same way: fix the cause first."
)


class PolicyState(TypedDict):
    """What the process that judges the next fault needs. Times: seconds since the epoch."""

    restarts: int
    newest: int | None
    last_text: str
    started: float
    begun: float


class RestartPolicy:
    """Counts the faults of a run and decides what follows each.

    A fault without a new checkpoint since the one before counts against ``recovery.max_restarts``;
    whatever gets on may go on.

    Args:
        resume_from: the checkpoint that the run's first attempt began from.
        state: of :meth:`state`, where another process has counted the faults so far.
    """

    def __init__(
        self, config: Config, resume_from: str | None, state: PolicyState | None = None
    ) -> None:
        self.config = config
        self.run_dir = RunDir(Path(config.output_dir))
        self._first = resume_from
        self._restarts = 0  # since the newest checkpoint
        self._newest = self._newest_step()
        self._last_text = ""
        self._started = self._attempt_started = time.time()  # the command; this attempt
        if state is not None:
            self._restarts, self._newest, self._last_text = (
                state["restarts"],
                state["newest"],
                state["last_text"],
            )
            self._started, self._attempt_started = state["started"], state["begun"]

    def state(self) -> PolicyState:
        """What the process that judges the next fault needs (JSON)."""
        return {
            "restarts": self._restarts,
            "newest": self._newest,
            "last_text": self._last_text,
            "started": self._started,
            "begun": self._attempt_started,
        }

    def begin_attempt(self) -> None:
        """A new attempt begins without a fault."""
        self._attempt_started = time.time()

    def follow(self, spec: RunSpec, outcome: Outcome) -> tuple[RunSpec | None, Outcome]:
        """The spec of the next attempt, or None with the outcome as it shall be reported."""
        fault, outcome = self.judge(outcome)
        if fault is None:
            return None, outcome
        with recorded_notices() as recorder:
            resume_from = self._resume_from()
        notices = list(recorder.notices)
        return replace(spec, resume_from=resume_from, failure=fault, notices=notices), outcome

    def judge(self, outcome: Outcome) -> tuple[Fault | None, Outcome]:
        """What is to be told of a fault after which the ranks shall be started again; None where
        they shall not, with the outcome as it shall be told."""
        last_step = self._last_step()
        newest = self._newest_step()
        if newest != self._newest:
            self._restarts, self._newest, self._last_text = 0, newest, ""
        why_not = self._why_not(outcome, last_step)
        if why_not is not None:
            text = outcome["text"] + why_not
            if self._would_repeat(outcome, last_step):
                text += _REPEATS if newest is not None else _REPEATS_WITHOUT_CHECKPOINT
            elif outcome.get("fault") is not False:
                text += _AGAIN
            self._end("failed", text, last_step)
            return None, {**outcome, "text": text}
        self._restarts += 1
        self._last_text = _kind(outcome)
        allowed = self.config.recovery.max_restarts
        back = "the beginning" if newest is None else f"the checkpoint of step {newest}"
        lost = (
            ""
            if last_step is None
            else f" ({counted(max(0, last_step - (newest or 0)), 'step')} to be made again)"
        )
        reason = str(outcome.get("reason") or outcome["text"]).rstrip(".")
        # The `fault` event holds it.
        logger.warning(
            "%s. All ranks go back to %s%s; restart %d of %d without a new one",
            reason,
            back,
            lost,
            self._restarts,
            allowed,
            extra=CONSOLE_ONLY,
        )
        self._attempt_started = time.time()
        return {
            "ranks": outcome.get("ranks", []),
            "hosts": outcome.get("hosts", []),
            "reason": reason,
            "step": last_step,
            "restart": self._restarts,
            "seen_at": time.time(),
        }, outcome

    def _would_repeat(self, outcome: Outcome, last_step: int | None) -> bool:
        """Whether the same command would end in the same exception of the program."""
        if outcome["exit_code"] == 2:
            return False  # says itself what to change
        if outcome.get("repeats"):
            return True
        return outcome.get("fault") is None and (
            last_step is None or _kind(outcome) == self._last_text
        )

    def _why_not(self, outcome: Outcome, last_step: int | None) -> str | None:
        """Why the ranks are not started again: a sentence to be added, "" where what happened says
        enough. None: they are."""
        fault, allowed = outcome.get("fault"), self.config.recovery.max_restarts
        if fault is False or outcome["exit_code"] == 2:
            return ""
        if fault is None and last_step is None:
            return ""  # a program that fails before its first step fails again
        if fault is None and _kind(outcome) == self._last_text:
            return " It occurred again after a restart, so there is no further retry."
        if self._restarts >= allowed:
            return (
                f" {counted(self._restarts, 'restart')} brought no new checkpoint"
                " (`recovery.max_restarts`)."
                if allowed
                else ""
            )
        return None

    def _resume_from(self) -> str | None:
        """The newest whole checkpoint, or that which the first attempt began from."""
        path, damaged = store.latest_valid(self.run_dir.checkpoints)
        for text in damaged:
            logger.warning("a checkpoint is passed over: %s", text)
        return self._first if path is None else str(path)

    def _newest_step(self) -> int | None:
        checkpoints = store.committed(self.run_dir.checkpoints)
        # by its name: what is in it may be damaged
        return step_of(checkpoints[-1].name) if checkpoints else None

    def _last_step(self) -> int | None:
        """The last step that this attempt has logged."""
        steps = [event["step"] for event in self._events() if event["type"] == "step"]
        return steps[-1] if steps else None

    def _events(self) -> list[Event]:
        return [
            event
            for event in tail_events(self.run_dir.events)
            if event["time"] >= self._attempt_started
        ]

    def end_at_once(self, number: int) -> None:
        """A second signal has ended the ranks at once."""
        name = signal.Signals(number).name
        self._end(
            "stopped", f"a second {name} ended it at once, without a checkpoint", self._last_step()
        )

    def _end(self, status: str, reason: str, last_step: int | None) -> None:
        """The ranks are gone: their log gets its end from here, where they had begun one and not
        ended it."""
        events = [
            event for event in tail_events(self.run_dir.events) if event["time"] >= self._started
        ]
        if events and events[-1]["type"] != "run_end":
            log = EventLog(self.run_dir.events)
            log.emit(
                {"type": "run_end", "status": status, "step": last_step, "reason": reason[:2000]}
            )
            log.close()
        self.run_dir.heartbeats.unlink(missing_ok=True)


def _kind(outcome: Outcome) -> str:
    return str(outcome["text"]).partition("\n")[0]
