"""A run on several hosts: each host's launcher joins the board at the head, plans as the others do, and runs its own ranks."""

from __future__ import annotations

import hashlib
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from paceline.config.schema import Config
from paceline.core.errors import EXIT_FAILED, ConfigError, PacelineError
from paceline.launch.board import Beats, Board, CutOff, answers
from paceline.launch.head import Head, share_file
from paceline.launch.local import Signals, live, stop_code
from paceline.launch.meeting import Meeting
from paceline.launch.processes import Place, RankProcesses, open_store
from paceline.launch.recover import Recovery
from paceline.launch.worker import RunRank
from paceline.parallel import Layout
from paceline.world.host import host_name
from paceline.world.mesh import Axes

Say = Callable[[str, str], None]
#: The :class:`~paceline.launch.preflight.Plan` of a life on so many devices of all hosts: (devices, number of the life from 1
#: on, global batch of the life before where there was one, the layout where the head has chosen it).
PlanFor = Callable[[int, int, int | None, Layout | None], Any]

_TICK_S = 0.1
_SAY_EVERY_S = 15.0
_SEEN_WITHIN_S = 10.0  # a file that another host has written


class HostsRun:
    """This host's part of a run. As :class:`~paceline.launch.local.LocalRun`, on several hosts."""

    def __init__(
        self,
        config: Config,
        meeting: Meeting,
        num_devices: int,
        device_type: str,
        plan_for: PlanFor,
        say: Say,
        run_rank: RunRank | None = None,
    ) -> None:
        """``run_rank``: what a rank does with the job, where that is no training: it writes nothing and has one life."""
        self.config, self.meeting, self.say = config, meeting, say
        self.num_devices, self.device_type = num_devices, device_type
        self.plan_for = plan_for
        self.more = () if run_rank is None else (run_rank,)
        self.signals = Signals(lambda: "finishing this step and saving a checkpoint, on all hosts")
        self.number = 0  # on the board
        self.head: Head | None = None
        self._store: Any = None
        self._round = 0  # the last one that this host took part in
        self._concluding = False  # its ranks have ended by themselves: the head says what follows
        self._finished: dict[str, Any] | None = None
        self._report: dict[str, Any] | None = None

    def run(self) -> dict[str, Any]:
        """As :meth:`LocalRun.run <paceline.launch.local.LocalRun.run>`; the report is with the head."""
        with self.signals:
            if self.meeting.leads:
                self._open_board()
            gone_since: float | None = None
            while True:
                try:
                    board = self._reach(gone_since)
                    if isinstance(board, dict):
                        return board
                    gone_since = None  # a later cut has its own time to come back
                    return self._attend(board)
                except CutOff as error:
                    if self.number == 0:
                        text = f"what listens at {self._head()} does not answer as the head of a run: {error}"
                        fix = " To fix: set `parallel.head` to another port, the same on every host"
                        return {"status": "failed", "exit_code": 2, "text": text + fix, "traceback": "", "report": None}
                    gone_since = gone_since or time.monotonic()
                    self.say("warning", f"cut off from the head {self._head()} ({error}); this host's ranks are ended, and it "
                             "tries to come back")  # fmt: skip

    def _head(self) -> str:
        return f"{self.meeting.address}:{self.meeting.port}"

    # -- the board ------------------------------------------------------------------------------------------------------------
    def _open_board(self) -> None:
        self._store = open_store(self.meeting.port, self.meeting.address)
        recovery = Recovery(self.config, None, self.say)
        parallel = self.config.parallel
        self.head = Head(
            Board(self.meeting.address, self.meeting.port),
            parallel.hosts,
            judge=(lambda outcome: (None, outcome)) if self.more else recovery.judge,
            output_dir=None if self.more else Path(self.config.output_dir),
            wait_s=parallel.timeout_s,
            rejoin_s=self.config.recovery.rejoin_s,
            say=self.say,
        )
        self.head.start()

    def _reach(self, gone_since: float | None) -> Board | dict[str, Any]:
        """The board, when the head answers; or how it ends where it does not."""
        begun = said_at = time.monotonic()
        patience = self.config.parallel.timeout_s if gone_since is None else self.config.recovery.rejoin_s
        while not answers(self.meeting.address, self.meeting.port, within_s=2.0):
            now = time.monotonic()
            if self.signals.number is not None:
                return {"status": "stopped", "exit_code": stop_code(self.signals.number), "report": None}
            if now - (gone_since or begun) > patience:
                text = (
                    f"the head {self._head()} does not answer ({patience:.0f} s long). To fix: start the same command there; "
                    "check `parallel.head`, and that no firewall lies between"
                )
                code = EXIT_FAILED if gone_since else ConfigError.exit_code
                return {"status": "failed", "exit_code": code, "text": text, "traceback": "", "report": None}
            if now - said_at > _SAY_EVERY_S:
                said_at = now
                self.say("info", f"waiting for the head {self._head()} ({now - (gone_since or begun):.0f} of {patience:.0f} s)")
            time.sleep(0.3)
        return Board(self.meeting.address, self.meeting.port)

    def _attend(self, board: Board) -> dict[str, Any]:
        """Take part until the head says how it ended."""
        was, self.number = self.number, board.count("joins")
        if self.head is not None:
            self.head.own = self.number
        about = {
            "host": host_name(), "address": self.meeting.own, "devices": self.num_devices, "node_rank": self.meeting.node_rank,
            "was": was or None, "prints": {**_software(), "device": self.device_type, **config_values(self.config)},
        }  # fmt: skip
        beats = Beats(self.meeting.address, self.meeting.port, self.number)
        beats.start()
        board.put(f"join/{self.number}", about)
        try:
            while True:
                outcome = self._hear_end(board)
                if outcome is not None:
                    return outcome
                number = board.get("round") or 0
                if number > self._round and board.get(f"word/{number}/over") is None:
                    self._round = number
                    self._take_part(board, beats, number)
                self._pause(board, beats)
        finally:
            beats.end()
            board.close()

    def _hear_end(self, board: Board) -> dict[str, Any] | None:
        refused = board.get(f"refused/{self.number}")
        if refused is not None:
            text = f"this host is refused by the head {self._head()}: {refused}"
            return {"status": "failed", "exit_code": ConfigError.exit_code, "text": text, "traceback": "", "report": None}
        end: dict[str, Any] | None = board.get("end")
        if end is None:
            return None
        board.put(f"left/{self.number}", True)
        if self.head is not None:
            self.head.wait_until_heard()
        if end["status"] == "finished":
            return {"status": "finished", "exit_code": 0, "report": self._finished}
        if end["status"] == "stopped" and self.signals.number is not None:
            end["exit_code"] = stop_code(self.signals.number)
        return {**end, "report": self._report}

    def _pause(self, board: Board, beats: Beats) -> None:
        if self.head is not None and self.head.error is not None:
            raise self.head.error
        if not beats.heard:
            raise CutOff("no answer")
        if self.signals.number is not None and not self._concluding:  # no rank runs
            if self.head is not None:
                self.head.stop(stop_code(self.signals.number))
            else:
                board.put("end", {"status": "stopped", "exit_code": stop_code(self.signals.number), "report": None})
        time.sleep(_TICK_S)

    # -- a round --------------------------------------------------------------------------------------------------------------
    def _take_part(self, board: Board, beats: Beats, number: int) -> None:
        about = board.get(f"round/{number}")
        self._concluding = False
        mine = next((one for one in about["nodes"] if one["id"] == self.number), None)
        if mine is None:
            return
        said = f"said/{number}/{self.number}"
        try:
            layout = None  # what `mode: auto` takes depends on a host: the head's is taken by all
            if not self.meeting.leads and not self.more:
                word = self._await(board, beats, number, "layout")
                if word is None:
                    return
                layout = Layout(word["strategy"], Axes(**word["axes"]), word["num_processes"])
            plan = self.plan_for(about["devices"], number, about["global_batch"], layout)
            if self.meeting.leads and not self.more:
                board.put(f"word/{number}/layout", asdict(plan.job.layout))
        except PacelineError as error:
            told = {
                "status": "failed",
                "exit_code": error.exit_code,
                "text": error.paragraph(),
                "traceback": "",
                "fault": False,
            }
            board.put(f"{said}/failed", told)
            return
        self._finished = plan.finished
        board.put(f"{said}/planned", {"finished": True} if plan.finished else {} if self.more else plan_print(plan.job))
        if not self.more:
            token = self._await(board, beats, number, "share")
            if token is None:
                return
            board.put(f"{said}/shared", self._sees(str(token)))
        go = self._await(board, beats, number, "go")
        if go is None:
            return
        first, count = mine["first_rank"], mine["num_ranks"]
        world_size = about["devices"] if self.more else plan.job.layout.num_processes
        if mine is about["nodes"][-1]:
            count += world_size - about["devices"]  # ranks that only serve
        place = Place(first, count, world_size, self.meeting.address, go["port"], self._environment())
        ranks = f"ranks {first} to {first + count - 1}" if count > 1 else f"rank {first}"
        self.say("info", f"host {host_name()} ({self.meeting.own} on {self.meeting.interface}): {ranks} of {place.world_size}")
        job = plan.job if self.more else replace(plan.job, fault=about["fault"], launcher=os.getpid())
        outcome = self._run_ranks(board, beats, number, job, place)
        self._report = outcome.pop("report", None)
        self._concluding = outcome["status"] != "failed"
        board.put(f"{said}/ended", {**outcome, "hosts": [host_name()] if outcome["status"] == "failed" else []})

    def _await(self, board: Board, beats: Beats, number: int, what: str) -> Any:
        """The head's word; None where the round, or the run, is over first."""
        while True:
            word = board.get(f"word/{number}/{what}")
            if word is not None:
                return word
            if board.get(f"word/{number}/over") is not None or board.get("end") is not None:
                return None
            self._pause(board, beats)

    def _sees(self, token: str) -> bool:
        deadline = time.monotonic() + _SEEN_WITHIN_S
        while True:
            try:
                if share_file(Path(self.config.output_dir)).read_text() == token:
                    return True
            except OSError:
                pass
            if time.monotonic() > deadline:
                return False
            time.sleep(0.2)

    def _run_ranks(self, board: Board, beats: Beats, number: int, job: Any, place: Place) -> dict[str, Any]:
        stopping = False

        def tick() -> None:
            nonlocal stopping
            if not beats.heard:
                raise CutOff("no answer")
            if board.get(f"word/{number}/over") is not None or board.get("end") is not None:
                ranks.kill()
            elif not stopping and board.get(f"word/{number}/stop") is not None:
                stopping = True
                ranks.pass_on(15)

        with RankProcesses(job, place, *self.more) as ranks:
            return live(ranks, job, self.signals, tick)

    def _environment(self) -> tuple[tuple[str, str], ...]:
        names = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        return tuple((name, self.meeting.interface) for name in names if name not in os.environ)


def config_values(config: Config) -> dict[str, Any]:
    """What must be the same on every host: the config by dotted key, without what is a host's own."""
    found: dict[str, Any] = {}
    for name, value in config.model_dump(mode="json").items():
        found.update({f"{name}.{key}": one for key, one in value.items()} if isinstance(value, dict) else {name: value})
    for name in ("node_rank", "interface", "num_gpus"):
        del found[f"parallel.{name}"]
    return found


def plan_print(job: Any) -> dict[str, Any]:
    """What must come out the same on every host when it has read the data and the checkpoints."""
    step = None if job.resume_from is None else Path(job.resume_from).name
    return {
        "data": job.prepared.fingerprint,
        "resumes from": step,
        "steps": job.derived.steps,
        "global batch": job.derived.global_batch_size,
        "strategy": job.layout.strategy,
        "ranks": job.layout.num_processes,
    }


def _software() -> dict[str, str]:
    import torch

    import paceline

    return {
        "paceline": paceline.__version__,
        "code": _code_print(),
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch.__version__,
    }


def _code_print() -> str:
    """A digest of this package's source."""
    found = hashlib.sha256()
    root = Path(__file__).resolve().parents[1]
    for path in sorted(root.rglob("*.py")):
        found.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:16]
