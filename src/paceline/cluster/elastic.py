"""A run over several hosts on torch.distributed.elastic: this host's agent, and the entry of its
workers."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from paceline.cluster.clock import ClockServer, check_clock
from paceline.cluster.endpoint import Endpoint, check_endpoint, is_listening, resolve_endpoint
from paceline.cluster.endpoint_watch import EndpointWatch
from paceline.cluster.exposure import public_address_warning, public_listener_warning
from paceline.cluster.failures import AgentFolder
from paceline.cluster.rounds import Membership, join_round
from paceline.config.schema import Config
from paceline.core.errors import EXIT_FAILED, EXIT_USAGE, ConfigError, RunError
from paceline.core.files import Scratch, write_atomic
from paceline.core.processes import hidden_main, host_name, pid_alive
from paceline.core.stop import StopFlag
from paceline.distributed.environment import scheduled_host
from paceline.launch.local import Signals, stop_code
from paceline.launch.worker import STOP_FILE, describe, end_with_launcher

Say = Callable[[str, str], None]
Outcome = dict[str, Any]
#: What a worker does: (payload, its membership in the round, whether to stop) → outcome.
Target = Callable[[Any, Membership, StopFlag], Outcome]

RUN_ID = "paceline"
_SAY_EVERY_S = 15.0
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
_EXIT_CODE_AFTER_S = 0.5
_STORE_WITHIN_S = 20.0
_JOIN_ATTEMPTS = 5


@dataclass(frozen=True)
class Work:
    """What the agent sends to its workers. It must be picklable."""

    target: Target
    payload: Any
    folder: str
    is_endpoint: bool
    node_rank: int | None
    environment: dict[str, str]


class _Stopped(BaseException):
    """A signal arrived while no rank was running."""


class ElasticRun:
    """This host's part of a run over several hosts.

    Args:
        num_ranks: workers of this host.
        target, payload: what each worker does (see :data:`Target`).
    """

    def __init__(
        self, config: Config, num_ranks: int, target: Target, payload: Any, say: Say
    ) -> None:
        self.config, self.num_ranks, self.target, self.payload, self.say = (
            config,
            num_ranks,
            target,
            payload,
            say,
        )
        self.signals = Signals(lambda: "finishing this step and saving a checkpoint, on all hosts")
        self._is_endpoint: bool | None = None
        self._announced: str | None = None
        self._store: Any = None
        self._clock: Any = None
        check_endpoint(config.parallel)

    def run(self) -> Outcome:
        """Returns {"status", "exit_code", "report", and for a failure "text", "traceback"}. Leaves
        no process and no file."""
        # After a restart, the survivors' store would never be published again to a host that joins
        # (torch 2.13).
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
        with Scratch() as folder, hidden_main(), self.signals, self.signals.to(_Workers(folder)):
            watching = _ExitWatch(AgentFolder(folder))
            try:
                return self._run(folder)
            except _Stopped:
                assert self.signals.number is not None
                return {
                    "status": "stopped",
                    "exit_code": stop_code(self.signals.number),
                    "report": None,
                }
            finally:
                if self._clock is not None:
                    self._clock.close()
                watching.close()
                _Workers(folder).kill(wait_s=2.0)

    def _run(self, folder: Path) -> Outcome:
        """Enter the rendezvous, and again when its store was lost, until the run ends or nobody
        answers for too long."""
        from torch.distributed import DistError
        from torch.distributed.elastic.rendezvous import RendezvousError

        from paceline.cluster.rendezvous import has_run

        started_at, is_first, attempt, last_error = time.monotonic(), True, 0, ""
        while True:
            limit_s = self.config.parallel.timeout_s if is_first else self.config.recovery.rejoin_s
            left_s = started_at + limit_s - time.monotonic()
            if left_s <= 0:
                return self._nobody_came(limit_s, is_first, last_error)
            entered_at = time.monotonic()
            try:
                endpoint = self._find_endpoint(left_s, limit_s)
                if endpoint is None:
                    return self._nobody_came(limit_s, is_first, "it does not answer")
                self._check_clock(endpoint)
                entered_at = time.monotonic()
                return self._launch(endpoint, folder, max(1, int(left_s)))
            except RunError as error:  # nothing answers at the endpoint's store yet
                last_error = error.what
            except (RendezvousError, DistError, ConnectionError) as error:
                last_error = str(error).splitlines()[0] if str(error) else type(error).__name__
                if type(error).__name__ == "RendezvousClosedError":
                    return _failed(
                        f"the run at {endpoint} has ended already: a host cannot join it any more",
                        EXIT_FAILED,
                    )
                if type(error).__name__ == "RendezvousTimeoutError":
                    if has_run(AgentFolder(folder)):
                        return self._nobody_came(self.config.recovery.rejoin_s, False, last_error)
                else:
                    self.say("warning", f"the connection to the rendezvous at {endpoint} was lost ({last_error}). The ranks of "
                             "this host were ended; this host tries to join again")  # fmt: skip
                    if time.monotonic() - entered_at > _KEEP_ALIVE_S * _KEEP_ALIVE_ATTEMPTS:
                        started_at, is_first, attempt = time.monotonic(), False, 0
            time.sleep(_BACK_OFF_S[min(attempt, len(_BACK_OFF_S) - 1)])
            attempt += 1

    # -- the endpoint
    # -----------------------------------------------------------------------------------------------------
    def _find_endpoint(self, left_s: float, limit_s: float) -> Endpoint | None:
        """The endpoint once it answers, or once this host serves it; None where that takes too
        long. Its name is resolved anew each time: it may not be known yet, and it may get another
        address."""
        deadline, said_at, problem = time.monotonic() + left_s, time.monotonic(), ""
        while True:
            try:
                endpoint = resolve_endpoint(self.config)
                is_endpoint = self._serves(endpoint)
                self._announce(endpoint, is_endpoint)
                if is_endpoint or is_listening(endpoint.address, endpoint.port, timeout_s=2.0):
                    self._is_endpoint = is_endpoint
                    return endpoint
                problem = "does not answer"
            except OSError as error:
                problem = f"cannot be resolved or reached ({error.strerror or error})"
            now = time.monotonic()
            if now > deadline:
                return None
            if now - said_at > _SAY_EVERY_S:
                said_at = now
                waited_s = limit_s - (deadline - now)
                self.say("info", f"the endpoint {self.config.parallel.rdzv_endpoint} {problem}; waiting for it "
                         f"({waited_s:.0f} of {limit_s:.0f} s)")  # fmt: skip
            time.sleep(0.3)

    def _serves(self, endpoint: Endpoint) -> bool:
        """Whether this process serves the rendezvous store; opens it the first time. Of two
        processes on one host the first one serves, or the one with `node_rank: 0`. That this host
        does not serve may change while the name of a host that came back still has the address that
        the host had before."""
        from torch.distributed import DistError, TCPStore

        if self._is_endpoint is not None:
            return self._is_endpoint
        node_rank = self.config.parallel.node_rank
        if not endpoint.is_local or node_rank not in ("auto", 0):
            return False
        if is_listening(endpoint.address, endpoint.port, timeout_s=1.0):
            if node_rank == 0:
                raise _in_use(endpoint)
            return False
        try:
            # Shared with elastic's own, which is opened at the same port in this process.
            self._store = TCPStore(
                endpoint.address, endpoint.port, is_master=True, wait_for_workers=False, multi_tenant=True,
                timeout=timedelta(seconds=60),
            )  # fmt: skip
        except (DistError, OSError, RuntimeError) as error:
            raise _in_use(endpoint) from error
        return True

    def _announce(self, endpoint: Endpoint, is_endpoint: bool) -> None:
        """Say once which part this host has."""
        where = f"{endpoint.local_address} on {endpoint.interface}"
        role = (
            f"{'endpoint' if is_endpoint else 'host'} {host_name()}: {where}; the rendezvous is at"
            f" {endpoint}"
        )
        if role == self._announced:
            return
        self._announced = role
        self.say("info", role)
        warnings = [public_address_warning(endpoint.address)]
        if is_endpoint:
            warnings.append(public_listener_warning(endpoint.port))
        for warning in warnings:
            if warning is not None:
                self.say("warning", warning)

    def _check_clock(self, endpoint: Endpoint) -> None:
        """Raise ConfigError where this host's clock differs from another's: elastic compares
        heartbeats with wall clocks."""
        from torch.distributed import TCPStore

        if self._is_endpoint:
            self._clock = self._clock or ClockServer(self._store)
            return
        store = TCPStore(
            endpoint.address,
            endpoint.port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=_STORE_WITHIN_S),
        )
        check_clock(store, timeout_s=_STORE_WITHIN_S)

    # -- a rendezvous
    # -----------------------------------------------------------------------------------------------------
    def _launch(self, endpoint: Endpoint, folder: Path, join_timeout_s: int) -> Outcome:
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        from paceline.cluster import rendezvous

        rendezvous.register()
        smallest, largest = self.config.parallel.hosts
        host = f"[{endpoint.address}]" if ":" in endpoint.address else endpoint.address
        launch = LaunchConfig(
            min_nodes=smallest,
            max_nodes=largest,
            nproc_per_node=self.num_ranks,
            run_id=RUN_ID,
            rdzv_backend=rendezvous.BACKEND,
            rdzv_endpoint=f"{host}:{endpoint.port}",
            rdzv_configs={
                "is_host": bool(self._is_endpoint),
                "join_timeout": join_timeout_s,
                "rejoin_timeout": max(1, int(self.config.recovery.rejoin_s)),
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
        node_rank = self.config.parallel.node_rank
        names = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        work = Work(
            self.target, self.payload, str(folder), bool(self._is_endpoint), None if node_rank == "auto" else int(node_rank),
            {name: endpoint.interface for name in names if name not in os.environ},
        )  # fmt: skip
        try:
            with EndpointWatch(endpoint):
                outcomes = elastic_launch(launch, worker_main)(work)
        except ChildFailedError as error:
            return _failed(f"the ranks of this host failed: {error}", EXIT_FAILED)
        outcome: Outcome = outcomes[min(outcomes)]
        if outcome["status"] == "stopped" and self.signals.number is not None:
            outcome["exit_code"] = stop_code(self.signals.number)
        return outcome

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
        return _failed(text, EXIT_USAGE if is_first and scheduled_host() is None else EXIT_FAILED)


def _failed(text: str, exit_code: int) -> Outcome:
    return {
        "status": "failed",
        "exit_code": exit_code,
        "text": text,
        "traceback": "",
        "report": None,
    }


def _in_use(endpoint: Endpoint) -> ConfigError:
    return ConfigError(
        f"port {endpoint.port} of {endpoint.address} is in use: another run, or another program,"
        " listens there",
        fix=(
            "set another port, the same on every host:"
            f" `parallel.rdzv_endpoint={endpoint.name}:{endpoint.port + 1}`"
        ),
    )


class _Workers:
    """The workers of this host, by what they have written into the agent's folder; for
    :class:`Signals`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def pass_on(self, number: int) -> None:
        """Ask the ranks to stop; where none runs, leave the rendezvous."""
        write_atomic(self.folder / STOP_FILE, str(number))
        if not self._send(signal.SIGTERM):
            raise _Stopped

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


class _ExitWatch:
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


# -- a worker
# -----------------------------------------------------------------------------------------------------------------
def worker_main(work: Work) -> Outcome:
    """Entry of a worker. A failure that a restart may mend ends the process, so that the agents of
    all hosts start a new round; every other outcome is returned, since the agent would retry it."""
    end_with_launcher()
    os.setpgid(0, 0)  # a Ctrl-C in the terminal reaches the agent alone, which passes it on once
    os.environ.update(work.environment)
    try:
        outcome = _work(work)
    except Exception as error:  # a mistake in Paceline, which the agent would retry for ever
        outcome = _not_joined(AgentFolder(Path(work.folder)), error)
    sys.stdout.flush()
    sys.stderr.flush()
    if outcome is None:
        os._exit(EXIT_FAILED)  # at once: the other ranks wait for this one and must see it gone
    return outcome


def _work(work: Work) -> Outcome | None:
    """The outcome to return to the agent; None where a new round shall follow."""
    from torch.distributed import DistError

    agent, folder = multiprocessing.parent_process(), AgentFolder(Path(work.folder))
    stop = StopFlag()
    stop.install(sigint=False)
    try:
        member = join_round(
            folder,
            agent_pid=os.getppid() if agent is None or agent.pid is None else agent.pid,
            is_endpoint=work.is_endpoint,
            node_rank=work.node_rank,
            can_restart=True,
        )
    except (RunError, DistError) as error:
        return _not_joined(folder, error)
    folder.write_state(not_joined=0)
    stop.fail = member.fail
    try:
        outcome = work.target(work.payload, member, stop)
        if outcome["status"] == "stopped":
            # A person stops the run on one host, and all hosts end. Where nobody did, a host joins:
            # a new round follows.
            is_asked = any(member.round.gather("stopped", (folder.path / STOP_FILE).exists()))
        member.round.leave()
    except (
        DistError,
        ConnectionError,
    ) as error:  # a rank has gone before there was a process group
        outcome = {
            **_failed(describe(error), EXIT_FAILED),
            "fault": True,
            "traceback": traceback.format_exc(),
        }
    except Exception as error:  # a mistake in Paceline: all ranks end with it in the next round
        outcome = {**_failed(describe(error), EXIT_FAILED), "traceback": traceback.format_exc()}
        member.end({**outcome, "is_final": True})
        return None
    if (outcome["status"] == "stopped" and not is_asked) or (
        outcome["status"] == "failed" and not outcome.get("is_final")
    ):
        member.end(outcome)
        return None
    return outcome


def _not_joined(folder: AgentFolder, error: Exception) -> Outcome | None:
    """The ranks of a round could not reach each other; after several such rounds in a row it is not
    tried again."""
    failures = int(folder.read_state().get("not_joined", 0)) + 1
    folder.write_state(not_joined=failures)
    text = error.paragraph() if isinstance(error, RunError) else describe(error)
    if failures < _JOIN_ATTEMPTS:
        print(
            f"warning: {text}. A new round follows ({failures} of {_JOIN_ATTEMPTS})",
            file=sys.stderr,
            flush=True,
        )
        return None
    return _failed(text, EXIT_FAILED)
