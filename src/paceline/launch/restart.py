"""After a fault: whether the ranks are started again, and from where."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.checkpoint import store
from paceline.config.schema import Config
from paceline.core.events import Event, EventLog, tail_events
from paceline.core.formatting import counted
from paceline.core.run_dir import RunDir

Say = Callable[[str, str], None]

_AGAIN = " To go on: give the same command again; it resumes from the newest checkpoint."
_REPEATS = (
    " Repeating the command would fail in the same way: fix the cause first. The newest checkpoint"
    " is kept."
)
_REPEATS_WITHOUT_CHECKPOINT = (
    " Repeating the command would fail in the same way: fix the cause first."
)


class Recovery:
    """Counts the faults of a run and decides what follows each.

    A fault without a new checkpoint since the one before counts against ``recovery.max_restarts``;
    whatever gets on may go on.

    Args:
        resume_from: the checkpoint that the run's first life began from.
        state: of :meth:`state`, where another process has counted the faults so far.
    """

    def __init__(
        self, config: Config, resume_from: str | None, say: Say, state: dict[str, Any] | None = None
    ) -> None:
        self.config = config
        self.run_dir = RunDir(Path(config.output_dir))
        self.say = say
        self._first = resume_from
        self._restarts = 0  # since the newest checkpoint
        self._newest = self._newest_step()
        self._last_text = ""
        self._started = self._begun = time.time()  # the command; the life under way
        if state is not None:
            self._restarts, self._newest, self._last_text = (
                state["restarts"],
                state["newest"],
                state["last_text"],
            )
            self._started, self._begun = state["started"], state["begun"]

    def state(self) -> dict[str, Any]:
        """What the process that judges the next fault needs (JSON)."""
        return {
            "restarts": self._restarts,
            "newest": self._newest,
            "last_text": self._last_text,
            "started": self._started,
            "begun": self._begun,
        }

    def begin(self) -> None:
        """A new life begins without a fault."""
        self._begun = time.time()

    def follow(self, spec: Any, outcome: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The spec of the next life, or None with the outcome as it shall be told."""
        fault, outcome = self.judge(outcome)
        if fault is None:
            return None, outcome
        resume, notices = self.resume_from()
        return replace(spec, resume_from=resume, failure=fault, notices=notices), outcome

    def judge(self, outcome: dict[str, Any]) -> tuple[dict[str, Any] | None, dict[str, Any]]:
        """What is to be told of a fault after which the ranks shall be started again; None where
        they shall not, with the outcome as it shall be told."""
        made = self._last_step()
        newest = self._newest_step()
        if newest != self._newest:
            self._restarts, self._newest, self._last_text = 0, newest, ""
        why_not = self._why_not(outcome, made)
        if why_not is not None:
            told = {**outcome, "text": outcome["text"] + why_not}
            if self._would_repeat(outcome, made):
                told["text"] += _REPEATS if newest is not None else _REPEATS_WITHOUT_CHECKPOINT
            elif outcome.get("fault") is not False:
                told["text"] += _AGAIN
            self._end("failed", told["text"], made)
            return None, told
        self._restarts += 1
        self._last_text = _kind(outcome)
        allowed = self.config.recovery.max_restarts
        back = "the beginning" if newest is None else f"the checkpoint of step {newest}"
        lost = (
            ""
            if made is None
            else f" ({counted(max(0, made - (newest or 0)), 'step')} to be made again)"
        )
        reason = str(outcome.get("reason") or outcome["text"]).rstrip(".")
        self.say(
            "warning",
            f"{reason}. All ranks go back to {back}{lost}; restart {self._restarts} of {allowed}"
            " without a new one",
        )
        self._begun = time.time()
        return {
            "ranks": outcome.get("ranks", []),
            "hosts": outcome.get("hosts", []),
            "reason": reason,
            "step": made,
            "restart": self._restarts,
            "seen_at": time.time(),
        }, outcome

    def _would_repeat(self, outcome: dict[str, Any], made: int | None) -> bool:
        """Whether the same command would end in the same exception of the program."""
        if outcome["exit_code"] == 2:
            return False  # says itself what to change
        if outcome.get("repeats"):
            return True
        return outcome.get("fault") is None and (made is None or _kind(outcome) == self._last_text)

    def _why_not(self, outcome: dict[str, Any], made: int | None) -> str | None:
        """Why the ranks are not started again: a sentence to be added, "" where what happened says
        enough. None: they are."""
        fault, allowed = outcome.get("fault"), self.config.recovery.max_restarts
        if fault is False or outcome["exit_code"] == 2:
            return ""
        if fault is None and made is None:
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

    def resume_from(self) -> tuple[str | None, list[tuple[str, str]]]:
        """The newest whole checkpoint, or that which the first life began from; and what is to be
        said of damaged ones."""
        path, wrong = store.newest_whole(self.run_dir.checkpoints)
        notices = [("warning", f"a checkpoint is passed over: {text}") for text in wrong]
        for level, text in notices:
            self.say(level, text)
        return (self._first if path is None else str(path)), notices

    def _newest_step(self) -> int | None:
        found = store.committed(self.run_dir.checkpoints)
        # by its name: what is in it may be damaged
        return store.step_of(found[-1]) if found else None

    def _last_step(self) -> int | None:
        """The last step that this life has logged."""
        steps = [one["step"] for one in self._events() if one["type"] == "step"]
        return steps[-1] if steps else None

    def _events(self) -> list[Event]:
        return [one for one in tail_events(self.run_dir.events) if one["time"] >= self._begun]

    def cut(self, number: int) -> None:
        """A second signal has ended the ranks at once."""
        name = signal.Signals(number).name
        self._end(
            "stopped", f"a second {name} ended it at once, without a checkpoint", self._last_step()
        )

    def _end(self, status: str, reason: str, made: int | None) -> None:
        """The ranks are gone: their log gets its end from here, where they had begun one and not
        ended it."""
        told = [one for one in tail_events(self.run_dir.events) if one["time"] >= self._started]
        if told and told[-1]["type"] != "run_end":
            log = EventLog(self.run_dir.events)
            log.emit("run_end", status=status, step=made, reason=reason[:2000])
            log.close()
        self.run_dir.heartbeats.unlink(missing_ok=True)


def _kind(outcome: dict[str, Any]) -> str:
    return str(outcome["text"]).partition("\n")[0]
