"""`paceline kubernetes`: a manifest of Kubeflow Trainer that trains a config on several nodes.

Fields: https://www.kubeflow.org/docs/components/trainer/ (`TrainJob` of v2.2 and later, which has `runtimePatches`). Where this
pod stands among the others it learns from the runtime's ``PET_`` variables (:mod:`paceline.world.env`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from paceline.config.load import to_yaml
from paceline.config.schema import Config
from paceline.core.errors import EXIT_DONE, ConfigError
from paceline.launch.cluster import COMMON, Hosts, check_options, check_output, for_hosts, needed, plain, write

#: The options of the verb: how each is read.
VALUES: dict[str, Callable[[str], Any]] = {
    **COMMON, "image": str, "namespace": str, "name": str, "claim": str, "runtime": str, "cpus-per-node": int,
}  # fmt: skip
_LABEL = r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?"  # RFC 1035, which the API asks of a TrainJob's name
#: The job's name stands in the names of its pods and their service, `NAME-node-0-0`, of 63 characters at most.
_LONGEST_NAME = 50
_SUBDOMAIN = r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?"  # RFC 1123
_CONFIG_FOLDER = "/etc/paceline"
_WORK_FOLDER = "/workspace"
#: An object of more than 1 MiB is refused by Kubernetes, its own fields included.
_LARGEST_CONFIG_BYTES = 900 * 1024


@dataclass(frozen=True)
class Request:
    """What the command line says. ``claim``: the volume claim on which data and checkpoints lie."""

    hosts: Hosts
    image: str
    name: str
    namespace: str | None
    claim: str | None
    runtime: str
    cpus: int | None
    output: Path | None


def make_request(path: Path | None, words: list[str], values: dict[str, Any]) -> Request:
    """Check the words of the command line.

    Raises:
        ConfigError: an option is missing, unknown or wrong, or the config does not load or does not fit the nodes.
    """
    needed(values, "kubernetes", "nodes", "gpus-per-node", "image")
    name = values.get("name") or _name_from(path)
    label = "small letters, digits and -, a letter first"
    plain("name", name, _LABEL, label)
    if len(name) > _LONGEST_NAME:
        raise ConfigError(f"`--name {name}` has {len(name)} characters", allowed=f"at most {_LONGEST_NAME}")
    plain("image", values["image"], r"[\w./:@-]+", "an image, as registry.example.org/paceline:1.0")
    if "namespace" in values:
        plain("namespace", values["namespace"], _LABEL, label)
    for one in ("claim", "runtime"):
        if one in values:
            plain(one, values[one], _SUBDOMAIN, "small letters, digits, - and .")
    cpus = values.get("cpus-per-node")
    if cpus is not None and not 1 <= cpus <= 4096:
        raise ConfigError(f"`--cpus-per-node {cpus}` is out of range", allowed="1 to 4,096")
    output = check_output(values.get("output"))
    hosts = for_hosts(path, words, values["nodes"], values["gpus-per-node"])
    if hosts.nodes > 1 and "claim" not in values:
        raise ConfigError(
            f"`--nodes {hosts.nodes}` needs a volume that all hosts see: each reads the checkpoints that all have written",
            fix="name a PersistentVolumeClaim of access mode ReadWriteMany with `--claim NAME`",
        )
    size = len(to_yaml(hosts.config).encode())
    if size > _LARGEST_CONFIG_BYTES:
        raise ConfigError(
            f"the config has {size:,} bytes, more than a ConfigMap takes",
            allowed=f"{_LARGEST_CONFIG_BYTES:,} bytes",
            fix="move long lists and templates into files on the claim",
        )
    runtime = values.get("runtime", "torch-distributed")
    return Request(hosts, values["image"], name, values.get("namespace"), values.get("claim"), runtime, cpus, output)


def check_kubernetes_options(tokens: list[str]) -> None:
    """Raise ConfigError for a word that is no option here, and no key of the config."""
    check_options(tokens, "kubernetes", [*VALUES, "json"])


def kubernetes(request: Request, as_json: bool) -> int:
    """Write the manifest, or print it. Returns the exit code."""
    for level, text in [*request.hosts.loaded.notices, *_notices(request)]:
        print(f"{'warning: ' if level == 'warning' else ''}{text}", file=sys.stderr)
    text = yaml.dump_all(manifest(request), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    if request.output is not None:
        write(request.output, text)
    if as_json:
        path = None if request.output is None else str(request.output)
        print(json.dumps({"manifest": text, "path": path}, indent=2))
    elif request.output is not None:
        print(f"written: {request.output}\nstart it with: kubectl apply -f {request.output}")
    else:
        print(text, end="")
    return EXIT_DONE


def manifest(request: Request) -> list[dict[str, Any]]:
    """The objects: a ConfigMap that holds the config, and the TrainJob that mounts it."""
    place = {"namespace": request.namespace} if request.namespace else {}
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{request.name}-config", **place},
        "data": {"config.yaml": to_yaml(request.hosts.config)},
    }
    job = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": request.name, **place},
        "spec": {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime", "name": request.runtime},
            "trainer": _trainer(request),
            "runtimePatches": [{"manager": "paceline", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [
                {"name": "node", "template": {"spec": {"template": {"spec": _pod(request)}}}},
            ]}}}}],
        },
    }  # fmt: skip
    return [config_map, job]


def _trainer(request: Request) -> dict[str, Any]:
    # `exec`: the launcher is the container's first process, so that it gets the SIGTERM of an eviction.
    command = f"cd {_WORK_FOLDER} && exec paceline sft {_CONFIG_FOLDER}/config.yaml"
    resources = {
        **({"cpu": str(request.cpus)} if request.cpus else {}),
        **({"nvidia.com/gpu": str(request.hosts.gpus)} if request.hosts.gpus else {}),
    }
    return {
        "image": request.image,
        "command": ["/bin/sh", "-c", command],
        "numNodes": request.hosts.nodes,
        **({"resourcesPerNode": {"requests": resources, "limits": resources}} if resources else {}),
    }


def _pod(request: Request) -> dict[str, Any]:
    # Loader processes and NCCL meet in /dev/shm, of which a container has 64 MB by itself.
    volumes: list[dict[str, Any]] = [
        {"name": "paceline-config", "configMap": {"name": f"{request.name}-config"}},
        {"name": "paceline-shm", "emptyDir": {"medium": "Memory"}},
        {"name": "paceline-work", "emptyDir": {}},
    ]
    if request.claim is not None:
        volumes[-1] = {"name": "paceline-work", "persistentVolumeClaim": {"claimName": request.claim}}
    mounts = [
        {"name": "paceline-config", "mountPath": _CONFIG_FOLDER, "readOnly": True},
        {"name": "paceline-shm", "mountPath": "/dev/shm"},
        {"name": "paceline-work", "mountPath": _WORK_FOLDER},
    ]
    return {"volumes": volumes, "containers": [{"name": "node", "volumeMounts": mounts}]}


def _notices(request: Request) -> list[tuple[str, str]]:
    found = []
    if request.claim is None:
        text = (
            "no `--claim`: checkpoints and the model end with the pods, and several hosts do not see each other's checkpoints"
        )
        found.append(("warning", text))
    outside = [one for one in _paths(request.hosts.config) if not PurePosixPath(one).is_relative_to(_WORK_FOLDER)]
    if outside:
        text = f"{', '.join(outside)}: looked for in the image, not on the claim, which is {_WORK_FOLDER}"
        found.append(("warning", text))
    return found


def _paths(config: Config) -> list[str]:
    """Absolute paths that the config names."""
    datasets = config.dataset if isinstance(config.dataset, list) else [config.dataset]
    named = [config.output_dir, config.model, *(one if isinstance(one, str) else one.path for one in datasets)]
    return [one for one in named if one.startswith(("/", "~"))]


def _name_from(path: Path | None) -> str:
    """The file's name as a label: ``My_Run.yaml`` → ``my-run``."""
    stem = "paceline" if path is None else path.stem.lower()
    label = "".join(one if one.isascii() and one.isalnum() else "-" for one in stem).strip("-")[:_LONGEST_NAME].rstrip("-")
    return label if label[:1].isalpha() else f"run-{label}".rstrip("-")


class _Dumper(yaml.SafeDumper):
    """Text of several lines stands as it is, so that the config in the manifest can be read; no part refers to another."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)
