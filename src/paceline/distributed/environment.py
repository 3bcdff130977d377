"""Read the rank of this process, and the number of this host in a job, from the environment
variables of a launcher or scheduler (torchrun, Slurm, Kubeflow)."""

import os
import re
from dataclasses import dataclass, replace

from paceline.config.schema.parallel import Parallel
from paceline.core.errors import ConfigError

#: Store key that the ranks set once the run can continue after the loss of a rank.
CONTINUE_KEY = "paceline/meeting"
#: Store key that the launcher sets: JSON of rank → {"pid", "reason"} of the lost ranks.
LOST_KEY = "paceline/lost"

#: The number of ranks of this host: as torchrun, DeepSpeed, Open MPI and MPICH set it.
_LOCAL_WORLD_SIZE = (
    "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS",
)  # fmt: skip
_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class RankEnv:
    """Rank and world size, globally and on this host."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def outer_launcher() -> RankEnv | None:
    """Return the rank that an outer ``torchrun`` assigned to this process, or None without one.

    Raises:
        ConfigError: if only some of its variables are set.
    """
    if (
        not any(name in os.environ for name in ("RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"))
        or _rank_is_pod()
    ):
        return None
    missing = [name for name in _NEEDED if name not in os.environ]
    if missing:
        raise ConfigError(
            "the environment sets variables of an outer launcher, but not {missing}",
            code="incomplete-environment",
            allowed=(("all of " + ", ".join(_NEEDED)) + " (as torchrun sets them), or none"),
            fix="start with `torchrun --nproc-per-node N -m paceline …`, or unset RANK and"
            " LOCAL_RANK",
            missing=", ".join(missing),
        )
    return from_environment()


def from_environment() -> RankEnv:
    """Read the variables that torchrun and torch.distributed.elastic set. Without the number of
    ranks of a host, there is one host.

    Raises:
        ConfigError: if a variable is not a number, or if there are several hosts without that
            number.
    """
    world_size = _number("WORLD_SIZE", 1)
    env = RankEnv(
        rank=_number("RANK", 0), world_size=world_size, local_rank=_number("LOCAL_RANK", 0)
    )
    name = next((name for name in _LOCAL_WORLD_SIZE if name in os.environ), None)
    if name is None and env.rank != env.local_rank:
        raise ConfigError(
            "the outer launcher started ranks on several hosts (RANK={rank} has"
            " LOCAL_RANK={local_rank}), but does not set LOCAL_WORLD_SIZE",
            code="missing-local-world-size",
            fix="set LOCAL_WORLD_SIZE to the number of ranks of this host",
            rank=env.rank,
            local_rank=env.local_rank,
        )
    return replace(env, local_world_size=world_size if name is None else _number(name, 1))


@dataclass(frozen=True)
class HostEnv:
    """This host in a job on several hosts.

    Attributes:
        scheduler: name of the scheduler, for messages.
        hosts: minimum and maximum number of hosts.
        node_rank: number of this host, from 0, or None if unknown.
        rdzv_endpoint: ``address:port`` of the rendezvous.
        job: name of the job, which is the same on all its hosts; empty if unknown.
    """

    scheduler: str
    hosts: tuple[int, int]
    node_rank: int | None
    rdzv_endpoint: str
    job: str = ""


def scheduled_host() -> HostEnv | None:
    """Return this host's place in a job on several hosts, or None without a scheduler or with a
    single host.

    Raises:
        ConfigError: if a variable is missing or not a number, or if Slurm started several tasks per
            host.
    """
    if "SLURM_STEP_NUM_NODES" in os.environ:
        host = _slurm()
    elif "PET_NNODES" in os.environ:
        host = _torchrun_defaults()
    elif _rank_is_pod():
        pods = _required_number("WORLD_SIZE")
        address = _address("MASTER_ADDR", "MASTER_PORT")
        host = HostEnv("PyTorchJob", (pods, pods), _required_number("RANK"), address)
    else:
        return None
    return None if host.hosts[1] == 1 else host


def with_scheduler(parallel: Parallel, host: HostEnv | None) -> Parallel:
    """Fill in the settings of ``parallel`` that the config leaves out (or ``nnodes: 1``) with the
    scheduler's values.

    Raises:
        ConfigError: if the config contradicts the scheduler.
    """
    if host is None:
        return parallel
    low, high = parallel.hosts
    smallest, largest = host.hosts
    if high > 1 and not low <= smallest <= largest <= high:
        raise ConfigError(
            "`parallel.nnodes: {nnodes}` contradicts {scheduler}, which started this run on"
            " {largest:host}",
            code="contradicts-launcher",
            fix="leave `parallel.nnodes` out, or request that number of hosts from {scheduler}",
            nnodes=parallel.nnodes,
            scheduler=host.scheduler,
            largest=largest,
        )
    if host.node_rank is not None and parallel.node_rank not in ("auto", host.node_rank):
        raise ConfigError(
            "`parallel.node_rank: {node_rank}` contradicts {scheduler}, which gave this host"
            " number {given_rank}",
            code="node-rank-contradicts-launcher",
            fix="leave `parallel.node_rank` out",
            node_rank=parallel.node_rank,
            scheduler=host.scheduler,
            given_rank=host.node_rank,
        )
    nnodes: int | str = parallel.nnodes
    if high == 1:
        nnodes = largest if smallest == largest else f"{smallest}:{largest}"
    update = {
        "nnodes": nnodes,
        "node_rank": parallel.node_rank if host.node_rank is None else host.node_rank,
        "rdzv_endpoint": parallel.rdzv_endpoint or host.rdzv_endpoint,
    }
    return parallel.model_copy(update=update)


def slurm_port(job: int) -> int:
    """Return the rendezvous port of a Slurm job. It is the same on all hosts, differs among 10,000
    successive jobs, and is below the ephemeral ports."""
    return 20000 + job % 10000


def first_host(names: str) -> str:
    """Return the first host of a Slurm host list: ``gpu[003-005,9]-ib,login`` → ``gpu003-ib``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", names)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0]) if first else names


def _slurm() -> HostEnv:
    """Read the variables that srun sets for a step: https://slurm.schedmd.com/srun.html, "OUTPUT
    ENVIRONMENT VARIABLES"."""
    hosts = _required_number("SLURM_STEP_NUM_NODES")
    tasks = _required_number("SLURM_STEP_NUM_TASKS")
    if tasks != hosts:
        raise ConfigError(
            "srun started {tasks:task} on {hosts:host}",
            code="wrong-number-of-tasks",
            allowed="one task per host, which starts the ranks of its host",
            fix="start with `srun --ntasks-per-node=1 …`, or let `paceline slurm` write the script",
            tasks=tasks,
            hosts=hosts,
        )
    coordinator = first_host(
        os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", "")
    )
    job = _required_number("SLURM_JOB_ID")
    return HostEnv(
        "Slurm",
        (hosts, hosts),
        _required_number("SLURM_NODEID"),
        rdzv_endpoint=f"{coordinator}:{slurm_port(job)}",
        job=f"Slurm job {job}.{os.environ.get('SLURM_STEP_ID', '0')}",
    )


def _torchrun_defaults() -> HostEnv:
    """Read the variables with defaults for torchrun's options, which Kubeflow's Trainer and
    PyTorchJob set in each pod: https://www.kubeflow.org/docs/components/trainer/"""
    low, _, high = os.environ["PET_NNODES"].partition(":")
    if not (low.isdecimal() and (high or low).isdecimal() and 1 <= int(low) <= int(high or low)):
        raise ConfigError(
            "environment variable PET_NNODES={pet_nnodes}: expected a number of hosts",
            code="invalid-pet-nnodes",
            allowed="`4`, or `1:4` for at least 1 and at most 4",
            pet_nnodes=f"{os.environ['PET_NNODES']!r}",
        )
    hosts = (int(low), int(high or low))
    if hosts[1] == 1:
        return HostEnv("PET_NNODES", hosts, 0, "")
    node_rank = _required_number("PET_NODE_RANK") if "PET_NODE_RANK" in os.environ else None
    endpoint = os.environ.get("PET_RDZV_ENDPOINT") or _address("PET_MASTER_ADDR", "PET_MASTER_PORT")
    return HostEnv("Kubeflow" if _in_pod() else "PET_NNODES", hosts, node_rank, endpoint)


def _in_pod() -> bool:
    return "KUBERNETES_SERVICE_HOST" in os.environ


def _rank_is_pod() -> bool:
    """Return whether RANK and WORLD_SIZE refer to the pods of a PyTorchJob instead of ranks. In
    that case LOCAL_RANK is not set."""
    return (
        "RANK" in os.environ
        and "LOCAL_RANK" not in os.environ
        and ("PET_NNODES" in os.environ or _in_pod())
    )


def _address(name: str, port: str) -> str:
    if name not in os.environ:
        raise ConfigError(
            "the environment describes several hosts, but {name} is not set, so the address of the"
            " rendezvous is unknown",
            code="unknown-rendezvous-address",
            fix="set {name} to the first host's address, or `parallel.rdzv_endpoint` in the config",
            name=name,
        )
    return f"{os.environ[name]}:{_number(port, 29500)}"


def _required_number(name: str) -> int:
    if name not in os.environ:
        raise ConfigError(
            "the environment sets variables of a scheduler, but not {name}",
            code="incomplete-scheduler-environment",
            fix="start with `srun` or as a TrainJob of Kubeflow, or unset these variables",
            name=name,
        )
    return _number(name, 0)


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(
            "environment variable {name}={text}: expected an integer",
            code="invalid-environment",
            fix="start with `torchrun --nproc-per-node N -m paceline …`, or unset {name}",
            name=name,
            text=f"{text!r}",
        ) from error
