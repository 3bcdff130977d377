"""Who this process is among the ranks, as its launcher says; and which host this is among those of
a job, as the scheduler says (Slurm, Kubeflow, or the ``PET_`` variables that torchrun reads too).
"""

import os
import re
from dataclasses import dataclass

from paceline.config.schema.parallel import Parallel
from paceline.core.errors import ConfigError
from paceline.core.formatting import counted

#: Set by the ranks when the run can go on without one of them.
MEETING_KEY = "paceline/meeting"
#: Set by the launcher: JSON of rank → {"pid", "reason"} of those that have ended.
LOST_KEY = "paceline/lost"

_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class RankEnv:
    """Rank, world size, and their like within this host."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def outer_launcher() -> RankEnv | None:
    """The rank an outer ``torchrun`` gave this process, or None where there is none.

    Raises:
        ConfigError: a part of the variables is set and a part is missing.
    """
    if (
        not any(name in os.environ for name in ("RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"))
        or _rank_is_of_a_pod()
    ):
        return None
    missing = [name for name in _NEEDED if name not in os.environ]
    if missing:
        raise ConfigError(
            f"some variables of an outer launcher are set, but not {', '.join(missing)}",
            allowed="all of " + ", ".join(_NEEDED) + " (as torchrun sets them), or none",
            fix=(
                "start with `torchrun --nproc-per-node N -m paceline …`, or unset RANK and"
                " LOCAL_RANK"
            ),
        )
    return from_environment()


def from_environment() -> RankEnv:
    """As torchrun and torch.distributed.elastic set it.

    Raises:
        ConfigError: a variable that is no number.
    """
    world = _number("WORLD_SIZE", 1)
    return RankEnv(
        rank=_number("RANK", 0),
        world_size=world,
        local_rank=_number("LOCAL_RANK", 0),
        local_world_size=_number("LOCAL_WORLD_SIZE", world),
    )


@dataclass(frozen=True)
class HostEnv:
    """This host among those of a job.

    Attributes:
        scheduler: who says so, for a person.
        hosts: the smallest and the largest number of them.
        node_rank: this host's number, from 0; None where it is not said.
        rdzv_endpoint: ``address:port`` at which all meet.
    """

    scheduler: str
    hosts: tuple[int, int]
    node_rank: int | None
    rdzv_endpoint: str


def scheduled_host() -> HostEnv | None:
    """What a scheduler's environment says of this host, or None where there is no scheduler, or one
    host alone.

    Raises:
        ConfigError: a part of the variables is missing or no number; or Slurm started several tasks
            on a host, where one starts the ranks.
    """
    if "SLURM_STEP_NUM_NODES" in os.environ:
        result = _slurm()
    elif "PET_NNODES" in os.environ:
        result = _torchrun_defaults()
    elif _rank_is_of_a_pod():
        pods = _needed_number("WORLD_SIZE")
        result = HostEnv(
            "PyTorchJob",
            (pods, pods),
            _needed_number("RANK"),
            _address("MASTER_ADDR", "MASTER_PORT"),
        )
    else:
        return None
    return None if result.hosts[1] == 1 else result


def with_scheduler(parallel: Parallel, host: HostEnv | None) -> Parallel:
    """``parallel`` with what the scheduler says in the place of what the config leaves open.
    ``nnodes: 1`` leaves it open.

    Raises:
        ConfigError: they contradict each other.
    """
    if host is None:
        return parallel
    low, high = parallel.hosts
    if high > 1 and not low <= host.hosts[0] <= host.hosts[1] <= high:
        raise ConfigError(
            f"`parallel.nnodes` is {parallel.nnodes}, and {host.scheduler} started this on"
            f" {counted(host.hosts[1], 'host')}",
            fix=f"leave `parallel.nnodes` out, or ask {host.scheduler} for as many hosts",
        )
    if host.node_rank is not None and parallel.node_rank not in ("auto", host.node_rank):
        raise ConfigError(
            f"`parallel.node_rank` is {parallel.node_rank}, and {host.scheduler} gave this host"
            f" number {host.node_rank}",
            fix="leave `parallel.node_rank` out",
        )
    smallest, largest = host.hosts
    update = {
        "nnodes": (
            parallel.nnodes
            if high > 1
            else largest
            if smallest == largest
            else f"{smallest}:{largest}"
        ),
        "node_rank": parallel.node_rank if host.node_rank is None else host.node_rank,
        "rdzv_endpoint": parallel.rdzv_endpoint or host.rdzv_endpoint,
    }
    return parallel.model_copy(update=update)


def slurm_port(job: int) -> int:
    """The port by which the hosts of a Slurm job meet: the same on all of them, another for each of
    10,000 jobs, and below those that systems hand out by themselves."""
    return 20000 + job % 10000


def first_host(names: str) -> str:
    """The first of Slurm's list of hosts: ``gpu[003-005,9]-ib,login`` → ``gpu003-ib``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", names)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0]) if first else names


def _slurm() -> HostEnv:
    """As srun sets it for a step: https://slurm.schedmd.com/srun.html, "OUTPUT ENVIRONMENT
    VARIABLES"."""
    hosts, tasks = _needed_number("SLURM_STEP_NUM_NODES"), _needed_number("SLURM_STEP_NUM_TASKS")
    if tasks != hosts:
        raise ConfigError(
            f"srun started {counted(tasks, 'task')} on {counted(hosts, 'host')}",
            allowed="one task a host, which starts the ranks of its host",
            fix="start with `srun --ntasks-per-node=1 …`, or let `paceline slurm` write the script",
        )
    head = first_host(
        os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", "")
    )
    port = slurm_port(_needed_number("SLURM_JOB_ID"))
    return HostEnv("Slurm", (hosts, hosts), _needed_number("SLURM_NODEID"), f"{head}:{port}")


def _torchrun_defaults() -> HostEnv:
    """The defaults of torchrun's own options. Kubeflow's Trainer and PyTorchJob set them in each
    pod: https://www.kubeflow.org/docs/components/trainer/"""
    low, _, high = os.environ["PET_NNODES"].partition(":")
    if not (low.isdecimal() and (high or low).isdecimal() and 1 <= int(low) <= int(high or low)):
        raise ConfigError(
            f"the environment variable PET_NNODES={os.environ['PET_NNODES']!r} is no number of"
            " hosts",
            allowed="`4`, or `1:4` for at least 1 and at most 4",
        )
    hosts = (int(low), int(high or low))
    if hosts[1] == 1:
        return HostEnv("PET_NNODES", hosts, 0, "")
    node_rank = _needed_number("PET_NODE_RANK") if "PET_NODE_RANK" in os.environ else None
    head = os.environ.get("PET_RDZV_ENDPOINT") or _address("PET_MASTER_ADDR", "PET_MASTER_PORT")
    return HostEnv("Kubeflow" if _in_a_pod() else "PET_NNODES", hosts, node_rank, head)


def _in_a_pod() -> bool:
    return "KUBERNETES_SERVICE_HOST" in os.environ


def _rank_is_of_a_pod() -> bool:
    """True where RANK is a pod's among the pods of a PyTorchJob, and WORLD_SIZE their number: there
    is no LOCAL_RANK then."""
    return (
        "RANK" in os.environ
        and "LOCAL_RANK" not in os.environ
        and ("PET_NNODES" in os.environ or _in_a_pod())
    )


def _address(name: str, port: str) -> str:
    if name not in os.environ:
        raise ConfigError(
            f"the environment says that there are several hosts, and {name} is not set, so nothing"
            " says where they meet",
            fix=(
                f"set {name} to the first host's address, or `parallel.rdzv_endpoint` in the config"
            ),
        )
    return f"{os.environ[name]}:{_number(port, 29500)}"


def _needed_number(name: str) -> int:
    if name not in os.environ:
        raise ConfigError(
            f"some variables of a scheduler are set, but not {name}",
            fix="start with `srun`, or as a TrainJob of Kubeflow; or unset them",
        )
    return _number(name, 0)


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(
            f"the environment variable {name}={text!r} is no number",
            fix=f"start with `torchrun --nproc-per-node N -m paceline …`, or unset {name}",
        ) from error
