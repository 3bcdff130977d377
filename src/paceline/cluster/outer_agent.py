"""A rank that torchrun, `accelerate launch` or Ray has started: its part of a run, from the config
to the result."""

import contextlib
import os

from paceline.cluster.failures import AgentFolder, folder_of_agent
from paceline.cluster.member import RunRequest, train_member
from paceline.cluster.rounds import Membership, join_round, next_call
from paceline.config.load import Loaded
from paceline.core.files import Scratch
from paceline.core.log import configure_logging, mute_console, recorded_notices
from paceline.core.stop import StopFlag
from paceline.distributed.environment import from_environment
from paceline.launch.prepare import TrainOptions, TrainResult, log_and_check, result_of
from paceline.launch.restart import RestartPolicy
from paceline.models.positions import fit_length


def run_under_agent(loaded: Loaded, options: TrainOptions, started_at: float) -> TrainResult:
    """Run this rank. ``started_at``: seconds since the epoch.

    Raises:
        PacelineError: with its exit code and one paragraph of text.
    """
    if from_environment().rank == 0:
        configure_logging()
    else:
        mute_console()
    loaded = fit_length(loaded)
    with recorded_notices() as recorder:
        log_and_check(loaded)
    request = RunRequest(loaded, options, started_at, printed=frozenset(recorder.messages))
    call = next_call()
    with contextlib.nullcontext() if _has_agent() else Scratch() as scratch:
        folder = AgentFolder(scratch) if scratch is not None else folder_of_agent(call)
        member = _join(folder, loaded, call)
        outcome = train_member(request, member, _stop_flag(member, loaded))
        member.end(outcome)
        member.round.leave()
        return result_of(outcome, options, loaded.config)


def _has_agent() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def _join(folder: AgentFolder, loaded: Loaded, call: int) -> Membership:
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    max_restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    node_rank = loaded.config.parallel.node_rank
    return join_round(
        folder,
        agent_pid=os.getppid(),
        is_endpoint=None,
        node_rank=None if node_rank == "auto" else int(node_rank),
        can_restart=_has_agent() and restarts < max_restarts,
        call=call,
    )


def _stop_flag(member: Membership, loaded: Loaded) -> StopFlag:
    stop = StopFlag()
    stop.install(sigint=True)
    stop.fail = member.fail
    if member.round.is_first:
        stop.on_second_signal = lambda number: RestartPolicy(
            loaded.config, None, member.policy_state()
        ).end_at_once(number)
    return stop
