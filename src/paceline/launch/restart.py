"""Decide after a fault whether to restart the ranks, and from which checkpoint."""

import logging
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import TypedDict

from paceline.checkpoint import store
from paceline.checkpoint.format import step_of
from paceline.config.chosen import values_of
from paceline.config.schema import Config
from paceline.core.event_log import EventLog, tail_events
from paceline.core.events import Fault, MemoryFallbackEvent, RunEndEvent
from paceline.core.failures import ExitRecord, FailureKind
from paceline.core.formatting import counted
from paceline.core.log import CONSOLE_ONLY, recorded_notices
from paceline.core.run_dir import RunDir
from paceline.core.texts import UserText
from paceline.launch.passes.memory import with_less_memory
from paceline.planner.search.trials import Settings, settings_text
from paceline.train.run_spec import RunSpec

logger = logging.getLogger(__name__)

#: Number of times that the ranks restart with smaller memory settings.
_MAX_MEMORY_FALLBACKS = 5
_RESUME = " To resume: run the same command again; it continues from the latest checkpoint."
_WOULD_REPEAT = " Repeating the command would fail in the same way: fix the cause first."


class PolicyState(TypedDict):
    """The state of a restart policy, as JSON. Times are in seconds since the epoch.

    Args:
        restarts: number of restarts since the latest checkpoint.
        latest_step: step of the latest checkpoint.
        last_text: first line of the last failure.
        memory_fallbacks: number of times that memory settings were made smaller.
        started: start time of the command.
        attempt_started: start time of this attempt.
    """

    restarts: int
    latest_step: int | None
    last_text: str
    memory_fallbacks: int
    started: float
    attempt_started: float


class RestartPolicy:
    """Counts the faults of a run and decides whether each is followed by a restart.

    Only faults without a new checkpoint since the previous one count against
    ``recovery.max_restarts``, so a run that makes progress is always restarted.

    Args:
        resume_from: path of the checkpoint from which the first attempt of the run started.
        state: state of the policy in the process that has counted the faults so far, or None.
    """

    def __init__(
        self, config: Config, resume_from: str | None, state: PolicyState | None = None
    ) -> None:
        self.config = config
        self.run_dir = RunDir(Path(config.output_dir))
        self._resume_from = resume_from
        now = time.time()
        self.state: PolicyState = state or {
            "restarts": 0,
            "latest_step": self._latest_step(),
            "last_text": "",
            "memory_fallbacks": 0,
            "started": now,
            "attempt_started": now,
        }

    def begin_attempt(self) -> None:
        """Record that a new attempt starts that no fault has caused."""
        self.state["attempt_started"] = time.time()

    def follow(self, spec: RunSpec, failed: ExitRecord) -> tuple[RunSpec | None, ExitRecord]:
        """Return the spec of the next attempt, or None and the record to report."""
        smaller = None
        if self.may_fall_back(failed):
            smaller = with_less_memory(spec, failed.phase)
        if smaller is None:
            fault, failed = self.evaluate(failed)
            fallback = None
        else:
            fault = self.fault_of(failed)
            fallback = self.fall_back(failed, spec.config, smaller[1])
            spec = smaller[0]
        if fault is None:
            return None, failed
        with recorded_notices() as recorder:
            path, problems = store.latest_valid(self.run_dir.checkpoints)
            for text in problems:
                logger.warning(
                    UserText("skipping a checkpoint: {text}", code="checkpoint-skipped", text=text)
                )
        resume_from = self._resume_from if path is None else str(path)
        notices = list(recorder.notices)
        spec = replace(spec, resume_from=resume_from, failure=fault, memory_fallback=fallback)
        return replace(spec, notices=notices), failed

    def may_fall_back(self, failed: ExitRecord) -> bool:
        """Return whether a rank ran out of memory and smaller memory settings may be tried."""
        is_allowed = self.state["memory_fallbacks"] < _MAX_MEMORY_FALLBACKS
        return failed.cause.kind is FailureKind.MEMORY and is_allowed

    def fall_back(
        self, failed: ExitRecord, config: Config, settings: Settings
    ) -> MemoryFallbackEvent:
        """Return the event about smaller memory settings, with which the ranks restart. They do not
        count as a restart.

        Args:
            config: the config of the attempt that ran out of memory.
            settings: the changed settings.
        """
        event: MemoryFallbackEvent = {
            "type": "memory_fallback",
            "step": self._last_step(),
            "ranks": list(failed.cause.ranks),
            "phase": failed.phase,
            "before": {**values_of(config, tuple(settings))},
            "settings": {**settings},
        }
        # The event log contains this in its `memory_fallback` event.
        logger.warning(
            f"{failed.cause.reason}. Restarting all ranks from {self._source()} with"
            f" {settings_text(settings)}; the global batch stays the same",
            extra=CONSOLE_ONLY,
        )
        self.state["memory_fallbacks"] += 1
        self.begin_attempt()
        return event

    def _source(self) -> str:
        latest_step = self._latest_step()
        return "the beginning" if latest_step is None else f"the checkpoint of step {latest_step}"

    def fault_of(self, failed: ExitRecord) -> Fault:
        """Return the fault of an attempt that is followed by another one."""
        failure = failed.cause
        return {
            "ranks": list(failure.ranks),
            "hosts": list(failure.hosts),
            "reason": failure.reason,
            "code": failure.code,
            "values": failure.values,
            "step": self._last_step(),
            "restart": self.state["restarts"],
            "seen_at": time.time(),
        }

    def evaluate(self, failed: ExitRecord) -> tuple[Fault | None, ExitRecord]:
        """Return the fault after which the ranks are restarted, or None and the record to
        report."""
        state, last_step, latest_step = self.state, self._last_step(), self._latest_step()
        if latest_step != state["latest_step"]:
            state["restarts"], state["latest_step"], state["last_text"] = 0, latest_step, ""
        refusal = self._refusal(failed, last_step)
        if refusal is not None:
            text = failed.message + refusal
            if self._would_repeat(failed, last_step):
                text += _WOULD_REPEAT
                if latest_step is not None:
                    text += " The latest checkpoint is kept."
            elif not failed.cause.is_permanent:
                text += _RESUME
            of_failure = UserText.of(text, failed.cause.code, failed.cause.values)
            self._end_log("failed", of_failure, last_step)
            return None, replace(failed, message=text)
        state["restarts"] += 1
        state["last_text"] = _first_line(failed)
        source = self._source()
        if last_step is not None:
            num_steps = max(0, last_step - (latest_step or 0))
            source += f" ({counted(num_steps, 'step')} to repeat)"
        # The event log contains this in its `fault` event.
        logger.warning(
            f"{failed.cause.reason}. Restarting all ranks from {source}; restart"
            f" {state['restarts']} of {self.config.recovery.max_restarts} without a new checkpoint",
            extra=CONSOLE_ONLY,
        )
        fault = self.fault_of(failed)
        self.begin_attempt()
        return fault, failed

    def _would_repeat(self, failed: ExitRecord, last_step: int | None) -> bool:
        """Return whether the same command would fail with the same exception."""
        failure = failed.cause
        if failure.kind is FailureKind.PROGRAM:
            return True
        if failure.kind is FailureKind.MEMORY:
            # A message that goes beyond the failure already says what to change.
            return failed.message == failure.text
        return failure.kind is FailureKind.UNKNOWN and (
            last_step is None or _first_line(failed) == self.state["last_text"]
        )

    def _refusal(self, failed: ExitRecord, last_step: int | None) -> str | None:
        """Return the reason why the ranks are not restarted, as a sentence to append ("" if the
        failure needs no explanation), or None if they are restarted."""
        failure, max_restarts = failed.cause, self.config.recovery.max_restarts
        if failure.is_permanent:
            return ""
        is_unknown = failure.kind is FailureKind.UNKNOWN
        if is_unknown and last_step is None:
            return ""  # a program that fails before its first step would fail again
        if is_unknown and _first_line(failed) == self.state["last_text"]:
            return " It occurred again after a restart, so there is no further retry."
        restarts = self.state["restarts"]
        if restarts < max_restarts:
            return None
        if max_restarts == 0:
            return ""
        return (
            f" {counted(restarts, 'restart')} did not reach a new checkpoint"
            " (`recovery.max_restarts`)."
        )

    def _latest_step(self) -> int | None:
        """Return the step in the name of the latest checkpoint, which may be damaged."""
        checkpoints = store.committed(self.run_dir.checkpoints)
        return step_of(checkpoints[-1].name) if checkpoints else None

    def _last_step(self) -> int | None:
        """Return the last step that this attempt has logged."""
        steps = [
            event["step"]
            for event in tail_events(self.run_dir.events)
            if event["type"] == "step" and event["time"] >= self.state["attempt_started"]
        ]
        return steps[-1] if steps else None

    def end_at_once(self, number: int) -> None:
        """End the event log after a second signal has killed the ranks."""
        name = signal.Signals(number).name
        reason = UserText(
            "a second {signal} killed the ranks, without a checkpoint",
            code="stopped-without-checkpoint",
            signal=name,
        )
        self._end_log("stopped", reason, self._last_step())

    def _end_log(self, status: str, reason: str, last_step: int | None) -> None:
        """End the event log on behalf of the ranks, if they started one and did not end it."""
        events = [
            event
            for event in tail_events(self.run_dir.events)
            if event["time"] >= self.state["started"]
        ]
        if events and events[-1]["type"] != "run_end":
            log = EventLog(self.run_dir.events)
            end: RunEndEvent = {
                "type": "run_end",
                "status": status,
                "step": last_step,
                "reason": reason[:2000],
            }
            if isinstance(reason, UserText):
                end |= {"code": reason.code, "values": reason.values}
            log.emit(end)
            log.close()
        self.run_dir.heartbeats.unlink(missing_ok=True)


def _first_line(failed: ExitRecord) -> str:
    return failed.message.partition("\n")[0]
