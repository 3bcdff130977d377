"""Entry point of a rank that torch elastic starts. It joins the round, runs, and decides whether
the agents of all hosts start another round."""

import logging
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.cluster.failures import AgentFolder
from paceline.cluster.rounds import Membership, join_round
from paceline.core.errors import EXIT_FAILED, Outcome, RunError, failed_outcome
from paceline.core.log import configure_logging
from paceline.core.processes import end_with_starter
from paceline.core.stop import StopFlag
from paceline.launch.worker import STOP_FILE, describe

logger = logging.getLogger(__name__)

#: Runs a worker: (payload, its membership in the round, stop flag) → outcome.
Target = Callable[[Any, Membership, StopFlag], Outcome]

_JOIN_ATTEMPTS = 5


@dataclass(frozen=True)
class ElasticWorkerTask:
    """The task that the agent sends to its workers. It must be picklable."""

    target: Target
    payload: Any
    folder: str
    is_endpoint: bool
    node_rank: int | None
    environment: dict[str, str]


def worker_main(task: ElasticWorkerTask) -> Outcome:
    """Run a worker and return its outcome. After a failure that a restart may solve, exit with an
    error instead, so that the agents of all hosts start a new round."""
    configure_logging()
    end_with_starter()
    os.setpgid(0, 0)  # so that Ctrl-C reaches only the agent, which forwards it once
    os.environ.update(task.environment)
    try:
        outcome = _run(task)
    except Exception as error:  # a bug in Paceline, which the agent would retry forever
        outcome = _not_joined(AgentFolder(Path(task.folder)), error)
    sys.stdout.flush()
    sys.stderr.flush()
    if outcome is None:
        os._exit(EXIT_FAILED)  # immediately, because the other ranks wait until this one ends
    return outcome


def _run(task: ElasticWorkerTask) -> Outcome | None:
    """Return the outcome for the agent, or None if a new round follows."""
    from torch.distributed import DistError

    agent, folder = multiprocessing.parent_process(), AgentFolder(Path(task.folder))
    stop = StopFlag()
    stop.install(sigint=False)
    try:
        member = join_round(
            folder,
            agent_pid=os.getppid() if agent is None or agent.pid is None else agent.pid,
            is_endpoint=task.is_endpoint,
            node_rank=task.node_rank,
            can_restart=True,
        )
    except (RunError, DistError) as error:
        return _not_joined(folder, error)
    folder.write_state({"not_joined": 0})
    stop.fail = member.fail
    try:
        outcome = task.target(task.payload, member, stop)
        if outcome["status"] == "stopped":
            # If the user stopped the run on one host, all hosts end. Otherwise a host has joined,
            # and a new round follows.
            stopped_by_user = any(
                member.round.gather("stopped", (folder.path / STOP_FILE).exists())
            )
        member.round.leave()
    except (DistError, ConnectionError) as error:
        # A rank exited before the process group was created.
        outcome = {
            **failed_outcome(describe(error)),
            "fault": True,
            "traceback": traceback.format_exc(),
        }
    except Exception as error:  # a bug in Paceline: all ranks end with it in the next round
        outcome = {**failed_outcome(describe(error)), "traceback": traceback.format_exc()}
        member.end({**outcome, "is_final": True})
        return None
    if (outcome["status"] == "stopped" and not stopped_by_user) or (
        outcome["status"] == "failed" and not outcome.get("is_final")
    ):
        member.end(outcome)
        return None
    return outcome


def _not_joined(folder: AgentFolder, error: Exception) -> Outcome | None:
    """Handle a round whose ranks could not connect to each other. Return None to retry, or the
    outcome after several such rounds in a row."""
    failures = int(folder.read_state().get("not_joined", 0)) + 1
    folder.write_state({"not_joined": failures})
    text = error.paragraph() if isinstance(error, RunError) else describe(error)
    if failures < _JOIN_ATTEMPTS:
        logger.warning(
            "%s. Starting a new round (attempt %d of %d)", text, failures, _JOIN_ATTEMPTS
        )
        return None
    return failed_outcome(text)
