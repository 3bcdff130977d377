"""Prepare a run on several hosts: check that the hosts match, and agree on one plan for all ranks.

Only rank 0 reads the run's folder. It sends the state of the folder to the other ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

from pydantic import JsonValue

from paceline.cluster.failures import AgentFolder, MemoryRecord, folder_of_agent
from paceline.cluster.rounds import (
    Membership,
    agree,
    follow,
    join_round,
    next_call,
    problem_of,
)
from paceline.config.chosen import open_settings, values_of
from paceline.config.load import Loaded
from paceline.config.schema import Config
from paceline.core.errors import ConfigError, PacelineError
from paceline.core.failures import ExitRecord
from paceline.core.files import Scratch
from paceline.core.log import (
    configure_logging,
    hide_on_console,
    log_notices,
    mute_console,
    recorded_notices,
)
from paceline.core.report import Report
from paceline.core.run_dir import LaunchLock
from paceline.core.stop import StopFlag
from paceline.distributed.environment import from_environment
from paceline.distributed.mesh import ParallelDims
from paceline.launch.after_training.finish import finish_run
from paceline.launch.passes.devices import find_devices, resolve_tf32
from paceline.launch.passes.draft import Draft, known
from paceline.launch.passes.early import fit_length
from paceline.launch.passes.layout import choose_layout
from paceline.launch.passes.rank_memory import RankMemory
from paceline.launch.plan import make_spec, plan
from paceline.launch.restart import RestartPolicy
from paceline.launch.results import result_of
from paceline.parallel.registry import ParallelLayout, get_spec
from paceline.planner.search.trials import Setting
from paceline.tasks import load_task
from paceline.train.run_spec import RunSpec, TrainResult

logger = logging.getLogger(__name__)

_VISIBLE_WITHIN_S = 10.0
#: Types of local file systems, on which files of other hosts are never visible.
_LOCAL_FILE_SYSTEMS = frozenset([
    "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "f2fs", "vfat", "ntfs3",
    "apfs", "ramfs",
])  # fmt: skip


@dataclass(frozen=True)
class RunRequest:
    """The request for a run that an agent sends to its ranks.

    Args:
        draft: the run, whose config has been checked; with the layout and the settings that the
            agent chose for the ranks that it expects, if there is an agent.
        printed: messages that the agent has already printed.
    """

    draft: Draft
    printed: frozenset[str] = frozenset()


class _Rejected(Exception):
    """Raised on all ranks to end the run as ``record`` says."""

    def __init__(self, record: ExitRecord) -> None:
        super().__init__(record.message)
        self.record = record


def train_member(request: RunRequest, member: Membership, stop: StopFlag) -> ExitRecord:
    """Continue from the previous round, agree on a plan with the other ranks, and train."""
    from paceline.launch.ranks.worker import run_guarded

    if member.round.is_first:
        configure_logging()
        hide_on_console(request.printed)
    else:
        mute_console()
    draft = request.draft
    restart = follow(member, draft.config)
    if restart["failed"] is not None:
        return restart["failed"]
    draft = replace(
        draft,
        failure=restart["fault"] or draft.failure,
        is_first_attempt=restart["is_first"] and draft.failure is None,
        global_batch_size=restart["global_batch_size"],
        kept=restart["memory_settings"],
    )
    with contextlib.ExitStack() as stack:
        try:
            with recorded_notices() as recorder:
                log_notices(logger, draft.loaded.notices)
                planned, sees_folder = _plan_together(draft, member, stack)
        except _Rejected as rejected:
            return rejected.record
        if planned.finished is not None:
            return ExitRecord("finished", report=planned.finished)
        spec = replace(
            make_spec(planned),
            notices=list(recorder.notices),
            memory_fallback=restart["memory_fallback"],
            launcher_pid=member.agent_pid if member.can_restart else None,
            reports_everywhere=True,
            sees_run_folder=sees_folder,
        )
        if member.keeps_state:
            member.folder.write_state(
                {
                    "global_batch_size": spec.derived.global_batch_size,
                    "resume_from": spec.resume_from,
                    "memory": memory_record(spec),
                }
            )
        return run_guarded(spec, member.round.env, stop)


def _plan_together(
    draft: Draft, member: Membership, stack: contextlib.ExitStack
) -> tuple[Draft, bool]:
    """Plan the run in the same way on all ranks. A collective.

    Args:
        stack: exit stack that holds the lock of the run's folder.

    Returns:
        The plan, and whether this rank's host can access the run's folder.

    Raises:
        _Rejected: if a rank found an error in the config, or if the hosts do not match.
    """
    round_ = member.round

    def plan_this_host() -> Draft:
        on_host = plan(replace(draft, outer=round_.env), first=find_devices, last=resolve_tf32)
        # All hosts tokenize at the same time, each into its own cache.
        load_task(on_host.config).prepare()
        return on_host

    on_host: Draft = _on_all_ranks(member, "prepared", plan_this_host)
    host = known(on_host.host)
    _compare(round_, "fingerprint", {**software(), **config_values(draft.config)})
    memory = RankMemory.smallest(round_.gather("memory", known(host.memory).as_values()))
    on_host = replace(on_host, host=replace(host, memory=memory), reads_folder=round_.is_first)
    run_dir = draft.run_dir
    _on_rank_zero(member, "locked", lambda: stack.enter_context(LaunchLock(run_dir)))
    sees_folder = _sees_run_folder(member, run_dir.root)
    expected = on_host.layout
    if expected is not None and expected.num_processes != round_.env.world_size:
        on_host = replace(on_host, layout=None, settings={})  # other ranks than expected
    leading: Draft | None = _on_rank_zero(
        member, "leader", lambda: plan(on_host, first=choose_layout)
    )
    leader: _LeaderRecord = round_.broadcast("plan", _leader_record(leading) if leading else None)
    if leader["finished"] is not None:
        return replace(on_host, finished=leader["finished"]), sees_folder
    planned: Draft = _on_all_ranks(
        member,
        "planned",
        lambda: leading or plan(_with_leader(on_host, leader), first=choose_layout),
    )
    _compare(round_, "plans", plan_values(planned))
    if not get_spec(known(planned.layout).strategy).capabilities.mixed_devices:
        _compare(round_, "devices", {"device": planned.device_type})
    return planned, sees_folder


def memory_record(spec: RunSpec) -> MemoryRecord:
    """Return the memory settings of a run, for the next round."""
    keys = open_settings(spec.config, is_cpu=spec.device_type == "cpu")
    return {
        "settings": values_of(spec.config, keys),
        "strategy": spec.layout.strategy,
        "axes": asdict(spec.layout.axes),
        "num_processes": spec.layout.num_processes,
        "device_type": spec.device_type,
    }


def _on_all_ranks(member: Membership, name: str, action: Callable[[], Any]) -> Any:
    """Run ``action`` on every rank. If it fails on any rank, all ranks end. A collective.

    Raises:
        _Rejected: if the action failed on any rank.
    """
    result, problem = None, None
    try:
        result = action()
    except PacelineError as error:
        problem = problem_of(error)
    agreed = agree(member, name, problem)
    if agreed is not None:
        raise _Rejected(agreed)
    return result


def _on_rank_zero(member: Membership, name: str, action: Callable[[], Any]) -> Any:
    """Like :func:`_on_all_ranks`, but ``action`` runs only on rank 0. Return None elsewhere."""
    return _on_all_ranks(member, name, action if member.round.is_first else lambda: None)


class _LeaderRecord(TypedDict, total=False):
    """What rank 0 has planned, for the other ranks: the report of a run that is already complete,
    or the layout, the settings and the checkpoint."""

    finished: Report | None
    strategy: str
    axes: dict[str, int]
    num_processes: int
    settings: dict[str, Setting]
    resume_from: str | None
    global_batch_size: int | None


def _leader_record(planned: Draft) -> _LeaderRecord:
    if planned.finished is not None:
        return {"finished": planned.finished}
    layout, derived = known(planned.layout), planned.derived
    return {
        "finished": None,
        "strategy": layout.strategy,
        "axes": asdict(layout.axes),
        "num_processes": layout.num_processes,
        "settings": dict(planned.settings),
        "resume_from": planned.resume_from,
        "global_batch_size": None if derived is None else derived.global_batch_size,
    }


def _with_leader(draft: Draft, leader: _LeaderRecord) -> Draft:
    """Return the draft of a rank with what rank 0 has planned."""
    axes = ParallelDims(**leader["axes"])
    return replace(
        draft,
        layout=ParallelLayout(leader["strategy"], axes, leader["num_processes"]),
        settings=leader["settings"],
        resume_from=leader["resume_from"],
        global_batch_size=leader["global_batch_size"],
    )


def _compare(round_: Any, name: str, values: dict[str, JsonValue]) -> None:
    """Raise _Rejected if the values of a host differ from the values of rank 0's host."""
    by_rank = round_.gather(name, values)
    for rank, rank_values in enumerate(by_rank):
        text = difference(by_rank[0], rank_values, round_.hosts[0], round_.hosts[rank])
        if text is not None:
            raise _Rejected(
                replace(problem_of(ConfigError(text, code="joining-refused")), is_final=True)
            )


# -- the run's folder
def _sees_run_folder(member: Membership, output_dir: Path) -> bool:
    """Return whether this rank's host can access the run's folder on rank 0's host. A
    collective."""
    round_ = member.round
    if len(set(round_.hosts)) == 1:
        return True
    file, token = output_dir / ".hosts", uuid.uuid4().hex
    if round_.is_first:
        try:
            file.write_text(token)
        except OSError as error:
            token = f"error: {error.strerror or error}"
    token = round_.broadcast("folder", token)
    if token.startswith("error: "):
        refusal = ConfigError(
            "`output_dir: {output_dir}` is not writable: {token}",
            code="output-dir-not-writable-on-host",
            output_dir=output_dir,
            token=token[7:],
        )
        raise _Rejected(replace(problem_of(refusal), is_final=True))
    is_visible = round_.is_first or _is_visible(file, token)
    round_.gather("sees folder", is_visible)
    if round_.is_first:
        file.unlink(missing_ok=True)
    return is_visible


def _is_visible(file: Path, token: str) -> bool:
    """Return whether this host can read the token that rank 0 has written to ``file``."""
    deadline = time.monotonic() + (0.0 if _is_on_a_local_disk(file.parent) else _VISIBLE_WITHIN_S)
    while True:
        # An NFS client may remember for longer than this that a folder did not exist. Opening the
        # folder above makes it ask the server.
        for folder in reversed(file.parents):
            with contextlib.suppress(OSError):
                os.scandir(folder).close()
        with contextlib.suppress(OSError):
            if file.read_text() == token:
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)


def _is_on_a_local_disk(folder: Path) -> bool:
    """Return whether ``folder`` is on a local disk. There, files of other hosts are never visible,
    and files of this host are visible immediately."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    with contextlib.suppress(OSError, IndexError):
        device = os.stat(existing).st_dev
        numbers = f"{os.major(device)}:{os.minor(device)}"
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            fields, _, kind = line.partition(" - ")
            if fields.split()[2] == numbers:
                return kind.split()[0] in _LOCAL_FILE_SYSTEMS
    return False


def config_values(config: Config) -> dict[str, JsonValue]:
    """Return the config by dotted key, without the settings that may differ between hosts."""
    values: dict[str, JsonValue] = {}
    for name, value in config.model_dump(mode="json").items():
        values.update(
            {f"{name}.{key}": entry for key, entry in value.items()}
            if isinstance(value, dict)
            else {name: value}
        )
    for name in ("node_rank", "network_interface", "num_gpus"):
        del values[f"parallel.{name}"]
    return values


def plan_values(planned: Draft) -> dict[str, JsonValue]:
    """Return the values that must be equal on all hosts after they have read the data."""
    layout, derived = known(planned.layout), known(planned.derived)
    return {
        "data": known(planned.data).fingerprint,
        "resumes from": None if planned.resume_from is None else Path(planned.resume_from).name,
        "steps": derived.steps,
        "global batch": derived.global_batch_size,
        "strategy": layout.strategy,
        "ranks": layout.num_processes,
    }


def software() -> dict[str, str]:
    """Return the versions that must be equal on all hosts."""
    import torch

    from paceline.version import __version__

    return {
        "paceline": __version__,
        "code": _code_digest(),
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch.__version__,
    }


def _code_digest() -> str:
    """Return a digest of the source of this package."""
    digest = hashlib.sha256()
    root = Path(__file__).resolve().parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def difference(
    first: dict[str, JsonValue], other: dict[str, JsonValue], first_host: str, other_host: str
) -> str | None:
    """Return an error message that lists how the values of ``other_host`` differ from the
    values of ``first_host``, or None if they are equal."""
    differing = [
        f"{name}: {other.get(name)!r} on {other_host}, {first.get(name)!r} on {first_host}"
        for name in {**first, **other}
        if first.get(name) != other.get(name)
    ]
    if not differing:
        return None
    return (
        f"hosts {other_host} and {first_host} would not train the same run:"
        f" {'; '.join(differing)}. To fix: use the same code, config and data on every host"
    )


@dataclass(frozen=True)
class PreviousRound:
    """The previous round of a run whose launcher starts new processes without an agent.

    Args:
        folder: folder of this rank alone, with the state of the previous round.
        failure: failure that ended the previous round; None if this round does not follow from it.
    """

    folder: AgentFolder
    failure: ExitRecord | None


def run_under_agent(
    draft: Draft, *, debug: bool = False, previous: PreviousRound | None = None
) -> TrainResult:
    """Run this rank of a run that an elastic agent, such as torchrun, has started.

    Args:
        draft: the config and the options of the run.
        debug: whether to print the traceback of a failure.
        previous: previous round, if there is no agent that knows it.

    Raises:
        PacelineError: if the run failed, with the exit code and one paragraph of text.
    """
    if from_environment().rank == 0:
        configure_logging()
    else:
        mute_console()
    with recorded_notices() as recorder:
        draft = plan(replace(draft, outer=from_environment()), last=fit_length)
    loaded = draft.loaded
    request = RunRequest(draft, frozenset(recorder.messages))
    call = next_call()
    has_folder = previous is not None or _has_agent()
    with contextlib.nullcontext() if has_folder else Scratch() as scratch:
        if scratch is not None:
            folder = AgentFolder(scratch)
        else:
            folder = folder_of_agent(call) if previous is None else previous.folder
        member = _join(folder, loaded, call)
        if previous is not None:
            member = replace(member, previous_failure=previous.failure, keeps_state=True)
        ended = train_member(request, member, _stop_flag(member, loaded))
        member.end(ended)
        member.round.leave()
        result = result_of(ended, loaded.config, debug=debug)
        return finish_run(result, loaded.config) if from_environment().rank == 0 else result


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
