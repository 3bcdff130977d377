"""Parts of the manifests that TrainJobs and JobSets share. The policies of the pods are in
``runtime.yaml``."""

import copy
from importlib import resources
from typing import Any

import yaml

from paceline.cluster.jobs.kubernetes_options import (
    CACHE_FOLDER,
    CONFIG_FOLDER,
    DATA_FOLDER,
    WORK_FOLDER,
    KubernetesOptions,
)
from paceline.config.load import to_yaml

Object = dict[str, Any]

#: The label that the JobSet controller gives to each pod of a JobSet, and so of a TrainJob.
JOBSET_LABEL = "jobset.sigs.k8s.io/jobset-name"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_CONFIG_FILE = f"{CONFIG_FOLDER}/config.yaml"


def runtime_text() -> str:
    """The shipped ClusterTrainingRuntime, as its file has it."""
    return (resources.files(__package__) / "runtime.yaml").read_text(encoding="utf-8")


def job_template() -> Object:
    """A copy of the Job template in the shipped runtime: retry policies and pod template."""
    runtime = yaml.safe_load(runtime_text())
    return copy.deepcopy(runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"])


def metadata(options: KubernetesOptions, name: str, queued: bool = False) -> Object:
    """Name, namespace and labels of an object of the job."""
    labels = {
        "app.kubernetes.io/name": "paceline",
        "app.kubernetes.io/instance": options.name,
        **({QUEUE_LABEL: options.queue} if queued and options.queue else {}),
    }
    return {
        "name": name,
        **({"namespace": options.namespace} if options.namespace else {}),
        "labels": labels,
    }


def config_map(options: KubernetesOptions) -> Object:
    """The config, unchangeable: a pod that is replaced must read the one that the other pods have
    read."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(options, f"{options.name}-config"),
        "immutable": True,
        "data": {"config.yaml": to_yaml(options.hosts.config)},
    }


def network_policy(options: KubernetesOptions) -> Object:
    """Only pods of this job reach its pods: neither the rendezvous nor Gloo nor NCCL authenticates
    its peers.

    All ports, because Gloo and NCCL listen on ports that the kernel chooses.
    """
    own_pods = {"podSelector": {"matchLabels": {JOBSET_LABEL: options.name}}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(options, f"{options.name}-pods-only"),
        "spec": {**own_pods, "policyTypes": ["Ingress"], "ingress": [{"from": [own_pods]}]},
    }


def command(in_folder: bool = True) -> list[str]:
    """What the container runs. ``in_folder``: the pod template starts it in the working folder."""
    if in_folder:
        return ["paceline", "sft", _CONFIG_FILE]
    return ["/bin/sh", "-c", f"cd {WORK_FOLDER} && exec paceline sft {_CONFIG_FILE}"]


def environment(options: KubernetesOptions) -> list[Object]:
    """Variables that depend on the options: the cache of the Hugging Face hub, and secrets."""
    cache = (
        CACHE_FOLDER
        if options.cache_pvc
        else f"{WORK_FOLDER}/.cache/huggingface"
        if options.pvc
        else None
    )
    variables: list[Object] = [{"name": "HF_HOME", "value": cache}] if cache else []
    for variable, secret, key in options.secret_env:
        variables.append(
            {"name": variable, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
        )
    return variables


def pod_resources(options: KubernetesOptions) -> Object:
    """Requests, and as limits the quantities that the command line gives."""
    gpus = {"nvidia.com/gpu": str(options.hosts.gpus)} if options.hosts.gpus else {}
    requests = {"cpu": str(options.cpus), "memory": options.memory, **gpus}
    limited = {
        "cpu": options.cpus_is_limit,
        "memory": options.memory_is_limit,
        "nvidia.com/gpu": True,
    }
    limits = {name: amount for name, amount in requests.items() if limited[name]}
    return {"requests": requests, **({"limits": limits} if limits else {})}


def volumes(
    options: KubernetesOptions, work_claim: str | None
) -> tuple[list[Object], list[Object]]:
    """(volumes, mounts) that depend on the options. ``work_claim``: of the working folder; None: it
    ends with the pod."""
    sources: list[Object] = [
        {"name": "paceline-config", "configMap": {"name": f"{options.name}-config"}},
        {"name": "paceline-shm", "emptyDir": {"medium": "Memory", "sizeLimit": options.shm}},
        {"name": "paceline-work", **(_claim(work_claim) if work_claim else {"emptyDir": {}})},
    ]
    mounts: list[Object] = [
        {"name": "paceline-config", "mountPath": CONFIG_FOLDER, "readOnly": True},
        {"name": "paceline-work", "mountPath": WORK_FOLDER},
    ]
    if options.data_pvc:
        sources.append({"name": "paceline-data", **_claim(options.data_pvc, read_only=True)})
        mounts.append({"name": "paceline-data", "mountPath": DATA_FOLDER, "readOnly": True})
    if options.cache_pvc:
        sources.append({"name": "paceline-cache", **_claim(options.cache_pvc)})
        mounts.append({"name": "paceline-cache", "mountPath": CACHE_FOLDER})
    return sources, mounts


def user_context(options: KubernetesOptions) -> Object:
    """The user that the pod runs as, where it is not the runtime's."""
    if options.user == 0:
        return {"runAsNonRoot": False, "runAsUser": 0, "runAsGroup": 0}
    return {
        "runAsNonRoot": True,
        "runAsUser": options.user,
        "runAsGroup": options.user,
        "fsGroup": options.user,
    }


def access(options: KubernetesOptions) -> Object:
    """Fields of the pod that name its service account and the secret for its image."""
    return {
        **({"serviceAccountName": options.service_account} if options.service_account else {}),
        **(
            {"imagePullSecrets": [{"name": options.image_pull_secret}]}
            if options.image_pull_secret
            else {}
        ),
    }


def _claim(name: str, read_only: bool = False) -> Object:
    return {
        "persistentVolumeClaim": {"claimName": name, **({"readOnly": True} if read_only else {})}
    }
