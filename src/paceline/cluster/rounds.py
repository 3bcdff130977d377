"""Take part in a round of a run: join it, decide how it follows from the previous round, and record
for the next one how this rank ended.

The same code runs under Paceline's own agent (:mod:`paceline.cluster.elastic`), torchrun and
`accelerate launch`.
"""

import logging
import os
import time
from dataclasses import dataclass, replace
from typing import Any, TypedDict, cast

from paceline.cluster.failures import (
    AgentFolder,
    AgentState,
    MemoryRecord,
    Record,
    first_failure,
    watch_termination,
)
from paceline.cluster.ranks import HostEntry, Round, enter_round
from paceline.config.schema import Config
from paceline.core.errors import EXIT_FAILED, EXIT_USAGE, PacelineError, RunError
from paceline.core.events import Fault, MemoryFallbackEvent
from paceline.core.failures import ExitRecord, FailureKind, classify_of_run
from paceline.core.log import CONSOLE_ONLY
from paceline.core.processes import host_name
from paceline.distributed.environment import from_environment
from paceline.distributed.mesh import ParallelDims
from paceline.launch.passes.memory import smaller_settings
from paceline.launch.restart import PolicyState, RestartPolicy
from paceline.parallel.registry import ParallelLayout
from paceline.planner.search.trials import Settings, with_settings

logger = logging.getLogger(__name__)


@dataclass
class Membership:
    """The membership of this rank in its round.

    Args:
        record: record of the rank with the same local rank in the previous round.
        can_restart: whether the agent restarts the ranks if one of them fails.
        agent_pid: process ID of the agent.
        previous_failure: failure that ended the previous round, if the launcher knows it; by
            default it follows from the records.
        keeps_state: whether this rank writes the state of the round to ``folder``: one of the ranks
            that share a folder.
    """

    round: Round
    folder: AgentFolder
    record: Record
    can_restart: bool
    agent_pid: int
    previous_failure: ExitRecord | None = None
    keeps_state: bool = False

    def end(self, ended: ExitRecord) -> None:
        """Record how this rank ended."""
        self.folder.write_end(self.round.env, replace(ended, report=None))

    def policy_state(self) -> PolicyState | None:
        """Return the state of the restart policy after the previous round, or None."""
        return self.folder.read_state().get("recovery")

    def fail(self, error: RunError) -> None:
        """Record an error of all ranks and exit. Any thread may call this, even while the main
        thread is blocked."""
        self.end(ExitRecord.failed(classify_of_run(error, self.round.env.rank)))
        os._exit(EXIT_FAILED)


_num_calls = 0


def next_call() -> int:
    """Return the number of this call of ``paceline.train()`` in this process. It separates the call
    from the records and keys of earlier calls, which remain in the agent's folder and store."""
    global _num_calls
    _num_calls += 1
    return _num_calls - 1


def join_round(
    folder: AgentFolder,
    agent_pid: int,
    *,
    is_endpoint: bool | None,
    node_rank: int | None,
    can_restart: bool,
    call: int = 0,
) -> Membership:
    """Join the round that the environment describes: assign its ranks, and record that this rank
    has started.

    Args:
        call: number from :func:`next_call`.

    Raises:
        RunError: if the store of the round cannot be reached.
    """
    local_rank = int(os.environ["LOCAL_RANK"])
    record = folder.take(local_rank)
    num_ranks = from_environment().local_world_size
    # torchrun sets GROUP_RANK; Ray Train and other launchers set NODE_RANK.
    group_rank = int(
        os.environ.get("GROUP_RANK")
        or os.environ.get("NODE_RANK")
        or int(os.environ["RANK"]) // num_ranks
    )
    previous = folder.read_state().get("node_rank")
    entry = HostEntry(host_name(), group_rank, num_ranks, is_endpoint, node_rank, previous)
    joined = enter_round(entry, call)
    folder.write_start(joined.env)
    watch_termination(folder, local_rank)
    return Membership(joined, folder, record, can_restart, agent_pid, keeps_state=local_rank == 0)


class Restart(TypedDict):
    """How this round follows from the previous one.

    Args:
        is_first: whether this is the first round.
        fault: `fault` event of the failure that ended the previous round, or None.
        failed: record with which all ranks end now if the failure is not followed by a restart.
        global_batch_size: global batch size of the previous round.
        memory_settings: memory settings of the previous round, or smaller ones after a rank ran out
            of memory; None if there are none.
        memory_fallback: the event about the smaller memory settings, or None.
    """

    is_first: bool
    fault: Fault | None
    failed: ExitRecord | None
    global_batch_size: int | None
    memory_settings: Settings | None
    memory_fallback: MemoryFallbackEvent | None


def follow(member: Membership, config: Config) -> Restart:
    """Decide on rank 0, from the records of all ranks, whether the run continues after the previous
    round. A collective."""
    round_ = member.round
    records = round_.gather("records", member.record)
    states: list[AgentState] = round_.gather("states", member.folder.read_state())
    state = states[0]
    if "hosts" not in state:  # rank 0's agent is new: use the state of another agent
        state = max(states, key=lambda known: known.get("entered_at", 0.0))
    decision = _decide(member, records, state, config) if round_.is_first else None
    policy, failed, restart = round_.broadcast("restart", decision)
    if member.keeps_state:
        # Written on every host, because rank 0's host may be lost together with its agent.
        member.folder.write_state(
            {
                "node_rank": round_.node_rank,
                "hosts": round_.hosts,
                "recovery": policy,
                "entered_at": time.time(),
            }
        )
    failed = None if failed is None else ExitRecord.from_json(failed)
    return cast(Restart, {**restart, "failed": failed})


def _decide(
    member: Membership, records: list[Record], state: AgentState, config: Config
) -> tuple[PolicyState, dict[str, Any] | None, dict[str, Any]]:
    """Return the state of the restart policy, the record with which all ranks end or None, and the
    rest of a :class:`Restart`, as JSON."""
    round_ = member.round
    previous_hosts = state.get("hosts", [])
    policy = RestartPolicy(config, state.get("resume_from"), state.get("recovery"))
    failure = member.previous_failure
    if failure is None and previous_hosts:
        failure = first_failure(records, round_.hosts, previous_hosts)
    fault: Fault | None = None
    failed: ExitRecord | None = None
    fallback: MemoryFallbackEvent | None = None
    memory = state.get("memory")
    settings: Settings | None = None if memory is None else memory["settings"]
    if failure is not None and failure.is_final:
        failed = failure
    elif failure is not None:
        smaller = None
        if memory is not None and policy.may_fall_back(failure):
            smaller = settings_after(config, memory, failure)
        if memory is None or smaller is None:
            fault, reported = policy.evaluate(failure)
            failed = replace(reported, is_final=True) if fault is None else None
        else:
            fault, before = policy.fault_of(failure), with_settings(config, memory["settings"])
            fallback = policy.fall_back(failure, before, smaller)
            settings = {**memory["settings"], **smaller}
        if fault is not None and failure.time is not None:
            fault["seen_at"] = failure.time
    elif previous_hosts and len(previous_hosts) != len(round_.hosts):
        logger.info(
            "the run continues on %d ranks (before: %d)",
            len(round_.hosts),
            len(previous_hosts),
            extra=CONSOLE_ONLY,
        )
        policy.begin_attempt()
    restart = {
        "is_first": not previous_hosts,
        "fault": fault,
        "global_batch_size": state.get("global_batch_size"),
        "memory_settings": settings,
        "memory_fallback": fallback,
    }
    return policy.state, None if failed is None else failed.as_json(), restart


def settings_after(config: Config, memory: MemoryRecord, failed: ExitRecord) -> Settings | None:
    """Return the memory settings to change after a rank ran out of memory, or None."""
    layout = ParallelLayout(
        memory["strategy"], ParallelDims(**memory["axes"]), memory["num_processes"]
    )
    current = with_settings(config, memory["settings"])
    return smaller_settings(current, layout, memory["device_type"], failed.phase)


def agree(member: Membership, name: str, problem: ExitRecord | None) -> ExitRecord | None:
    """Return the first problem that any rank reports, or None, on all ranks, so that all of them
    end in the same way. A collective."""
    hosts = member.round.hosts
    problems = member.round.gather(name, None if problem is None else problem.as_json())
    for rank, record in enumerate(problems):
        if record is not None:
            prefix = "" if len(set(hosts)) == 1 else f"on host {hosts[rank]}: "
            first = ExitRecord.from_json(record)
            return replace(first, message=f"{prefix}{first.message}", is_final=True)
    return None


def problem_of(error: PacelineError) -> ExitRecord:
    """Return the record of a rank that found an error before training started."""
    kind = FailureKind.USAGE if error.exit_code == EXIT_USAGE else FailureKind.EXPLAINED
    return ExitRecord.of_run(error.paragraph(), kind)
