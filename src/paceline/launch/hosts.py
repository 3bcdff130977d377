"""A run on several hosts: each host's launcher joins the board at the head, plans as the others do, and runs its own ranks."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from paceline.config.schema import Config
from paceline.core.errors import EXIT_FAILED, ConfigError, PacelineError
from paceline.engine.carry import Carry
from paceline.engine.checkpoint import read_meta
from paceline.launch.apart import Apart, Elsewhere, RoundOver, sees
from paceline.launch.board import PATIENCE_S, Beats, Board, CutOff, answers
from paceline.launch.depot import manifest_print
from paceline.launch.head import Head, share_file
from paceline.launch.local import Signals, live, stop_code
from paceline.launch.meeting import Meeting
from paceline.launch.preflight import Plan
from paceline.launch.prints import config_values, plan_print, software
from paceline.launch.processes import Place, RankProcesses, open_store
from paceline.launch.recover import Recovery
from paceline.launch.worker import RunRank
from paceline.parallel import Layout
from paceline.world.host import host_name
from paceline.world.mesh import Axes

Say = Callable[[str, str], None]
#: The :class:`~paceline.launch.preflight.Plan` of a life on so many devices of all hosts: (devices, number of the life from 1
#: on, global batch of the life before where there was one, the layout where the head has chosen it, and what the head has
#: found where the run's folder is not here).
PlanFor = Callable[[int, int, int | None, Layout | None, Elsewhere | None], Any]

_TICK_S = 0.1
_SAY_EVERY_S = 15.0


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
        self.apart: Apart | None = None  # where this host does not see the run's folder
        self._store: Any = None
        self._born: str | None = None  # by which one head is known from the next
        self._round = 0  # the last one that this host took part in
        self._concluding = False  # its ranks have ended by themselves: the head says what follows
        self._finished: dict[str, Any] | None = None
        self._report: dict[str, Any] | None = None

    def run(self) -> dict[str, Any]:
        """As :meth:`LocalRun.run <paceline.launch.local.LocalRun.run>`; the report is with the head."""
        try:
            return self._run()
        finally:
            if self.apart is not None:
                self.apart.close()
            if self.head is not None and self.head.depot is not None:
                self.head.depot.close()

    def _run(self) -> dict[str, Any]:
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
                    if self._born is None:
                        text = f"what listens at {self._head()} does not answer as the head of a run: {error}"
                        fix = " To fix: set `parallel.rdzv_endpoint` to another port, the same on every host"
                        return {"status": "failed", "exit_code": 2, "text": text + fix, "traceback": "", "report": None}
                    gone_since = gone_since or time.monotonic()
                    self.say("warning", f"cut off from the head {self._head()} ({error}); this host's ranks are ended, and it "
                             "tries to come back")  # fmt: skip

    def _head(self) -> str:
        return f"{self.meeting.address}:{self.meeting.port}"

    # -- the board ------------------------------------------------------------------------------------------------------------
    def _open_board(self) -> None:
        self._store = open_store(self.meeting.port, self.meeting.address)
        self._store.set("born", json.dumps(uuid.uuid4().hex))
        recovery = Recovery(self.config, None, self.say)
        self.signals.on_haste = recovery.cut
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
                    "check `parallel.rdzv_endpoint`, and that no firewall lies between"
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
        self._begin_anew_with(board)
        was, self.number = self.number, board.count("joins")
        if self.head is not None:
            self.head.own = self.number
        about = {
            "host": host_name(), "address": self.meeting.own, "devices": self.num_devices, "node_rank": self.meeting.node_rank,
            "was": was or None, "prints": {**software(), "device": self.device_type, **config_values(self.config)},
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

    def _begin_anew_with(self, board: Board) -> None:
        """A head that was started again knows nothing of this host's number, and counts its rounds from the first."""
        deadline = time.monotonic() + PATIENCE_S
        while (born := board.get("born")) is None:
            if time.monotonic() > deadline:
                raise CutOff("it does not say which head it is")
            time.sleep(_TICK_S)
        if born != self._born:
            self._born, self.number, self._round = born, 0, 0

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
            found = self._plan(board, beats, number, about)
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
        if found is None:
            return
        plan, carry = found
        self._finished = plan.finished
        board.put(f"{said}/planned", {"finished": True} if plan.finished else {} if self.more else plan_print(plan.job))
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
        job = plan.job
        if not self.more:
            notices = [*job.notices, *(tuple(one) for one in go["notices"])]
            job = replace(job, fault=about["fault"], launcher=os.getpid(), carry=carry, notices=notices)
        if self.apart is not None:
            self.apart.leave_note()
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

    def _plan(self, board: Board, beats: Beats, number: int, about: dict[str, Any]) -> tuple[Any, Carry | None] | None:
        """The plan, and where what goes into checkpoints travels to, if it does. None where the round is over first."""
        given = (about["devices"], number, about["global_batch"])
        if self.more:
            return self.plan_for(*given, None, None), None
        token = self._await(board, beats, number, "share")
        if token is None:
            return None
        shared = self.apart is None and sees(share_file(Path(self.config.output_dir)), str(token))
        board.put(f"said/{number}/{self.number}/shared", shared)
        depot = self._await(board, beats, number, "depot")
        if depot is None:
            return None
        carry = Carry(self.meeting.address, depot["port"], depot["token"]) if depot else None
        if self.meeting.leads:
            plan = self.plan_for(*given, None, None)
            if carry is not None:
                board.put(f"word/{number}/from", self._offer(plan))
            board.put(f"word/{number}/layout", asdict(plan.job.layout))
            return plan, carry
        if not shared:
            self.apart = self.apart or Apart(self.config, self._head(), self.say)
            carry = self.apart.prepare(depot, self.meeting.address)
        word = self._await(board, beats, number, "layout")
        if word is None:  # what `mode: auto` takes depends on a host: the head's is taken by all
            return None
        layout = Layout(word["strategy"], Axes(**word["axes"]), word["num_processes"])
        if self.apart is None or carry is None:
            return self.plan_for(*given, layout, None), carry
        told = board.get(f"word/{number}/from")
        if told["finished"] is not None:
            return Plan(None, None, told["finished"]), None
        try:
            elsewhere = self.apart.take(carry, told, lambda: self._is_over(board, number))
        except RoundOver:
            return None
        if self.apart.fetched is not None:
            board.put(f"said/{number}/{self.number}/fetched", self.apart.fetched)
        return self.plan_for(*given, layout, elsewhere), carry

    def _offer(self, plan: Any) -> dict[str, Any]:
        """What hosts without the run's folder must know of the checkpoint that the run goes on from."""
        told = {"name": None, "step": -1, "manifest": None, "finished": plan.finished}
        if plan.job.resume_from is None or self.head is None or self.head.depot is None:
            return told
        path = Path(plan.job.resume_from)
        self.head.depot.offer(path)
        return {**told, "name": path.name, "step": read_meta(path)["step"], "manifest": manifest_print(path)}

    def _is_over(self, board: Board, number: int) -> bool:
        ended = board.get(f"word/{number}/over") is not None or board.get("end") is not None
        return ended or self.signals.number is not None

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
