"""The watchdog: a thread in each rank that publishes the status of the rank, and reports ranks that
block the others or are slower than the others.

Ranks exchange heartbeats through the store (:mod:`paceline.health.heartbeats`). Each rank evaluates
the heartbeats that it receives: which ranks hang (:mod:`~paceline.health.hangs`) and whether the
ranks have issued different collectives (:mod:`~paceline.health.mismatch`). Rank 0 also reports slow
ranks, pauses and links that lose packets (:mod:`~paceline.health.stragglers`).
"""

import contextlib
import logging
import threading
import time
from pathlib import Path

import torch.distributed as dist

from paceline.config.schema.recovery import RecoveryConfig
from paceline.core.errors import FaultError, MismatchError, PacelineError, first_line
from paceline.core.event_log import EventLog
from paceline.core.events import HealthEvent
from paceline.core.log import ON_EVERY_RANK
from paceline.core.run_dir import RunDir
from paceline.core.stop import StopFlag
from paceline.distributed import torch_compat
from paceline.distributed.communicator import Communicator
from paceline.distributed.timing.progress import PROGRESS, StepTimes
from paceline.health.hangs import Hang, RankStatus, find_hangs
from paceline.health.heartbeats import UNKNOWN_KIND, HeartbeatExchange, HeartbeatFile, PeerState
from paceline.health.mismatch import find_mismatch
from paceline.health.stragglers import (
    LinkMonitor,
    Pause,
    RankBusyTime,
    Straggler,
    StragglerDetector,
)
from paceline.parallel.strategy import Strategy

logger = logging.getLogger(__name__)

_PERIOD_S = 0.4
#: Up to this world size, every rank reads the heartbeats of all ranks. In larger runs, only the
#: first rank of each host does, and heartbeats are sent less often, because the load on the store
#: grows with the number of readers times the number of ranks.
_MAX_READERS = 64
#: If a period was this much longer than requested, this process itself was paused.
_LATE_S = 3.0
#: Phases of a step in which a blocked rank keeps the other ranks waiting.
_STEP_PHASES = frozenset({"data", "forward", "backward", "optimizer", "logging"})
#: How long a rank waits for the calls of the other ranks after its collective has failed.
_CALLS_TIMEOUT_S = 2.0
#: A hang is reported when this many consecutive checks have found it.
_NUM_CHECKS = 2
#: A failure of the store is reported after this many consecutive attempts.
_STORE_FAILURES = 3


class Watchdog:
    """Start it when the process group exists, and close it at the end of the rank. With one rank,
    or with ``recovery.watchdog: false``, it does nothing.

    Args:
        timeout_s: duration of a hang after which the rank ends, unless ``recovery.hang_timeout_s``
            is set.
        folder: folder of the run, to which the records of the flight recorder are written.
    """

    def __init__(
        self,
        settings: RecoveryConfig,
        timeout_s: float,
        world: Communicator,
        stop: StopFlag,
        folder: Path | None = None,
    ) -> None:
        self.settings, self.world, self.stop, self.folder = settings, world, stop, folder
        self.heartbeat_file: HeartbeatFile | None = None
        self.timeout_s = settings.hang_timeout_s or timeout_s
        self.events: EventLog | None = None
        self.hangs: dict[int | None, Hang] = {}  # reported, by rank
        self._num_sightings: dict[int | None, int] = {}  # checks in a row that found a hang
        self._mismatch: str | None = None
        self._num_checks = 0
        self._steps = _StepComparison()
        self._links = LinkMonitor()
        self._pauses: dict[int, Pause] = {}  # the last one of each rank that was reported
        self._ended = threading.Event()
        self._exchange_lock = threading.Lock()
        self._exchange: HeartbeatExchange | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self.settings.watchdog and self.world.size > 1:
            self._exchange = HeartbeatExchange(self.world.rank, self.world.size)
            # Other ranks can only report a rank whose process ID they know, also if it is stopped
            # before the thread runs for the first time.
            self._exchange.publish()
            self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._ended.set()
        if self._thread is None or self._exchange is None:
            return
        self._thread.join(_PERIOD_S)
        self._exchange.ended = True
        if self._exchange_lock.acquire(timeout=_PERIOD_S):
            try:
                # The store, and with it every reader, may have ended.
                with contextlib.suppress(RuntimeError, OSError):
                    self._exchange.publish()
                if self.heartbeat_file is not None:
                    self.heartbeat_file.close()
            finally:
                self._exchange_lock.release()

    def watch(self, strategy: Strategy, events: EventLog) -> None:
        """Start to watch the training. ``events`` is the event log, which rank 0 writes."""
        self.world, self.events = strategy.world, events
        if self.folder is not None and events.path is not None:
            self.heartbeat_file = HeartbeatFile(RunDir(self.folder).heartbeats)
        if self._exchange is not None:
            # Pipeline stages have different amounts of work; all other ranks that train have the
            # same.
            stage = self.world.coordinates.get("pipeline", 0) if strategy.has_data else None
            self._exchange.kind = None if stage is None else f"stage {stage}"

    # -- the thread
    def _run(self) -> None:
        period_s = _PERIOD_S * max(1.0, self.world.size / _MAX_READERS)
        store_failures = 0
        checked_at = waits_since = time.perf_counter()
        while not self._ended.wait(period_s):
            # When the rank becomes active again, the next check counts as late and restarts all
            # clocks.
            if not PROGRESS.active:
                waits_since = time.perf_counter()
                continue
            try:
                with self._exchange_lock:
                    self._note_pause(time.perf_counter() - waits_since - period_s)
                    self._check(is_late=time.perf_counter() - checked_at > period_s + _LATE_S)
                if store_failures >= _STORE_FAILURES:
                    self._log("the rendezvous store responds again; hang detection continues")
                store_failures = 0
            except (RuntimeError, OSError) as error:
                store_failures += 1
                self._on_store_failure(error, store_failures)
            checked_at = waits_since = time.perf_counter()

    def _note_pause(self, late_s: float) -> None:
        """Publish a pause if a wait lasted ``late_s`` longer than requested, because no thread of
        this process ran."""
        is_in_step = PROGRESS.step is not None and PROGRESS.phase in _STEP_PHASES
        if late_s > _LATE_S and is_in_step and self._exchange is not None:
            self._exchange.pause = Pause(PROGRESS.step or 0, late_s)

    def _on_store_failure(self, error: Exception, num_failures: int) -> None:
        assert self._exchange is not None
        if num_failures == _STORE_FAILURES and not self._ended.is_set():
            self._log(
                f"the rendezvous store is not responding ({first_line(error)}); hang detection is"
                " paused"
            )
        with contextlib.suppress(RuntimeError, OSError):  # retried at the next check
            self._exchange.reconnect()

    def _check(self, is_late: bool) -> None:
        assert self._exchange is not None
        self._exchange.publish()
        self._num_checks += 1
        reads = self.world.size <= _MAX_READERS or self.world.env.local_rank == 0
        # Rank 0 evaluates every step; for the other ranks, every second check is enough.
        if not reads or not (is_late or self.world.is_rank_zero or self._num_checks % 2):
            return
        if is_late:
            self._exchange.forgive()
        peers = [peer for peer in self._exchange.read() if peer.rank not in self.world.lost]
        if self.world.is_rank_zero:
            self._report_pauses(peers)
        if is_late:
            return
        if any(peer.died for peer in peers):
            # Gloo ends the process at once if a message has an unexpected size.
            mismatch = find_mismatch(self._exchange.calls(peer.rank for peer in peers))
            if mismatch is not None:
                self.stop.fail(MismatchError(mismatch[1], code="different-collectives"))
        now = time.perf_counter()
        ranks = [peer.status(now) for peer in peers]
        if self.heartbeat_file is not None:
            self.heartbeat_file.write(ranks)
        self._check_hangs(ranks)
        if self.world.is_rank_zero:
            self._report_stragglers(peers)
            self._report_links(peers)

    # -- hangs
    def _check_hangs(self, ranks: list[RankStatus]) -> None:
        after_s = self.settings.hang_warning_s
        hangs = {hang.rank: hang for hang in find_hangs(ranks, after_s)}
        self._num_sightings = {rank: self._num_sightings.get(rank, 0) + 1 for rank in hangs}
        confirmed = {
            rank: hang for rank, hang in hangs.items() if self._num_sightings[rank] >= _NUM_CHECKS
        }
        # Only one rank reports the stack and the end of a hang.
        reporter = min(
            (status.rank for status in ranks if status.rank not in confirmed),
            default=self.world.rank,
        )
        is_reporter = self.world.rank == reporter
        for rank, hang in confirmed.items():
            if rank not in self.hangs and rank != self.world.rank:
                self._report_hang(hang, [status.rank for status in ranks], with_stack=is_reporter)
            self.hangs[rank] = hang
        moved: set[int | None] = {
            status.rank
            for status in ranks
            if max(status.stalled_s, status.since_heartbeat_s) < after_s
        }
        for rank in (self.hangs.keys() - hangs.keys()) & (moved | {None}):
            hang = self.hangs.pop(rank)
            if is_reporter:
                self._report_hang_end(hang)
        self._end_after_timeout(list(confirmed.values()))

    def _report_hang(self, hang: Hang, ranks: list[int], with_stack: bool) -> None:
        assert self._exchange is not None
        details, status = self._exchange.details(ranks), hang.status
        mismatch = find_mismatch(self._exchange.calls(ranks), sites=hang.all_wait)
        self._mismatch = mismatch[1] if mismatch is not None else None
        stack = details[status.rank].stack if status is not None and status.rank in details else []
        lines = [hang.text()]
        if self._mismatch:
            lines.append(self._mismatch)
        if with_stack and stack:
            lines += ["its last known stack:", *(f"  {line}" for line in stack)]
        path = self._dump_flight_recorder()
        if path is not None:
            lines.append(
                f"torch's record of the last collectives of rank {self.world.rank}: {path}"
            )
        self._emit(
            {
                "type": "hang",
                "text": "\n".join(lines),
                "rank": hang.rank,
                "host": status.host if status is not None else None,
                "phase": status.phase if status is not None else None,
                "step": status.step if status is not None else None,
                "since_s": round(hang.since_s, 1),
                "why": hang.why,
                "stack": stack,
                "mismatch": self._mismatch,
            }
        )

    def _report_hang_end(self, hang: Hang) -> None:
        self._mismatch = None
        subject = f"rank {hang.rank} makes" if hang.rank is not None else "the ranks make"
        text = f"{subject} progress again, after about {hang.since_s:.0f} s"
        since_s = round(hang.since_s, 1)
        self._emit({"type": "hang_end", "text": text, "rank": hang.rank, "since_s": since_s})

    def _end_after_timeout(self, hangs: list[Hang]) -> None:
        """End this rank if a hang has lasted too long, unless this rank is the one that hangs."""
        expired = [hang for hang in hangs if hang.since_s > self.timeout_s]
        if not expired or any(hang.rank == self.world.rank and not hang.all_wait for hang in hangs):
            return
        text = "; ".join(hang.text() for hang in expired)
        if self._mismatch:
            text += f". {self._mismatch}"
        blamed = [hang.rank for hang in expired if hang.rank is not None]
        limit = f"the hang lasted longer than {self.timeout_s:.0f} s (`recovery.hang_timeout_s`)"
        self.stop.fail(
            FaultError(
                "{text}. All ranks end, because {limit}",
                code="rank-hangs",
                ranks=blamed,
                text=text,
                limit=limit,
            )
        )

    def _dump_flight_recorder(self) -> Path | None:
        """Write the records of torch's flight recorder, if it is enabled (see
        :func:`paceline.distributed.communicator.init_communicator`). Return the file."""
        record = torch_compat.dump_flight_recorder()
        if b'"profiling_name"' not in record or self.folder is None or not self.folder.is_dir():
            return None
        path = self.folder / f"flight-rank-{self.world.rank}.json"
        try:
            path.write_bytes(record)
        except OSError:
            return None
        return path

    # -- stragglers
    def _report_stragglers(self, peers: list[PeerState]) -> None:
        assert self._exchange is not None
        kinds = {peer.rank: peer.heartbeat.kind for peer in peers}
        if len(peers) + len(self.world.lost) < self.world.size or UNKNOWN_KIND in kinds.values():
            return
        hosts = {peer.rank: peer.heartbeat.host for peer in peers}
        steps = self._exchange.steps(rank for rank, kind in kinds.items() if kind is not None)
        for straggler in self._steps.add(kinds, steps):
            host = hosts[straggler.rank]
            if straggler.is_even:
                self._emit(
                    {
                        "type": "straggler_end",
                        "text": straggler.text(host),
                        "rank": straggler.rank,
                        "host": host,
                        "step": straggler.step,
                    }
                )
                continue
            self._emit(
                {
                    "type": "straggler",
                    "text": straggler.text(host),
                    "rank": straggler.rank,
                    "host": host,
                    "step": straggler.step,
                    "slower_by_s": round(straggler.slower_by_s, 4),
                    "share": {
                        "data_s": round(straggler.share["data_s"], 4),
                        "compute_s": round(straggler.share["compute_s"], 4),
                        "communication_s": round(straggler.share["communication_s"], 4),
                    },
                    "steps": straggler.steps,
                }
            )

    def _report_pauses(self, peers: list[PeerState]) -> None:
        for peer in peers:
            pause, host = peer.heartbeat.pause, peer.heartbeat.host
            if pause is None or pause == self._pauses.get(peer.rank):
                continue
            self._pauses[peer.rank] = pause
            paused_s = round(pause.seconds, 3)
            self._emit(
                {
                    "type": "straggler",
                    "text": pause.text(peer.rank, host),
                    "rank": peer.rank,
                    "host": host,
                    "step": pause.step,
                    "slower_by_s": paused_s,
                    "share": {"data_s": 0.0, "compute_s": paused_s, "communication_s": 0.0},
                    "steps": 1,
                }
            )

    def _report_links(self, peers: list[PeerState]) -> None:
        now_s = time.perf_counter()
        for peer in peers:
            heartbeat = peer.heartbeat
            segments = heartbeat.segments
            link = self._links.add(peer.rank, now_s, segments.sent, segments.resent)
            if link is not None:
                self._emit(
                    {
                        "type": "link_end" if link.has_recovered else "link",
                        "text": link.text(heartbeat.host),
                        "rank": peer.rank,
                        "host": heartbeat.host,
                        "step": heartbeat.step,
                        "resent_share": round(link.share, 5),
                        "segments": link.sent,
                        "seconds": round(link.seconds, 1),
                    }
                )

    # -- failures
    def explain(self, error: BaseException) -> BaseException:
        """Return ``error``, or a more specific error if a collective failed because the ranks
        issued different collectives or because a rank hung. Takes at most two seconds."""
        is_collective_error = isinstance(error, RuntimeError | dist.DistError)
        if self._exchange is None or isinstance(error, PacelineError) or not is_collective_error:
            return error
        from_torch = f"(torch: {first_line(error)})"
        mismatch = self._find_mismatch()
        if mismatch is not None:
            return MismatchError(
                "{mismatch}. {from_torch}",
                code="different-collectives",
                mismatch=mismatch,
                from_torch=from_torch,
            )
        if self.hangs:
            text = "; ".join(hang.text() for hang in self.hangs.values())
            ranks = [rank for rank in self.hangs if rank is not None]
            return FaultError(
                "{text}. {from_torch}",
                code="collective-failed",
                ranks=ranks,
                text=text,
                from_torch=from_torch,
            )
        return error

    def _find_mismatch(self) -> str | None:
        """Compare the last calls of all ranks as they are published."""
        assert self._exchange is not None
        self._exchange.requests_calls = True
        deadline = time.perf_counter() + _CALLS_TIMEOUT_S
        while time.perf_counter() < deadline:
            try:
                with self._exchange_lock:
                    self._exchange.publish()
                    peers = self._exchange.read()
                    calls = self._exchange.calls(peer.rank for peer in peers)
            except (RuntimeError, OSError):  # the store has ended too
                peers, calls = [], self._exchange.calls_on_host()
            mismatch = find_mismatch(calls)
            if mismatch is not None:
                return mismatch[1]
            is_complete = len(peers) == self.world.size and all(
                peer.rank in calls or peer.died or peer.heartbeat.phase == "ended" for peer in peers
            )
            if is_complete or not peers:
                return None
            time.sleep(_PERIOD_S / 3)
        return None

    # -- reports
    def _emit(self, event: HealthEvent) -> None:
        """Emit the event if this rank writes the event log; otherwise print its text."""
        if self.events is not None and self.events.path is not None:
            self.events.emit(event)
        else:
            level = logging.INFO if event["type"] == "hang_end" else logging.WARNING
            self._log(event["text"], level)

    def _log(self, text: str, level: int = logging.INFO) -> None:
        """Log the text with the number of this rank. Every rank prints it."""
        logger.log(level, f"[rank {self.world.rank}] {text}", extra=ON_EVERY_RANK)


class _StepComparison:
    """Passes each step whose times all ranks have published to the detector, once and in order."""

    def __init__(self) -> None:
        self._detector: StragglerDetector | None = None
        self._kinds: dict[int, str | None] = {}
        self._last_step = 0

    def add(
        self, kinds: dict[int, str | None], steps_by_rank: dict[int, list[StepTimes]]
    ) -> list[Straggler]:
        if self._detector is None or kinds != self._kinds:
            self._detector, self._kinds = StragglerDetector(kinds), kinds
            # The duration of the first step is not representative.
            first_steps = [steps[0].step for steps in steps_by_rank.values() if steps]
            self._last_step = min(first_steps, default=0)
        if len(steps_by_rank) < 2:
            return []
        by_step = {
            rank: {times.step: times for times in steps} for rank, steps in steps_by_rank.items()
        }
        common = set.intersection(*({*steps} for steps in by_step.values()))
        stragglers = []
        for step in sorted(step for step in common if step > self._last_step):
            self._last_step = step
            times_by_rank = {rank: steps[step] for rank, steps in by_step.items()}
            if any(times.disturbed for times in times_by_rank.values()):
                continue
            busy = {
                rank: RankBusyTime(
                    max(0.0, times.wall_s - times.wait_s),
                    times.data_s,
                    times.wait_s,
                    times.sched_delay_s,
                )
                for rank, times in times_by_rank.items()
            }
            stragglers += self._detector.add(step, busy)
        return stragglers
