"""The options of a Kubernetes manifest, and the defaults that follow from the config."""

import math
import re
from dataclasses import dataclass
from pathlib import Path

from paceline.cluster.jobs.hosts import Hosts
from paceline.config.load import to_yaml
from paceline.config.schema import Config
from paceline.core.errors import ConfigError

WORK_FOLDER, DATA_FOLDER, CACHE_FOLDER, CONFIG_FOLDER = (
    "/workspace",
    "/data",
    "/cache",
    "/etc/paceline",
)
#: As in `runtime.yaml`.
RUNTIME_NAME, RUNTIME_GRACE_S, RUNTIME_USER = "paceline", 660, 1000
COSCHEDULING_RUNTIME_NAME = "paceline-coscheduling"

#: A pod's name, such as `NAME-endpoint-0-0-x7k2p`, has at most 63 characters.
MAX_NAME_LENGTH = 44
#: Kubernetes rejects objects of more than 1 MiB, including their own fields.
_MAX_CONFIG_BYTES = 900 * 1024
#: Time for the processes to end after the checkpoint.
_GRACE_MARGIN_S = 60
_GIB = 1 << 30
#: Resident memory of a rank without model and data: Python, torch, and on GPUs the libraries and
#: pinned buffers of CUDA.
_CPU_RANK_BYTES, _GPU_RANK_BYTES, _LOADER_BYTES = _GIB, 8 * _GIB, _GIB


@dataclass(frozen=True)
class KubernetesOptions:
    """A job.

    Args:
        pvc: PersistentVolumeClaim that all pods mount as the working folder.
        endpoint_pvc: the same, but only the pod of the rendezvous endpoint mounts it.
        memory: quantity to request; also the limit if ``memory_is_limit``.
        secret_env: (variable, secret, key of the secret).
        time_s: after this time the job ends with a checkpoint.
    """

    hosts: Hosts
    variant: str
    image: str
    name: str
    namespace: str | None
    runtime: str
    queue: str | None
    time_s: int | None
    ttl_s: int | None
    pvc: str | None
    endpoint_pvc: str | None
    data_pvc: str | None
    cache_pvc: str | None
    cpus: int
    cpus_is_limit: bool
    memory: str
    memory_is_limit: bool
    shm: str
    grace_s: int
    user: int
    secret_env: tuple[tuple[str, str, str], ...]
    image_pull_secret: str | None
    service_account: str | None
    network_policy: bool


def check_config_size(config: Config) -> None:
    """Raise ConfigError if the config is too large for a ConfigMap."""
    size = len(to_yaml(config).encode())
    if size > _MAX_CONFIG_BYTES:
        raise ConfigError(
            "the config has {size} bytes, which is too large for a ConfigMap",
            code="config-too-large",
            allowed="at most {max_config_bytes} bytes",
            fix="move long lists and templates into files on the volume",
            size=f"{size:,}",
            max_config_bytes=f"{_MAX_CONFIG_BYTES:,}",
        )


def default_shm(hosts: Hosts) -> str:
    """Return the size of /dev/shm: 1 GiB for each process of a pod."""
    return f"{hosts.min_cpus}Gi"


def default_grace_s(config: Config) -> int:
    """Return how long Kubernetes waits for the checkpoint before it kills the pods."""
    return math.ceil(config.parallel.collective_timeout_s) + _GRACE_MARGIN_S


def estimate_memory(hosts: Hosts, state_bytes: int | None, counts_shm: bool) -> str:
    """Estimate a pod's memory as a quantity: its processes, the state of the model, and /dev/shm.

    On CPUs each rank has the state in host memory. With GPUs, the host has it once: the staging
    buffer of a checkpoint.

    Args:
        state_bytes: an upper bound on the memory of the model on one rank, if known.
        counts_shm: /dev/shm has the default size, which is part of the pod's memory.
    """
    ranks, processes = hosts.ranks_per_node or 2, hosts.min_cpus
    state = state_bytes or 0
    model = _GPU_RANK_BYTES * ranks + state if hosts.gpus else (_CPU_RANK_BYTES + state) * ranks
    loaders = (processes - ranks) * _LOADER_BYTES
    return f"{math.ceil((model + loaders) / _GIB) + processes * counts_shm}Gi"


def name_from(path: Path | None) -> str:
    """Return the name of the file as a label: ``My_Run.yaml`` → ``my-run``."""
    stem = "paceline" if path is None else path.stem.lower()
    label = re.sub(r"[^a-z0-9]", "-", stem).strip("-")[:MAX_NAME_LENGTH].rstrip("-")
    return label if label[:1].isalpha() else f"run-{label}"[:MAX_NAME_LENGTH].rstrip("-")
