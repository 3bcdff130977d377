"""Send the figures of a run to a tracker from a thread of its own, so that a slow or failing
tracker never delays or ends the training."""

import contextlib
import json
import logging
import queue
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from paceline.core.errors import first_line
from paceline.core.events import Event, RunStartEvent
from paceline.core.files import write_json_atomic
from paceline.core.formatting import finite
from paceline.core.report import Report
from paceline.core.run_dir import RunDir
from paceline.core.texts import UserText
from paceline.distributed.timing.progress import PROGRESS
from paceline.observe.loggers.base import TrackedRun, Tracker
from paceline.observe.loggers.scalars import eval_scalars, report_scalars, step_scalars

logger = logging.getLogger(__name__)

#: Records that may wait for the tracker; later ones are dropped until there is room.
_MAX_PENDING = 2000
#: How long the end of a run waits for a tracker, and how long a failed run does.
_FINISH_S, _FAILED_RUN_FINISH_S = 30.0, 5.0


class _Record(NamedTuple):
    scalars: Mapping[str, float]
    step: int
    time_s: float


class MetricLogger:
    """A listener of the event log that passes figures on to a tracker.

    Args:
        name: name of the tracker in ``report_to``.
        start: function that imports the client and starts the run at the tracker.
    """

    def __init__(self, name: str, start: Callable[[TrackedRun], Tracker], run_dir: RunDir) -> None:
        self.name = name
        self.num_dropped = 0
        self.error: Exception | None = None
        self._start = start
        self._ids_file = run_dir.trackers
        self._folder = run_dir.root
        self._queue: queue.Queue[_Record] = queue.Queue(_MAX_PENDING)
        self._ending = threading.Event()
        self._has_failed = False
        self._has_reported = False
        self._batch_size: float | None = None
        self._step = 0
        self._thread: threading.Thread | None = None

    def __call__(self, event: Event) -> None:
        """Take an event. Never blocks, and never raises."""
        if event["type"] == "run_start" and self._thread is None:
            self._batch_size = (event.get("derived") or {}).get("global_batch_size")
            run = self._tracked_run(event)
            self._thread = threading.Thread(
                target=self._work, args=[run], name=f"report-to-{self.name}", daemon=True
            )
            self._thread.start()
        elif event["type"] == "step":
            self._put(step_scalars(event, self._batch_size), event["step"], event.get("time"))
        elif event["type"] == "eval":
            self._put(eval_scalars(event), event["step"], event.get("time"))
        if self.error is not None:
            self._report_problems()

    def _tracked_run(self, start: RunStartEvent) -> TrackedRun:
        config = start.get("config") or {}
        args = config.get("train_args")
        names = args if isinstance(args, dict) else {}
        stored_id = _read_ids(self._ids_file).get(self.name)
        return TrackedRun(
            id=stored_id or uuid.uuid4().hex,
            is_new=stored_id is None,
            name=str(names.get("run_name") or self._folder.name or "run"),
            project=_text(names.get("project")),
            space_id=_text(names.get("trackio_space_id")),
            folder=self._folder,
            config=config,
            resumed_from=start.get("resumed_from_step"),
        )

    def _put(self, scalars: Mapping[str, float], step: int, time_s: float | None) -> None:
        self._step = step
        if self.error is not None or self._thread is None:
            return
        try:
            self._queue.put_nowait(_Record(scalars, step, finite(time_s) or time.time()))
        except queue.Full:
            self.num_dropped += 1

    # -- in the thread
    def _work(self, run: TrackedRun) -> None:
        try:
            # Some clients print on standard output, which is reserved for the result.
            with contextlib.redirect_stdout(sys.stderr):
                tracker = self._start(run)
                if run.is_new and tracker.id:
                    _write_id(self._ids_file, self.name, tracker.id)
                while not (self._ending.is_set() and self._queue.empty()):
                    with contextlib.suppress(queue.Empty):
                        record = self._queue.get(timeout=0.2)
                        tracker.log(record.scalars, record.step, record.time_s)
                tracker.finish(self._has_failed)
        except Exception as error:
            self.error = error

    # -- at the end of the run
    def finish(self, report: Report) -> None:
        """Log the figures of the report, wait for the tracker, and log what went wrong."""
        self._put(report_scalars(report), self._step, None)
        self._end(_FINISH_S)
        self._report_problems()

    def close(self) -> None:
        """End the run at the tracker, as failed unless :meth:`finish` was called."""
        if not self._ending.is_set():
            self._has_failed = True
            self._end(_FAILED_RUN_FINISH_S)

    def _end(self, timeout_s: float) -> None:
        self._ending.set()
        deadline = time.monotonic() + timeout_s
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(0.2)
            PROGRESS.tick()
            if time.monotonic() > deadline:
                self.num_dropped += self._queue.qsize()
                self.error = self.error or TimeoutError(f"did not finish within {timeout_s:.0f} s")
                return

    def _report_problems(self) -> None:
        if self._has_reported:
            return
        if self.error is not None:
            self._has_reported = True
            logger.warning(
                UserText(
                    "`report_to`: {name} failed ({reason}); it receives no more figures, and"
                    " training is not affected",
                    code="tracker-failed",
                    name=self.name,
                    reason=first_line(self.error),
                )
            )
        if self.num_dropped and (self.error is not None or self._ending.is_set()):
            self._has_reported = True
            logger.warning(
                UserText(
                    "`report_to`: {name} was too slow, and {num_dropped:record} were dropped;"
                    " events.jsonl has all",
                    code="tracker-too-slow",
                    name=self.name,
                    num_dropped=self.num_dropped,
                )
            )


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _read_ids(file: Path) -> dict[str, str]:
    """Return the identifiers of the run at each tracker."""
    try:
        stored = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return {str(name): str(value) for name, value in stored.items()}


_IDS_LOCK = threading.Lock()


def _write_id(file: Path, name: str, value: str) -> None:
    with _IDS_LOCK:  # the trackers of a run start at the same time
        write_json_atomic(file, {**_read_ids(file), name: value})
