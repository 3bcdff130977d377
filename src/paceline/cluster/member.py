"""What a rank under an agent does before it trains: the ranks of all hosts check that they fit
together, and plan alike.

Rank 0 alone reads the run's folder, which may be another host's; the other ranks plan with what it
has found there.
"""

from __future__ import annotations

import contextlib
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cluster.fingerprint import config_values, difference, plan_values, software
from paceline.cluster.rounds import Membership, Outcome, agree, config_problem, follow
from paceline.core.errors import PacelineError
from paceline.core.launch_lock import LaunchLock
from paceline.core.run_dir import RunDir
from paceline.core.stop import StopFlag
from paceline.distributed.mesh import ParallelDims
from paceline.launch.preflight import LeaderPlan, Plan
from paceline.parallel.registry import ParallelLayout

if TYPE_CHECKING:
    from paceline.api import Options
    from paceline.config.load import Loaded

Say = Callable[[str, str], None]

#: Strategies whose ranks may compute on devices of different types, over Gloo.
MIXED_DEVICES = ("ddp", "local_sgd")
_SEEN_WITHIN_S = 10.0
#: File systems of one machine: what another host has written there is never seen.
_LOCAL_FILE_SYSTEMS = frozenset(
    {
        "ext2",
        "ext3",
        "ext4",
        "xfs",
        "btrfs",
        "zfs",
        "tmpfs",
        "overlay",
        "f2fs",
        "vfat",
        "ntfs3",
        "apfs",
        "ramfs",
    }
)


@dataclass(frozen=True)
class RunRequest:
    """What an agent sends to its ranks. ``said``: what it has printed already."""

    loaded: Loaded
    options: Options
    started_at: float
    said: frozenset[str] = frozenset()


class _Refused(Exception):
    """All ranks end with this outcome."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome["text"])
        self.outcome = outcome


def train_member(request: RunRequest, member: Membership, stop: StopFlag) -> Outcome:
    """Follow the round before, plan with the other ranks, and train."""
    from paceline.launch.worker import run_guarded

    is_first = member.round.is_first

    def say(level: str, text: str) -> None:
        if is_first and text not in request.said:
            # whoever read this has gone; the run continues
            with contextlib.suppress(OSError, ValueError):
                print(
                    f"{'warning: ' if level == 'warning' else ''}{text}",
                    file=sys.stderr,
                    flush=True,
                )

    restart = follow(member, request.loaded.config, say)
    if restart.failed is not None:
        return restart.failed
    with contextlib.ExitStack() as stack:
        try:
            is_first_round = restart.is_first and request.options.fault is None
            plan = _plan(request, member, is_first_round, restart.global_batch_size, say, stack)
        except _Refused as refused:
            return refused.outcome
        if plan.finished is not None:
            return {"status": "finished", "exit_code": 0, "report": plan.finished}
        if member.round.env.local_rank == 0:
            member.folder.write_state(
                global_batch_size=plan.spec.derived.global_batch_size,
                resume_from=plan.spec.resume_from,
            )
        launcher = member.agent_pid if member.can_restart else None
        fault = restart.fault or request.options.fault
        spec = replace(plan.spec, failure=fault, launcher_pid=launcher, reports_everywhere=True)
        return run_guarded(spec, member.round.env, stop)


def _plan(
    request: RunRequest, member: Membership, is_first_round: bool, global_batch_size: int | None, say: Say,
    stack: contextlib.ExitStack,
) -> Plan:  # fmt: skip
    """The plan of all ranks. A collective.

    Raises:
        _Refused: a rank has found a mistake, or the hosts differ.
    """
    from paceline.api import prepare_host
    from paceline.launch.layout import choose_layout
    from paceline.launch.preflight import plan_run
    from paceline.tasks import load_task

    round_, env = member.round, member.round.env

    def together(name: str, action: Callable[[], Any]) -> Any:
        """Every rank's action; where one fails, all end."""
        result, problem = None, None
        try:
            result = action()
        except PacelineError as error:
            problem = config_problem(error.paragraph(), error.exit_code)
        refused = agree(member, name, problem)
        if refused is not None:
            raise _Refused(refused)
        return result

    def prepare() -> Any:
        host = prepare_host(request.loaded, env, say)
        # each host tokenizes at the same time, into its own cache
        load_task(host.loaded.config).prepare()
        return host

    host = together("prepared", prepare)
    _compare(round_, "fingerprint", {**software(), **config_values(request.loaded.config)})
    config, devices = host.loaded.config, host.devices
    if round_.is_first:
        run_dir = RunDir(Path(config.output_dir))
    together(
        "locked", lambda: stack.enter_context(LaunchLock(run_dir, say)) if round_.is_first else None
    )
    sees_folder = _sees_run_folder(member, Path(config.output_dir))

    def plan(layout: ParallelLayout, leader: LeaderPlan | None) -> Plan:
        return plan_run(
            host.loaded,
            started_at=request.started_at,
            layout=layout,
            device_type=devices.type,
            devices=devices,
            say=say,
            allow_config_change=request.options.allow_config_change,
            global_batch_size=global_batch_size,
            life=1 if is_first_round else 2,
            leader=leader,
        )

    planned = together(
        "leader",
        lambda: (
            plan(choose_layout(config, env.world_size, devices.type, env, say), None)
            if round_.is_first
            else None
        ),
    )
    word = round_.broadcast("plan", _described(planned) if round_.is_first else None)
    if word["finished"] is not None:
        return Plan(None, None, word["finished"])
    layout = ParallelLayout(
        word["layout"]["strategy"],
        ParallelDims(**word["layout"]["axes"]),
        word["layout"]["num_processes"],
    )
    leader = LeaderPlan(word["resume_from"], word["global_batch_size"])
    mine = together("planned", lambda: planned if round_.is_first else plan(layout, leader))
    _compare(round_, "plans", plan_values(mine.spec))
    if layout.strategy not in MIXED_DEVICES:
        _compare(round_, "devices", {"device": devices.type})
    return replace(mine, spec=replace(mine.spec, sees_run_folder=sees_folder))


def _described(plan: Plan) -> dict[str, Any]:
    if plan.finished is not None:
        return {"finished": plan.finished}
    spec = plan.spec
    return {
        "finished": None,
        "layout": asdict(spec.layout),
        "resume_from": spec.resume_from,
        "global_batch_size": spec.derived.global_batch_size,
    }


def _compare(round_: Any, name: str, values: dict[str, Any]) -> None:
    """Raise _Refused where a host has other values than rank 0's host."""
    everyone = round_.gather(name, values)
    for rank, theirs in enumerate(everyone):
        text = difference(everyone[0], theirs, round_.hosts[0], round_.hosts[rank])
        if text is not None:
            raise _Refused({**config_problem(text), "is_final": True})


# -- the run's folder
# ---------------------------------------------------------------------------------------------------------
def _sees_run_folder(member: Membership, output_dir: Path) -> bool:
    """Whether this rank's host sees the run's folder of rank 0's host. A collective."""
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
        raise _Refused(
            {
                **config_problem(f"`output_dir: {output_dir}` cannot be written: {token[7:]}"),
                "is_final": True,
            }
        )
    is_seen = round_.is_first or _sees(file, token)
    round_.gather("sees folder", is_seen)
    if round_.is_first:
        file.unlink(missing_ok=True)
    return is_seen


def _sees(file: Path, token: str) -> bool:
    """Whether this host sees what rank 0 has written into ``file``."""
    deadline = time.monotonic() + (0.0 if _is_on_a_local_disk(file.parent) else _SEEN_WITHIN_S)
    while True:
        try:
            if file.read_text() == token:
                return True
        except OSError:
            pass
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)


def _is_on_a_local_disk(folder: Path) -> bool:
    """Whether what another host writes into ``folder`` can never be seen here, or is seen at once."""
    import os

    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    try:
        device = os.stat(existing).st_dev
        numbers = f"{os.major(device)}:{os.minor(device)}"
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            fields, _, kind = line.partition(" - ")
            if fields.split()[2] == numbers:
                return kind.split()[0] in _LOCAL_FILE_SYSTEMS
    except (OSError, IndexError):
        pass
    return False
