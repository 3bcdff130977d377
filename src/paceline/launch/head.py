"""The head of a run on several hosts: decides who takes part, when the ranks start, what follows a fault, and how it ends."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.core.errors import EXIT_FAILED, EXIT_USAGE
from paceline.core.run_dir import RunDir
from paceline.core.words import counted
from paceline.launch.apart import fetched_text
from paceline.launch.board import PATIENCE_S, Board, CutOff
from paceline.launch.depot import Depot
from paceline.launch.processes import open_store
from paceline.launch.rounds import Member, Round, first_of, in_order, span

Say = Callable[[str, str], None]

_TICK_S = 0.1
_LAST_CALL_S = 3.0  # after the last host that came, where more may come
_SAY_EVERY_S = 15.0
_ALIVE_S = 1.5  # whoever beats so long after a moment lived then
_PERHAPS = "perhaps"


class Head(threading.Thread):
    """Runs beside the head's own launcher, which is a host like the others.

    Args:
        hosts: the smallest and the largest number of them.
        judge: what follows a fault: (what is told of it, or None; the outcome), as :meth:`Recovery.judge`.
        output_dir: of the run, on this host; None where nothing is written.
    """

    def __init__(
        self,
        board: Board,
        hosts: tuple[int, int],
        *,
        judge: Callable[[dict[str, Any]], tuple[dict[str, Any] | None, dict[str, Any]]],
        output_dir: Path | None,
        wait_s: float,
        rejoin_s: float,
        say: Say,
    ) -> None:
        super().__init__(name="head", daemon=True)
        self.board = board
        self.least, self.most = hosts
        self.judge = judge
        self.output_dir, self.wait_s, self.rejoin_s, self.say = output_dir, wait_s, rejoin_s, say
        self.members: dict[int, Member] = {}
        self.own: int | None = None  # number of the head's own host, by which the others are measured
        self.error: BaseException | None = None
        self._seen = 0  # joins
        self._waiting: list[Member] = []  # whose place another one has, who may be gone
        self._joined_at = self._gathering_since = self._said_at = time.monotonic()
        self._round: Round | None = None
        self._rounds = 0
        self._fault: dict[str, Any] | None = None
        self._batch: int | None = None  # the global batch, once it is planned
        self._ended = False
        self.depot: Depot | None = None  # where some host does not see the run's folder
        self._made: list[Path] = []  # folders, for a run that has not begun

    def run(self) -> None:
        try:
            while not self._ended:
                self.tick()
                time.sleep(_TICK_S)
        except BaseException as error:  # told by the launcher beside it
            self.error = error

    def tick(self) -> None:
        """Hear what is new, and go on with the round."""
        self._hear_joins()
        self._hear_beats()
        if self._round is None:
            self._gather()
        else:
            getattr(self, f"_{self._round.state}")(self._round)

    # -- who is there ---------------------------------------------------------------------------------------------------------
    def _hear_joins(self) -> None:
        while (info := self.board.get(f"join/{self._seen + 1}")) is not None:
            self._seen += 1
            if info.get("was") in self.members:  # the same host, after it was cut off
                self._lose(self.members[info["was"]], "was cut off and has come back")
            self._waiting.append(Member(self._seen, info))
        for member in sorted(self._waiting, key=lambda one: one.number != self.own):
            if member.number != self.own and self.own not in self.members:
                continue
            problem = self._misfit(member)
            if problem == _PERHAPS:
                continue
            self._waiting.remove(member)
            if problem is not None:
                self.say("warning", f"host {member.name} is refused: {problem}")
                self.board.put(f"refused/{member.number}", problem)
                continue
            self.members[member.number] = member
            self._joined_at = time.monotonic()
            if len(self.members) > 1 or self.most > 1:
                self.say("info", f"host {member.name} is there: {len(self.members)} of {self._wanted()}")

    def _misfit(self, member: Member) -> str | None:
        """Why a host cannot take part; :data:`_PERHAPS` where that will be seen. None: it can."""
        first = next(iter(self.members.values()), None)
        if first is None:
            return None
        mine, theirs = first.info["prints"], member.info["prints"]
        differs = [
            f"{name}: {theirs.get(name)!r} there, {mine.get(name)!r} on {first.info['host']}"
            for name in {**mine, **theirs}
            if mine.get(name) != theirs.get(name)
        ]
        if differs:
            return f"it does not fit the others: {'; '.join(differs)}"
        wanted = member.info["node_rank"]
        taken = [one for one in self.members.values() if wanted is not None and one.info["node_rank"] == wanted]
        if len(self.members) >= self.most and not taken:
            taken = list(self.members.values())
        # Whose place it wants may have died a moment ago, and this be the same host, started again.
        if any(one.heard_at < member.heard_at + _ALIVE_S for one in taken):
            return _PERHAPS
        if taken and wanted is not None and taken[0].info["node_rank"] == wanted:
            return f"`parallel.node_rank: {wanted}` is that of {taken[0].name}"
        return f"the run has its {counted(self.most, 'host')} (`parallel.nnodes`)" if taken else None

    def _hear_beats(self) -> None:
        now = time.monotonic()
        for one in list(self.members.values()):
            beat = self.board.count(f"beat/{one.number}", 0)
            if beat != one.beat:
                one.beat, one.heard_at = beat, now
            elif self.board.get(f"left/{one.number}") is not None:
                self._lose(one, "has left")
            elif now - one.heard_at > PATIENCE_S:
                self._lose(one, f"has not been heard of for {PATIENCE_S:.0f} s")

    def _lose(self, member: Member, why: str) -> None:
        self.members.pop(member.number, None)
        round_ = self._round
        self.say("warning", f"host {member.name} {why}")
        if round_ is not None and member in round_.members and round_.state != "closing":
            ranks = round_.ranks_of(member)
            text = f"host {member.name} with rank{'s' if len(ranks) > 1 else ''} {span(ranks)} {why}"
            self._close({"status": "failed", "exit_code": EXIT_FAILED, "text": text + ".", "traceback": "", "fault": True,
                         "ranks": ranks, "hosts": [member.info["host"]], "reason": text, "gone": True})  # fmt: skip

    def _wanted(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least} to {self.most}"

    # -- a round --------------------------------------------------------------------------------------------------------------
    def _gather(self) -> None:
        now, there = time.monotonic(), len(self.members)
        waited = now - self._gathering_since
        if there == self.most or (there >= self.least and now - self._joined_at > _LAST_CALL_S):
            self._begin()
            return
        if there >= self.least:
            return
        patience = self.wait_s if self._rounds == 0 else self.rejoin_s
        missing = self._missing()
        if waited > patience:
            self._end({"status": "failed", "exit_code": EXIT_FAILED if self._rounds else EXIT_USAGE, "traceback": "",
                       "text": f"{counted(there, 'host')} of {self._wanted()} came within {patience:.0f} s; {missing}. To fix: "
                       "start the same command on each host, or lower `parallel.nnodes`"})  # fmt: skip
        elif now - self._said_at > _SAY_EVERY_S:
            self._said_at = now
            self.say("info", f"waiting for {missing} ({waited:.0f} of {patience:.0f} s)")

    def _missing(self) -> str:
        known = {one.info["node_rank"] for one in self.members.values()} - {None}
        count = self.least - len(self.members)
        if len(known) == len(self.members):
            absent = [str(number) for number in range(self.least) if number not in known]
            return f"missing: node{'s' if len(absent) > 1 else ''} {', '.join(absent)}"
        return f"missing: {counted(count, 'host')}; here: {', '.join(one.name for one in self.members.values())}"

    def _begin(self) -> None:
        self._rounds += 1
        members = in_order(list(self.members.values()))
        self._round = Round(self._rounds, members, "planning" if self.output_dir is None else "sharing")
        first, nodes = 0, []
        for one in members:
            nodes.append({"id": one.number, "host": one.info["host"], "first_rank": first, "num_ranks": one.info["devices"]})
            first += one.info["devices"]
        # What ranks stand beside the devices' own (servers) the plan knows; they are the last host's.
        about = {"nodes": nodes, "devices": first, "fault": self._fault, "global_batch": self._batch}
        self.board.put(f"round/{self._rounds}", about)
        if self.output_dir is not None:
            try:
                self.board.put(f"word/{self._rounds}/share", self._leave_token(self.output_dir))
            except OSError as error:
                text = f"`output_dir: {self.output_dir}` cannot be written: {error.strerror or error}. To fix: make room there"
                self._end({"status": "failed", "exit_code": EXIT_FAILED, "text": text, "traceback": ""})
                return
        self.board.put("round", self._rounds)

    def _leave_token(self, output_dir: Path) -> str:
        self._made = [one for one in (output_dir, *output_dir.parents) if not one.exists()] or self._made
        output_dir.mkdir(parents=True, exist_ok=True)
        token = uuid.uuid4().hex
        share_file(output_dir).write_text(token)
        return token

    def _answers(self, round_: Round, what: str) -> dict[int, Any] | None:
        """What each host has said; None while some have not. A host that failed ends the run."""
        found = {}
        for one in round_.members:
            failed = self.board.get(f"said/{round_.number}/{one.number}/failed")
            if failed is not None:
                self._end({**failed, "text": f"on host {one.name}: {failed['text']}"})
                return None
            found[one.number] = self.board.get(f"said/{round_.number}/{one.number}/{what}")
        return None if any(value is None for value in found.values()) else found

    def _planning(self, round_: Round) -> None:
        plans = self._answers(round_, "planned")
        if plans is None:
            return
        first = round_.members[0]
        for one in round_.members[1:]:
            mine, theirs = plans[first.number], plans[one.number]
            differs = [
                f"{name}: {theirs[name]} there, {mine[name]} on {first.name}" for name in mine if mine[name] != theirs.get(name)
            ]
            if differs:
                text = f"host {one.name} would not train the same run: {'; '.join(differs)}"
                text += ". To fix: give every host the same files"
                self._end({"status": "failed", "exit_code": EXIT_USAGE, "text": text, "traceback": ""})
                return
        if plans[first.number].get("finished"):
            self._end({"status": "finished", "exit_code": 0})
            return
        if self.output_dir is not None:
            self._batch = plans[first.number]["global batch"]
        self._go(round_)

    def _sharing(self, round_: Round) -> None:
        """Where a host does not see the run's folder, what its ranks own of a checkpoint comes to the depot."""
        assert self.output_dir is not None
        seen = self._answers(round_, "shared")
        if seen is None:
            return
        share_file(self.output_dir).unlink(missing_ok=True)
        round_.apart = [one for one in round_.members if not seen[one.number]]
        if round_.apart:
            if round_.number == 1:
                names = ", ".join(one.name for one in round_.apart)
                text = f"`output_dir: {self.output_dir}` is not the same folder on {names} as here: the run lies here alone"
                self.say("info", f"{text}, and what goes into a checkpoint there travels to this host")
            self.depot = self.depot or Depot(self.board.address, RunDir(self.output_dir).checkpoints, self.say)
        told = self.depot.begin_life() if self.depot is not None else {}  # what the life before left under way ends
        self.board.put(f"word/{round_.number}/depot", told if round_.apart else {})
        round_.state = "planning"

    def _go(self, round_: Round) -> None:
        round_.store = open_store(0, self.board.address)
        round_.state = "running"
        self._made = []
        notices = [("info", text) for text in self._fetched(round_)]
        for level, text in notices:
            self.say(level, text)
        self.board.put(f"word/{round_.number}/go", {"port": round_.store.port, "notices": notices})

    def _fetched(self, round_: Round) -> list[str]:
        told = [(one, self.board.get(f"said/{round_.number}/{one.number}/fetched")) for one in round_.apart]
        return [f"host {one.name} {fetched_text(what)}" for one, what in told if what is not None]

    def _running(self, round_: Round) -> None:
        ended = {one.number: self.board.get(f"said/{round_.number}/{one.number}/ended") for one in round_.members}
        failed = [value for value in ended.values() if value is not None and value["status"] == "failed"]
        if failed:
            self._close(first_of(failed))
        elif all(value is not None for value in ended.values()):
            first = ended[round_.members[0].number]
            if round_.regroup and first["status"] == "stopped":
                self._next(None)
            else:
                self._end({**first, "report": None})
        elif len(self.members) > len(round_.members) and not round_.regroup:
            round_.regroup = True
            self.say("info", f"{counted(len(self.members), 'host')} now: a checkpoint, and all go on together")
            self.board.put(f"word/{round_.number}/stop", True)

    def _close(self, outcome: dict[str, Any]) -> None:
        assert self._round is not None
        if self._round.state in ("sharing", "planning"):
            self._next(None)  # nothing ran
            return
        self._round.state, self._round.reason = "closing", outcome
        self.board.put(f"word/{self._round.number}/over", True)

    def _closing(self, round_: Round) -> None:
        """Until the ranks of all hosts that are left have ended."""
        assert round_.reason is not None
        ended = {one.number: self.board.get(f"said/{round_.number}/{one.number}/ended") for one in round_.members}
        if any(value is None for number, value in ended.items() if number in self.members):
            return
        failed = [value for value in ended.values() if value is not None and value["status"] == "failed"]
        outcome = first_of([round_.reason, *failed])
        fault, outcome = self.judge(outcome)
        if fault is None:
            self._end(outcome)
        else:
            self._next(fault)

    def _next(self, fault: dict[str, Any] | None) -> None:
        if self._round is not None:
            self.board.put(f"word/{self._round.number}/over", True)
        self._round, self._fault = None, fault
        self._gathering_since = self._joined_at = time.monotonic()

    def _end(self, outcome: dict[str, Any]) -> None:
        if self.output_dir is not None:
            share_file(self.output_dir).unlink(missing_ok=True)
            for folder in self._made:  # nothing was begun in them
                with contextlib.suppress(OSError):
                    folder.rmdir()
        self.board.put("end", outcome)
        self._ended = True

    def stop(self, code: int) -> None:
        """Before the ranks run: the person who started the head wants no run."""
        self._end({"status": "stopped", "exit_code": code, "report": None})

    def wait_until_heard(self) -> None:
        """The store ends with this process: give the other hosts time to read how it ended."""
        deadline = time.monotonic() + PATIENCE_S / 2
        try:
            while time.monotonic() < deadline:
                if all(self.board.get(f"left/{one.number}") is not None for one in self.members.values()):
                    return
                time.sleep(_TICK_S)
        except CutOff:
            return


def share_file(output_dir: Path) -> Path:
    """By which hosts find out whether they see the same folder."""
    return output_dir / ".hosts"
