"""A run over several hosts on torch.distributed.elastic: this host's agent."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cluster.elastic_worker import Target, WorkerTask, worker_main
from paceline.cluster.endpoint import Endpoint, EndpointStore, EndpointWatch, check_endpoint
from paceline.cluster.failures import AgentFolder
from paceline.config.schema import Config
from paceline.core.errors import EXIT_FAILED, EXIT_USAGE, Outcome, RunError
from paceline.core.files import Scratch, write_atomic
from paceline.core.log import CONSOLE_ONLY
from paceline.core.processes import hidden_main, pid_alive
from paceline.distributed.environment import scheduled_host
from paceline.launch.local import SignalForwarder, stop_code
from paceline.launch.worker import STOP_FILE, failed_outcome

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig


logger = logging.getLogger(__name__)

RUN_ID = "paceline"
_BACK_OFF_S = (0.5, 1.0, 2.0, 5.0)
#: Hosts that arrive so long after the minimum is reached still take part in the round; later ones
#: cost a checkpoint and a new round. Elastic's default is 30 s.
_LAST_CALL_S = 1
#: An agent that sends no heartbeat for their product is taken out of the rendezvous. Elastic's
#: defaults are 5 s and 3. Every heartbeat rewrites the state that a joining host rewrites too, so
#: that a short interval can delay it on a busy machine.
_KEEP_ALIVE_S, _KEEP_ALIVE_ATTEMPTS = 3, 3
#: The restart policy is Paceline's own (cluster/rounds.py): the agent starts the workers again
#: after every failure.
_MAX_RESTARTS = 100_000
#: For a rank that is asked to end because another one has failed, or because a host has joined and
#: a checkpoint is written.
_SHUTDOWN_S = 30


class HostAgent:
    """This host's part of a run over several hosts.

    Args:
        num_ranks: workers of this host.
        target, payload: what each worker does (see
            :data:`~paceline.cluster.elastic_worker.Target`).
    """

    def __init__(self, config: Config, num_ranks: int, target: Target, payload: Any) -> None:
        self.config, self.num_ranks = config, num_ranks
        self.target, self.payload = target, payload
        self.signals = SignalForwarder(
            lambda: "finishing this step and saving a checkpoint, on all hosts"
        )
        self._store = EndpointStore(config)
        check_endpoint(config.parallel)

    def run(self) -> Outcome:
        """Returns {"status", "exit_code", "report", and for a failure "text", "traceback"}. Leaves
        no process and no file."""
        # After a restart, the survivors' store would never be published again to a host that joins
        # (torch 2.13).
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
        with Scratch() as folder, hidden_main(), self.signals:
            return self._run_until_stopped(folder)

    def _run_until_stopped(self, folder: Path) -> Outcome:
        workers = WorkerProcesses(folder)
        with self.signals.to(workers):
            watching = ExitWatch(AgentFolder(folder))
            try:
                return self._run(folder)
            except StoppedWithoutWorkers:
                assert self.signals.number is not None
                return {
                    "status": "stopped",
                    "exit_code": stop_code(self.signals.number),
                    "report": None,
                }
            finally:
                self._store.close()
                watching.close()
                workers.kill(wait_s=2.0)

    def _run(self, folder: Path) -> Outcome:
        """Enter the rendezvous, and again when its store was lost, until the run ends or nobody
        answers for too long."""
        from torch.distributed import DistError
        from torch.distributed.elastic.rendezvous import RendezvousError

        from paceline.cluster.rendezvous import has_run

        started_at, is_first, attempt, last_error = time.monotonic(), True, 0, ""
        while True:
            limit_s = (
                self.config.parallel.collective_timeout_s
                if is_first
                else self.config.recovery.rejoin_timeout_s
            )
            left_s = started_at + limit_s - time.monotonic()
            if left_s <= 0:
                return self._nobody_came(limit_s, is_first, last_error)
            entered_at = time.monotonic()
            try:
                endpoint = self._store.find(left_s, limit_s)
                if endpoint is None:
                    return self._nobody_came(limit_s, is_first, "it does not answer")
                self._store.check_clock(endpoint)
                entered_at = time.monotonic()
                return self._launch(endpoint, folder, max(1, int(left_s)))
            except RunError as error:  # nothing answers at the endpoint's store yet
                last_error = error.what
            except (RendezvousError, DistError, ConnectionError) as error:
                last_error = str(error).splitlines()[0] if str(error) else type(error).__name__
                if type(error).__name__ == "RendezvousClosedError":
                    text = (
                        f"the run at {endpoint} has ended already: a host cannot join it any more"
                    )
                    return failed_outcome(text)
                if type(error).__name__ == "RendezvousTimeoutError":
                    if has_run(AgentFolder(folder)):
                        return self._nobody_came(
                            self.config.recovery.rejoin_timeout_s, False, last_error
                        )
                else:
                    logger.warning(
                        "the connection to the rendezvous at %s was lost (%s). The ranks of this"
                        " host were ended; this host tries to join again",
                        endpoint,
                        last_error,
                        extra=CONSOLE_ONLY,
                    )
                    if time.monotonic() - entered_at > _KEEP_ALIVE_S * _KEEP_ALIVE_ATTEMPTS:
                        started_at, is_first, attempt = time.monotonic(), False, 0
            time.sleep(_BACK_OFF_S[min(attempt, len(_BACK_OFF_S) - 1)])
            attempt += 1

    def _launch(self, endpoint: Endpoint, folder: Path, join_timeout_s: int) -> Outcome:
        """Run the ranks of this host until the run ends. Enters the rendezvous once."""
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import elastic_launch

        node_rank = self.config.parallel.node_rank
        names = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        task = WorkerTask(
            self.target,
            self.payload,
            str(folder),
            bool(self._store.is_host),
            None if node_rank == "auto" else int(node_rank),
            {name: endpoint.interface for name in names if name not in os.environ},
        )
        launch = self._launch_config(endpoint, folder, join_timeout_s)
        try:
            with EndpointWatch(endpoint):
                outcomes = elastic_launch(launch, worker_main)(task)
        except ChildFailedError as error:
            return failed_outcome(f"the ranks of this host failed: {error}")
        outcome: Outcome = outcomes[min(outcomes)]
        if outcome["status"] == "stopped" and self.signals.number is not None:
            outcome["exit_code"] = stop_code(self.signals.number)
        return outcome

    def _launch_config(self, endpoint: Endpoint, folder: Path, join_timeout_s: int) -> LaunchConfig:
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
        from torch.distributed.launcher.api import LaunchConfig

        from paceline.cluster import rendezvous

        rendezvous.register()
        smallest, largest = self.config.parallel.hosts
        host = f"[{endpoint.address}]" if ":" in endpoint.address else endpoint.address
        return LaunchConfig(
            min_nodes=smallest,
            max_nodes=largest,
            nproc_per_node=self.num_ranks,
            run_id=RUN_ID,
            rdzv_backend=rendezvous.BACKEND,
            rdzv_endpoint=f"{host}:{endpoint.port}",
            rdzv_configs={
                "is_host": bool(self._store.is_host),
                "join_timeout": join_timeout_s,
                "rejoin_timeout": max(1, int(self.config.recovery.rejoin_timeout_s)),
                "agent_folder": str(folder),
                "timeout": join_timeout_s,
                "last_call_timeout": _LAST_CALL_S,
                "keep_alive_interval": _KEEP_ALIVE_S,
                "keep_alive_max_attempt": _KEEP_ALIVE_ATTEMPTS,
            },
            max_restarts=_MAX_RESTARTS,
            monitor_interval=0.1,
            start_method="forkserver",
            local_addr=endpoint.local_address,
            logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs")),
            # This process handles its signals itself: elastic would end the workers without a
            # checkpoint.
            signals_to_handle="SIGUSR2",
            shutdown_timeout=_SHUTDOWN_S,
        )

    def _nobody_came(self, limit_s: float, is_first: bool, problem: str) -> Outcome:
        smallest, largest = self.config.parallel.hosts
        wanted = f"{smallest}" if smallest == largest else f"{smallest} to {largest}"
        where = self.config.parallel.rdzv_endpoint
        text = (
            f"the rendezvous at {where} did not bring {wanted} hosts together within {limit_s:.0f}"
            f" s ({problem}). To fix: start the same command on every host; check"
            " `parallel.rdzv_endpoint`, and that no firewall blocks its port; or lower"
            " `parallel.nnodes`"
        )
        # Hosts that a scheduler starts may be late, which no change of the config would mend: not
        # EXIT_USAGE, after which the job would not be tried again.
        return failed_outcome(
            text, EXIT_USAGE if is_first and scheduled_host() is None else EXIT_FAILED
        )


_EXIT_CODE_AFTER_S = 0.5


class StoppedWithoutWorkers(BaseException):
    """A signal arrived while no rank was running."""


class WorkerProcesses:
    """The workers of this host, to which a signal forwarder passes on what it gets."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def forward(self, number: int) -> None:
        """Ask the ranks to stop; where none runs, leave the rendezvous."""
        write_atomic(self.folder / STOP_FILE, str(number))
        if not self._send(signal.SIGTERM):
            raise StoppedWithoutWorkers

    def kill(self, wait_s: float = 0.0) -> None:
        deadline = time.monotonic() + wait_s
        while self._send(signal.SIGKILL) and time.monotonic() < deadline:
            time.sleep(0.05)

    def _send(self, number: int) -> bool:
        """Whether some rank was there to get it."""
        has_any = False
        for process in multiprocessing.active_children():
            if process.pid is not None and process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)
                    has_any = True
        return has_any


class ExitWatch:
    """Records when each worker ended and with which exit code, for the ranks of the next round. A
    killed rank cannot."""

    def __init__(self, folder: AgentFolder) -> None:
        self.folder = folder
        self._known: dict[int, Any] = {}  # process by pid
        self._gone_at: dict[int, float] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="exit-watch", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(0.05):
            for local_rank, pid in self.folder.pids().items():
                if pid_alive(pid):
                    if pid not in self._known:
                        self._known.update(
                            {child.pid or 0: child for child in multiprocessing.active_children()}
                        )
                    continue
                gone_at = self._gone_at.setdefault(pid, time.time())
                process = self._known.get(pid)
                # Elastic polls its workers in the main thread. The exit code is read from a pipe
                # once, so it is asked for here only after elastic has read it.
                if process is not None and time.time() > gone_at + _EXIT_CODE_AFTER_S:
                    self.folder.write(
                        local_rank, "exit", {"code": process.exitcode, "time": gone_at, "pid": pid}
                    )
                    del self._known[pid]

    def close(self) -> None:
        self._ended.set()
        self._thread.join(1.0)
