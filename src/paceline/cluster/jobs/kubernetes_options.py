"""The options of `paceline kubernetes`, checked, and the values that follow from the config where
an option is not given."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.cluster.jobs.hosts import (
    COMMON,
    Hosts,
    check_options,
    check_output,
    for_hosts,
    needed,
    plain,
    time_limit_s,
)
from paceline.config.load import to_yaml
from paceline.config.schema import Config
from paceline.core.errors import ConfigError

VARIANTS = ("kubeflow", "jobset")
#: How each option's value is read.
VALUES: dict[str, Callable[[str], Any]] = {
    **COMMON, "variant": str, "image": str, "namespace": str, "name": str, "runtime": str, "queue": str, "time": str,
    "ttl": int, "claim": str, "endpoint-claim": str, "data-claim": str, "cache-claim": str, "cpus-per-node": int,
    "memory-per-node": str, "shm-size": str, "grace-period": int, "user": int, "secret-env": str, "image-pull-secret": str,
    "service-account": str, "scheduler": str,
}  # fmt: skip
#: Options without a value.
FLAGS = ("coscheduling", "no-network-policy", "runtime-manifest")

WORK_FOLDER, DATA_FOLDER, CACHE_FOLDER, CONFIG_FOLDER = (
    "/workspace",
    "/data",
    "/cache",
    "/etc/paceline",
)
#: In `runtime.yaml`.
RUNTIME_NAME, RUNTIME_GRACE_S, RUNTIME_SHM, RUNTIME_USER = "paceline", 660, "8Gi", 1000
COSCHEDULING_RUNTIME_NAME = "paceline-coscheduling"

_LABEL = r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?"  # RFC 1035, which the API asks of a TrainJob's name
_SUBDOMAIN = r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?"  # RFC 1123
_QUANTITY = r"[1-9][0-9]*([KMGT]i|[kMGT])?"
_SECRET_ENV = rf"[A-Za-z_]\w*=({_SUBDOMAIN})/([-\w.]+)"
_WORDS = {
    "label": "lower-case letters, digits and -, a letter first",
    "subdomain": "lower-case letters, digits, - and .",
}
#: A pod's name, such as `NAME-endpoint-0-0-x7k2p`, has at most 63 characters.
_MAX_NAME_LENGTH = 44
#: Kubernetes refuses an object of more than 1 MiB, its own fields included.
_MAX_CONFIG_BYTES = 900 * 1024
#: After the checkpoint the processes still have to end.
_GRACE_MARGIN_S = 60
_GIB = 1 << 30
#: Resident memory of a rank without model and data: Python, torch, and on GPUs the libraries and
#: pinned buffers of CUDA.
_CPU_RANK_BYTES, _GPU_RANK_BYTES, _LOADER_BYTES = _GIB, 8 * _GIB, _GIB


@dataclass(frozen=True)
class KubernetesOptions:
    """The command line of `paceline kubernetes`.

    Args:
        claim: PersistentVolumeClaim that all pods mount as the working folder.
        endpoint_claim: the same, mounted by the pod of the rendezvous endpoint alone.
        memory: a quantity; requested, and also the limit if ``memory_is_limit``.
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
    claim: str | None
    endpoint_claim: str | None
    data_claim: str | None
    cache_claim: str | None
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
    output: Path | None


def make_options(
    path: Path | None,
    words: list[str],
    values: dict[str, Any],
    flags: dict[str, bool],
    state_bytes: Callable[[Config], int | None],
) -> KubernetesOptions:
    """Check the command line.

    Args:
        state_bytes: an upper bound on the memory that the model of a config takes on one rank, if
            known.

    Raises:
        ConfigError: an option is missing, unknown or wrong, or the config does not load or does not
            fit the pods.
    """
    needed(values, "kubernetes", "nodes", "gpus-per-node", "image")
    _check_words(values)
    name = values.get("name") or _name_from(path)
    plain("name", name, _LABEL, _WORDS["label"])
    if len(name) > _MAX_NAME_LENGTH:
        raise ConfigError(
            f"`--name {name}` has {len(name)} characters", allowed=f"at most {_MAX_NAME_LENGTH}"
        )
    variant = values.get("variant", "kubeflow")
    _check_variant(variant, values, flags)
    output = check_output(values.get("output"))
    hosts = for_hosts(path, words, values["nodes"], values["gpus-per-node"])
    _check_shared_storage(hosts, values)
    _check_config_size(hosts.config)
    runtime = values.get(
        "runtime", COSCHEDULING_RUNTIME_NAME if flags["coscheduling"] else RUNTIME_NAME
    )
    return KubernetesOptions(
        hosts=hosts,
        variant=variant,
        image=values["image"],
        name=name,
        namespace=values.get("namespace"),
        runtime=runtime,
        queue=values.get("queue"),
        time_s=time_limit_s(values["time"]) if "time" in values else None,
        ttl_s=values.get("ttl"),
        claim=values.get("claim"),
        endpoint_claim=values.get("endpoint-claim"),
        data_claim=values.get("data-claim"),
        cache_claim=values.get("cache-claim"),
        cpus=values.get("cpus-per-node", hosts.min_cpus),
        cpus_is_limit="cpus-per-node" in values,
        memory=values.get("memory-per-node")
        or f"{_memory_gib(hosts, state_bytes(hosts.config), values)}Gi",
        memory_is_limit="memory-per-node" in values,
        shm=values.get("shm-size", f"{_processes(hosts)}Gi"),
        grace_s=values.get(
            "grace-period", math.ceil(hosts.config.parallel.timeout_s) + _GRACE_MARGIN_S
        ),
        user=values.get("user", RUNTIME_USER),
        secret_env=_secret_env(values.get("secret-env")),
        image_pull_secret=values.get("image-pull-secret"),
        service_account=values.get("service-account"),
        network_policy=not flags["no-network-policy"],
        output=output,
    )


def check_kubernetes_options(tokens: list[str]) -> None:
    """Raise ConfigError for a token that is neither an option of the verb nor a key of the config."""
    check_options(tokens, "kubernetes", [*VALUES, *FLAGS, "json"])


def _check_words(values: dict[str, Any]) -> None:
    plain(
        "image",
        values["image"],
        r"[\w./:@-]+",
        "an image, such as registry.example.org/paceline:1.0",
    )
    for option in ("namespace", "queue", "scheduler"):
        if option in values:
            plain(option, values[option], _LABEL, _WORDS["label"])
    named = (
        "claim",
        "endpoint-claim",
        "data-claim",
        "cache-claim",
        "runtime",
        "image-pull-secret",
        "service-account",
    )
    for option in named:
        if option in values:
            plain(option, values[option], _SUBDOMAIN, _WORDS["subdomain"])
    for option in ("memory-per-node", "shm-size"):
        if option in values:
            plain(option, values[option], _QUANTITY, "a Kubernetes quantity, such as 64Gi")
    for option, low, high in (
        ("cpus-per-node", 1, 4096),
        ("grace-period", 1, 86_400),
        ("ttl", 0, 31_536_000),
        ("user", 0, 65_535),
    ):
        if option in values and not low <= values[option] <= high:
            raise ConfigError(
                f"`--{option} {values[option]}` is out of range", allowed=f"{low:,} to {high:,}"
            )


def _check_variant(variant: str, values: dict[str, Any], flags: dict[str, bool]) -> None:
    if variant not in VARIANTS:
        raise ConfigError(f"`--variant {variant}` is unknown", allowed=" or ".join(VARIANTS))
    only_kubeflow = [f"--{name}" for name in ("runtime",) if name in values] + [
        "--coscheduling"
    ] * flags["coscheduling"]
    if variant == "jobset" and only_kubeflow:
        raise ConfigError(
            f"`{only_kubeflow[0]}` is not supported with `--variant jobset`: it belongs to a"
            " runtime of Kubeflow Trainer",
            fix="leave it out; to start all pods together, use Kueue: `--queue NAME`",
        )
    only_jobset = [f"--{name}" for name in ("endpoint-claim", "ttl") if name in values]
    if variant == "kubeflow" and only_jobset:
        raise ConfigError(
            f"`{only_jobset[0]}` is not supported with `--variant kubeflow`: a TrainJob cannot"
            " set it",
            fix="leave it out, or give `--variant jobset`",
        )
    if "scheduler" in values:
        raise ConfigError(
            "`--scheduler` belongs to the runtime",
            fix="give it with `--runtime-manifest --coscheduling`",
        )
    if flags["coscheduling"] and "runtime" in values:
        raise ConfigError(
            "`--coscheduling` and `--runtime` name two runtimes", fix="give one of them"
        )


def _check_shared_storage(hosts: Hosts, values: dict[str, Any]) -> None:
    if "claim" in values and "endpoint-claim" in values:
        raise ConfigError(
            "`--claim` and `--endpoint-claim` both mount the working folder", fix="give one of them"
        )
    remote = "://" in str(hosts.config.checkpoint_dir or "")
    if hosts.nodes > 1 and not remote and "claim" not in values and "endpoint-claim" not in values:
        raise ConfigError(
            f"`--nodes {hosts.nodes}` needs storage for the checkpoints that outlives the pods",
            fix=(
                "name a PersistentVolumeClaim that all pods can mount (ReadWriteMany) with `--claim"
                " NAME`, or with `--variant jobset` one for the first pod alone (ReadWriteOnce)"
                " with `--endpoint-claim NAME`"
            ),
        )


def _check_config_size(config: Config) -> None:
    size = len(to_yaml(config).encode())
    if size > _MAX_CONFIG_BYTES:
        raise ConfigError(
            f"the config has {size:,} bytes, more than a ConfigMap takes",
            allowed=f"{_MAX_CONFIG_BYTES:,} bytes",
            fix="move long lists and templates into files on the claim",
        )


def _processes(hosts: Hosts) -> int:
    """Ranks and their loader processes in a pod."""
    return hosts.min_cpus


def _memory_gib(hosts: Hosts, state_bytes: int | None, values: dict[str, Any]) -> int:
    """An estimate of a pod's memory: /dev/shm, the processes, and the model's state.

    On a CPU each rank holds the state. On GPUs the host holds it once: the copy of a checkpoint
    that is being written.
    """
    ranks = hosts.ranks_per_node or 2
    state = state_bytes or 0
    model = _GPU_RANK_BYTES * ranks + state if hosts.gpus else (_CPU_RANK_BYTES + state) * ranks
    loaders = (_processes(hosts) - ranks) * _LOADER_BYTES
    return math.ceil((model + loaders) / _GIB) + _processes(hosts) * ("shm-size" not in values)


def _secret_env(text: str | None) -> tuple[tuple[str, str, str], ...]:
    if text is None:
        return ()
    entries = []
    for entry in text.split(","):
        plain(
            "secret-env",
            entry,
            _SECRET_ENV,
            "VARIABLE=SECRET/KEY, several with commas, as HF_TOKEN=hub/token",
        )
        variable, _, source = entry.partition("=")
        secret, _, key = source.partition("/")
        entries.append((variable, secret, key))
    return tuple(entries)


def _name_from(path: Path | None) -> str:
    """The file's name as a label: ``My_Run.yaml`` → ``my-run``."""
    stem = "paceline" if path is None else path.stem.lower()
    label = re.sub(r"[^a-z0-9]", "-", stem).strip("-")[:_MAX_NAME_LENGTH].rstrip("-")
    return label if label[:1].isalpha() else f"run-{label}"[:_MAX_NAME_LENGTH].rstrip("-")
