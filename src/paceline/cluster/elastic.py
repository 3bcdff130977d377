"""The agent that runs the ranks of one host in a run on several hosts, based on
torch.distributed.elastic."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import threading
import time
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cluster.elastic_worker import ElasticWorkerTask, Target, worker_main
from paceline.cluster.endpoint import Endpoint, EndpointStore, EndpointWatch, check_endpoint
from paceline.cluster.failures import AgentFolder
from paceline.config.schema import Config
from paceline.core.errors import RunError, first_line
from paceline.core.failures import ExitRecord, FailureKind
from paceline.core.files import Scratch, write_atomic
from paceline.core.log import CONSOLE_ONLY
from paceline.core.processes import hidden_main, pid_alive
from paceline.distributed.environment import scheduled_host
from paceline.launch.local import SignalForwarder, stop_code
from paceline.launch.ranks.folder import STOP_FILE

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig


logger = logging.getLogger(__name__)

RUN_ID = "paceline"
_BACK_OFF_S = (0.5, 1.0, 2.0, 5.0)
#: Hosts that join within this time after the minimum number is reached take part in the round.
#: Later hosts cause a checkpoint and a new round. Elastic's default is 30 s.
_LAST_CALL_S = 1
#: An agent that sends no heartbeat for the product of these is removed from the rendezvous.
#: Elastic's defaults are 5 s and 3. Heartbeats and joining hosts write to the same state, so a
#: short interval can delay a join on a busy machine.
_KEEP_ALIVE_S, _KEEP_ALIVE_ATTEMPTS = 3, 3
#: The agent restarts the workers after every failure, because Paceline implements the restart
#: policy itself (cluster/rounds.py).
_MAX_RESTARTS = 100_000
#: Time limit for a rank to exit after another rank failed, or to write a checkpoint and exit after
#: a host joined.
_SHUTDOWN_S = 30


class HostAgent:
    """Runs the ranks of this host in a run on several hosts.

    Args:
        num_ranks: number of workers on this host.
        target: function that each worker calls (see
            :data:`~paceline.cluster.elastic_worker.Target`).
        payload: first argument of ``target``.
    """

    def __init__(self, config: Config, num_ranks: int, target: Target, payload: Any) -> None:
        self.config, self.num_ranks = config, num_ranks
        self.target, self.payload = target, payload
        self.signals = SignalForwarder(
            lambda: "finishing this step and saving a checkpoint, on all hosts"
        )
        self._store = EndpointStore(config)
        check_endpoint(config.parallel)

    def run(self) -> ExitRecord:
        """Run until the run has ended on all hosts. Leaves no processes and no temporary files."""
        # Otherwise the store of the remaining hosts is not published again to a host that joins
        # after a restart (torch 2.13).
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
        with Scratch() as folder, hidden_main(), self.signals:
            return self._run_until_stopped(folder)

    def _run_until_stopped(self, folder: Path) -> ExitRecord:
        workers = WorkerProcesses(folder)
        with self.signals.to(workers):
            watch = ExitWatch(AgentFolder(folder))
            try:
                return self._run(folder)
            except StoppedWithoutWorkers:
                assert self.signals.number is not None
                return ExitRecord("stopped", stop_code(self.signals.number))
            finally:
                self._store.close()
                watch.close()
                workers.kill(wait_s=2.0)

    def _run(self, folder: Path) -> ExitRecord:
        """Join the rendezvous, and join it again whenever its store was lost, until the run ends or
        a time limit is reached."""
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
                return self._timed_out(limit_s, is_first, last_error)
            entered_at = time.monotonic()
            try:
                endpoint = self._store.find(left_s, limit_s)
                if endpoint is None:
                    return self._timed_out(limit_s, is_first, "it does not answer")
                self._store.check_run(endpoint)
                entered_at = time.monotonic()
                return self._launch(endpoint, folder, max(1, int(left_s)))
            except RunError as error:  # the store of the endpoint does not answer yet
                last_error = error.what
            except (RendezvousError, DistError, ConnectionError) as error:
                last_error = first_line(error)
                if type(error).__name__ == "RendezvousClosedError":
                    return ExitRecord.of_run(
                        f"the run at {endpoint} has already ended: hosts can no longer join it"
                    )
                if type(error).__name__ == "RendezvousTimeoutError":
                    # Elastic has closed the rendezvous, so this host cannot enter it again.
                    if has_run(AgentFolder(folder)):
                        limit_s, is_first = self.config.recovery.rejoin_timeout_s, False
                    return self._timed_out(limit_s, is_first, last_error)
                logger.warning(
                    "lost the connection to the rendezvous at %s (%s). The ranks of this host"
                    " were stopped; it tries to join again",
                    endpoint,
                    last_error,
                    extra=CONSOLE_ONLY,
                )
                if time.monotonic() - entered_at > _KEEP_ALIVE_S * _KEEP_ALIVE_ATTEMPTS:
                    started_at, is_first, attempt = time.monotonic(), False, 0
            time.sleep(_BACK_OFF_S[min(attempt, len(_BACK_OFF_S) - 1)])
            attempt += 1

    def _launch(self, endpoint: Endpoint, folder: Path, join_timeout_s: int) -> ExitRecord:
        """Join the rendezvous once, and run the ranks of this host until the run ends."""
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import elastic_launch

        node_rank = self.config.parallel.node_rank
        interfaces = {
            "GLOO_SOCKET_IFNAME": endpoint.interface,
            "TP_SOCKET_IFNAME": endpoint.interface,
            "NCCL_SOCKET_IFNAME": f"={endpoint.interface}",  # without "=" it is a prefix
        }
        task = ElasticWorkerTask(
            self.target,
            self.payload,
            str(folder),
            bool(self._store.is_host),
            None if node_rank == "auto" else int(node_rank),
            {name: value for name, value in interfaces.items() if name not in os.environ},
        )
        launch = self._launch_config(endpoint, folder, join_timeout_s)
        try:
            with EndpointWatch(endpoint):
                records = elastic_launch(launch, worker_main)(task)
        except ChildFailedError as error:
            return ExitRecord.of_run(f"the ranks of this host failed: {error}")
        ended: ExitRecord = records[min(records)]
        if ended.status == "stopped" and self.signals.number is not None:
            return replace(ended, exit_code=stop_code(self.signals.number))
        return ended

    def _launch_config(self, endpoint: Endpoint, folder: Path, join_timeout_s: int) -> LaunchConfig:
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
        from torch.distributed.launcher.api import LaunchConfig

        from paceline.cluster import rendezvous

        rendezvous.register()
        min_hosts, max_hosts = self.config.parallel.hosts
        host = f"[{endpoint.address}]" if ":" in endpoint.address else endpoint.address
        return LaunchConfig(
            min_nodes=min_hosts,
            max_nodes=max_hosts,
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
            # This process handles signals itself, because elastic would kill the workers without a
            # checkpoint.
            signals_to_handle="SIGUSR2",
            shutdown_timeout=_SHUTDOWN_S,
        )

    def _timed_out(self, limit_s: float, is_first: bool, problem: str) -> ExitRecord:
        min_hosts, max_hosts = self.config.parallel.hosts
        count = f"{min_hosts}" if min_hosts == max_hosts else f"{min_hosts} to {max_hosts}"
        # A scheduler may start hosts late, which is not an error in the config. The exit code is
        # then not EXIT_USAGE, which would prevent the job from being retried.
        is_usage = is_first and scheduled_host() is None
        return ExitRecord.of_run(
            f"{count} hosts did not join the rendezvous at"
            f" {self.config.parallel.rdzv_endpoint} within {limit_s:.0f} s ({problem}). To fix:"
            " start the same command on every host; check `parallel.rdzv_endpoint`, and that no"
            " firewall blocks its port; or lower `parallel.nnodes`",
            FailureKind.USAGE if is_usage else FailureKind.UNKNOWN,
        )


#: Delay before reading the exit code of a worker, so that elastic reads it first.
_EXIT_CODE_AFTER_S = 0.5


class StoppedWithoutWorkers(BaseException):
    """Raised if a signal arrives while no rank is running."""


class WorkerProcesses:
    """The workers of this host, with the interface that the signal forwarder requires."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def forward(self, number: int) -> None:
        """Request the ranks to stop, or leave the rendezvous if none is running."""
        write_atomic(self.folder / STOP_FILE, str(number))
        if not self._send(signal.SIGTERM):
            raise StoppedWithoutWorkers

    def kill(self, wait_s: float = 0.0) -> None:
        """Kill all ranks, and wait up to ``wait_s`` seconds for them to end."""
        deadline = time.monotonic() + wait_s
        while self._send(signal.SIGKILL) and time.monotonic() < deadline:
            time.sleep(0.05)

    def _send(self, number: int) -> bool:
        """Send a signal to all ranks. Return whether any rank was running."""
        has_any = False
        for process in multiprocessing.active_children():
            if process.pid is not None and process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)
                    has_any = True
        return has_any


class ExitWatch:
    """Records for the next round when each worker ended and with which exit code, because a rank
    that was killed cannot record this itself."""

    def __init__(self, folder: AgentFolder) -> None:
        self.folder = folder
        self._processes: dict[int, BaseProcess] = {}  # by process ID
        self._ended_at: dict[int, float] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="exit-watch", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(0.05):
            for local_rank, pid in self.folder.pids().items():
                if pid_alive(pid):
                    if pid not in self._processes:
                        self._processes.update(
                            {child.pid or 0: child for child in multiprocessing.active_children()}
                        )
                    continue
                ended_at = self._ended_at.setdefault(pid, time.time())
                process = self._processes.get(pid)
                # The exit code can be read from the pipe only once, and elastic, which polls its
                # workers in the main thread, must read it first.
                if process is not None and time.time() > ended_at + _EXIT_CODE_AFTER_S:
                    self.folder.write(
                        local_rank, "exit", {"code": process.exitcode, "time": ended_at, "pid": pid}
                    )
                    del self._processes[pid]

    def close(self) -> None:
        self._ended.set()
        self._thread.join(1.0)
