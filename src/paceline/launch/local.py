"""The ranks of this host, under torch's elastic agent: started together, watched, ended together."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from paceline.core.errors import EXIT_FAILED, EXIT_SIGINT, EXIT_SIGTERM
from paceline.core.files import write_atomic
from paceline.launch.worker import STOP_FILE, RunRank, outcome_file, pid_file, worker_main

# How long the other ranks may take to end by themselves after one has failed.
_GRACE_S = 4.0


class LocalRun:
    """Runs a job on ``num_ranks`` ranks of this host and says what became of them."""

    def __init__(self, job: Any, num_ranks: int, run_rank: RunRank | None = None) -> None:
        """``run_rank``: what a rank does with the job; default: the training of a :class:`~paceline.engine.session.Job`."""
        self.job = job
        self.more = () if run_rank is None else (run_rank,)
        self.num_ranks = num_ranks
        self.folder = Path(tempfile.mkdtemp(prefix="paceline-"))
        self.on_stop = "finishing this step and saving a checkpoint"  # what a person is told then
        self.signal: int | None = None
        self.agent_error: BaseException | None = None
        self._failed_at: float | None = None
        self._gone: list[int] = []  # without a word, when the first failure was seen
        self._expendable = self._find_expendable()
        self._processes: Any = None  # of ranks of which some may end before the others
        self._told: dict[int, dict[str, Any]] = {}  # rank that the others go on without → pid, reason

    def run(self) -> dict[str, Any]:
        """Returns {"status", "exit_code", "report", and for a failure "text", "traceback"}. Leaves no process and no file."""
        before = self._catch_signals()
        main = _hide_main()
        thread = threading.Thread(target=self._run_agent, name="elastic-agent", daemon=True)
        thread.start()
        try:
            while thread.is_alive():
                thread.join(0.1)
                self._end_stuck_ranks()
            return self._outcome()
        finally:
            self._kill_ranks()
            for number, handler in before.items():
                signal.signal(number, handler)
            vars(sys.modules["__main__"]).update(main)
            shutil.rmtree(self.folder, ignore_errors=True)

    def _run_agent(self) -> None:
        # Elastic's start method "forkserver" draws on the server that preload.start_fork_server has warmed up.
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):  # _outcome tells it
            logging.getLogger(name).setLevel(logging.CRITICAL)
        os.environ.setdefault("TORCH_MP_PARALLEL_START", "1")
        if self._expendable:
            self._run_processes()
            return
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=self.num_ranks,
            run_id=self.folder.name,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",  # any free port
            max_restarts=0,
            monitor_interval=0.1,
            start_method="forkserver",
            logs_specs=DefaultLogsSpecs(log_dir=str(self.folder / "logs")),
        )
        try:
            elastic_launch(config, worker_main)(self.job, str(self.folder), *self.more)
        except BaseException as error:  # told by _outcome, from what the ranks left behind
            self.agent_error = error

    def _run_processes(self) -> None:
        from paceline.launch.processes import RankProcesses

        try:
            self._processes = RankProcesses(self.num_ranks)
            self._processes.run(self.job, self.folder, *self.more)
        except BaseException as error:  # told by _outcome
            self.agent_error = error

    # -- signals ------------------------------------------------------------------------------------------------------
    def _catch_signals(self) -> dict[int, Any]:
        if threading.current_thread() is not threading.main_thread():
            return {}
        numbers = [signal.SIGINT, signal.SIGTERM] + ([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])
        return {number: signal.signal(number, self._on_signal) for number in numbers}

    def _on_signal(self, number: int, _frame: Any) -> None:
        if self.signal is not None:
            if number == getattr(signal, "SIGHUP", None):
                return  # a closed terminal sends it twice, by the kernel and by the shell; nobody asks for haste
            self._kill_ranks()
            os._exit(_stop_code(self.signal))
        self.signal = number
        write_atomic(self.folder / STOP_FILE, str(number))
        name = signal.Signals(number).name
        with contextlib.suppress(OSError):
            print(f"\n{name}: {self.on_stop}; once more ends at once", file=sys.stderr, flush=True)
        for pid in self._pids().values():
            _send(pid, signal.SIGTERM)

    # -- ranks --------------------------------------------------------------------------------------------------------
    def _pids(self) -> dict[int, int]:
        found = {}
        for rank in range(self.num_ranks):
            with contextlib.suppress(OSError, ValueError):
                found[rank] = int(pid_file(self.folder, rank).read_text())
        return found

    def _outcomes(self) -> dict[int, dict[str, Any]]:
        found = {}
        for rank in range(self.num_ranks):
            with contextlib.suppress(OSError, ValueError):
                found[rank] = json.loads(outcome_file(self.folder, rank).read_text())
        return found

    def _lost(self) -> list[int]:
        """Ranks whose process is gone without a word."""
        ended = [rank for rank, pid in self._pids().items() if not _alive(pid)]
        outcomes = self._outcomes()  # read now: a rank leaves its word before it ends
        return [rank for rank in ended if rank not in outcomes]

    def _end_stuck_ranks(self) -> None:
        # A rank may wait for a dead one inside a collective that never ends; elastic would give it half a minute.
        if self._failed_at is None:
            lost, outcomes = self._lost(), self._outcomes()
            ended = {*lost, *(rank for rank, one in outcomes.items() if one["status"] == "failed")} - self._told.keys()
            if ended and not self._do_without(sorted(ended), outcomes):
                self._failed_at = time.monotonic()
                self._gone = [rank for rank in lost if rank not in self._told]
        elif time.monotonic() - self._failed_at > _GRACE_S:
            self._kill_ranks()

    def _find_expendable(self) -> frozenset[int]:
        """Ranks that may end without ending the run."""
        layout = getattr(self.job, "layout", None)
        if layout is None:
            return frozenset()
        from paceline.parallel import strategy_class

        return strategy_class(layout.strategy).expendable(self.job.config, layout.axes)

    def _do_without(self, ended: list[int], outcomes: dict[int, dict[str, Any]]) -> bool:
        """Tell the other ranks to go on without these. False where they cannot."""
        gone = {*ended, *self._told}
        may = gone <= self._expendable and gone != self._expendable and self._processes is not None and self._processes.can_lose
        if not may:
            return False
        pids = self._pids()
        for rank in ended:
            said = outcomes.get(rank)
            failed = None if said is None else said["text"].split(" To fix:")[0].rstrip(".")
            reason = self._processes.how_it_ended(rank) if failed is None else f"failed: {failed}"
            self._told[rank] = {"pid": pids[rank], "reason": reason}
        self._processes.tell(self._told)
        return True

    def _kill_ranks(self) -> None:
        for pid in self._pids().values():
            if _alive(pid):
                _send(pid, signal.SIGKILL)

    def _role(self, rank: int) -> str:
        """What a rank was, where ranks differ: ``, a server of the tables``."""
        layout = getattr(self.job, "layout", None)
        if layout is None:
            return ""
        from paceline.parallel import strategy_class

        role = strategy_class(layout.strategy).role(self.job.config, layout.axes, rank)
        return f", {role}" if role else ""

    def _outcome(self) -> dict[str, Any]:
        # Where the end was seen coming: who was gone then, not those that were ended after them.
        lost = self._gone if self._failed_at is not None else [rank for rank in self._lost() if rank not in self._told]
        every = self._outcomes()
        outcomes = {rank: one for rank, one in every.items() if rank not in self._told}
        failures = sorted((one for one in outcomes.values() if one["status"] == "failed"), key=lambda one: one["time"])
        if lost:
            return self._failed_by(lost)
        if failures:
            first = failures[0]
            said = first["text"] if first["exit_code"] == 2 else f"rank {first['rank']} failed. {first['text']}"
            return {**first, "text": said + self._lost_earlier(), "report": None}
        if len(outcomes) + len(self._told) < self.num_ranks:
            if self.signal is not None:
                return {"status": "stopped", "exit_code": _stop_code(self.signal), "report": None}
            text = f"the ranks could not be started: {self.agent_error}"
            return {"status": "failed", "exit_code": EXIT_FAILED, "text": text, "traceback": "", "report": None}
        first = next((one for _, one in sorted(outcomes.items()) if one["report"] is not None), outcomes[min(outcomes)])
        if first["status"] == "stopped" and self.signal is not None:
            first["exit_code"] = _stop_code(self.signal)
        return first

    def _failed_by(self, lost: list[int]) -> dict[str, Any]:
        """The outcome of a run that ended because these ranks were gone without a word."""
        pids = self._pids()
        names = ", ".join(f"rank {rank}{self._role(rank)} (process {pids[rank]})" for rank in lost)
        text = (
            f"{names} was killed or crashed without a word (often: out of memory; see `dmesg`). The other ranks were "
            "stopped. To go on: give the same command again; it resumes from the newest checkpoint."
        )
        text += self._lost_earlier()
        return {"status": "failed", "exit_code": EXIT_FAILED, "text": text, "traceback": "", "report": None}

    def _lost_earlier(self) -> str:
        """The ranks that the run had gone on without, for a person."""
        told = [f"rank {rank}{self._role(rank)} (process {one['pid']}), {one['reason']}" for rank, one in self._told.items()]
        return f" Lost earlier: {'; '.join(told)}." if told else ""


def _hide_main() -> dict[str, Any]:
    """Keep multiprocessing from running the caller's script again in every rank: a script that calls paceline.train() needs no
    ``if __name__ == "__main__"``. Returns what to put back into ``__main__`` afterwards."""
    names = vars(sys.modules["__main__"])
    kept = {name: names[name] for name in ("__file__", "__spec__") if name in names}
    names.pop("__file__", None)
    names["__spec__"] = None
    return kept


def _stop_code(number: int) -> int:
    return EXIT_SIGINT if number == signal.SIGINT else EXIT_SIGTERM


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
