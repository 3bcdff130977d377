"""Entry point of a rank that torch elastic starts. It joins the round, runs, and decides whether
the agents of all hosts start another round."""

import logging
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.cluster.failures import AgentFolder
from paceline.cluster.rounds import Membership, join_round
from paceline.core.errors import EXIT_FAILED, RunError
from paceline.core.failures import ExitRecord, FailureKind, classify
from paceline.core.log import configure_logging
from paceline.core.processes import end_with_starter
from paceline.core.stop import StopFlag
from paceline.core.texts import UserText
from paceline.launch.ranks.folder import STOP_FILE

logger = logging.getLogger(__name__)

#: Runs a worker: (payload, its membership in the round, stop flag) → how it ended.
Target = Callable[[Any, Membership, StopFlag], ExitRecord]

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


def worker_main(task: ElasticWorkerTask) -> ExitRecord:
    """Run a worker and return how it ended. After a failure that a restart may solve, exit with an
    error instead, so that the agents of all hosts start a new round."""
    configure_logging()
    end_with_starter()
    os.setpgid(0, 0)  # so that Ctrl-C reaches only the agent, which forwards it once
    os.environ.update(task.environment)
    try:
        ended = _run(task)
    except Exception as error:  # a bug in Paceline, which the agent would retry forever
        ended = _not_joined(AgentFolder(Path(task.folder)), error)
    sys.stdout.flush()
    sys.stderr.flush()
    if ended is None:
        os._exit(EXIT_FAILED)  # immediately, because the other ranks wait until this one ends
    return ended


def _run(task: ElasticWorkerTask) -> ExitRecord | None:
    """Return how the worker ended, for the agent, or None if a new round follows."""
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
        ended = task.target(task.payload, member, stop)
        if ended.status == "stopped":
            # If the user stopped the run on one host, all hosts end. Otherwise a host has joined,
            # and a new round follows.
            stopped_by_user = any(
                member.round.gather("stopped", (folder.path / STOP_FILE).exists())
            )
        member.round.leave()
    except (DistError, ConnectionError) as error:
        # A rank exited before the process group was created.
        failure = replace(classify(error, member.round.env.rank), kind=FailureKind.CLOSED)
        ended = ExitRecord.failed(failure, traceback=traceback.format_exc())
    except Exception as error:  # a bug in Paceline: all ranks end with it in the next round
        failure = replace(classify(error, member.round.env.rank), kind=FailureKind.UNKNOWN)
        ended = ExitRecord.failed(failure, traceback=traceback.format_exc(), is_final=True)
        member.end(ended)
        return None
    if (ended.status == "stopped" and not stopped_by_user) or (
        ended.status == "failed" and not ended.is_final
    ):
        member.end(ended)
        return None
    return ended


def _not_joined(folder: AgentFolder, error: Exception) -> ExitRecord | None:
    """Handle a round whose ranks could not connect to each other. Return None to retry, or the
    failure after several such rounds in a row."""
    failures = int(folder.read_state().get("not_joined", 0)) + 1
    folder.write_state({"not_joined": failures})
    failure = replace(classify(error), kind=FailureKind.UNKNOWN)
    if failures < _JOIN_ATTEMPTS:
        logger.warning(
            UserText(
                "{failure}. Starting a new round (attempt {failures} of {join_attempts})",
                code="new-round",
                failure=failure.text,
                failures=failures,
                join_attempts=_JOIN_ATTEMPTS,
            )
        )
        return None
    return ExitRecord.failed(failure)
