"""`paceline kubernetes`: manifests that train a config on several nodes: a TrainJob of Kubeflow
Trainer and the runtime that it refers to, or a JobSet with the Job template of that runtime.

TrainJob: https://www.kubeflow.org/docs/components/trainer/ (version 2.2, which introduced
``runtimePatches``, or newer). JobSet: https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2/

The objects are in ``job.yaml.jinja``, the pods in ``pod.yaml.jinja``, and the policies of the pods
in ``runtime.yaml``.
"""

from pathlib import Path, PurePosixPath
from typing import Any, TypedDict

import yaml
from pydantic import JsonValue

from paceline.cluster.jobs.hosts import template
from paceline.cluster.jobs.kubernetes_options import (
    CACHE_FOLDER,
    CONFIG_FOLDER,
    COSCHEDULING_RUNTIME_NAME,
    DATA_FOLDER,
    RUNTIME_GRACE_S,
    RUNTIME_NAME,
    RUNTIME_USER,
    WORK_FOLDER,
    KubernetesOptions,
)
from paceline.config.load import to_yaml


class PodFields(TypedDict):
    """The fields of a pod that depend on the options, as in ``pod.yaml.jinja``."""

    command: list[str]
    env: list[JsonValue] | None
    rendezvous_env: list[JsonValue]
    resources: JsonValue
    volumes: list[JsonValue]
    volumeMounts: list[JsonValue]
    access: dict[str, JsonValue] | None
    securityContext: dict[str, JsonValue]


#: The same as Kubeflow Trainer's.
_PORT = 29500


def manifest_text(options: KubernetesOptions) -> str:
    """Return the manifest as YAML."""
    return yaml.dump_all(
        manifest(options), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120
    )


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as a block, so that the config in the manifest is readable, and
    no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str", value, style="|" if "\n" in value else None
    )


_Dumper.add_representer(str, _text)


def manifest(options: KubernetesOptions) -> list[dict[str, JsonValue]]:
    """Return the objects in the order in which they are created."""
    is_own_runtime = options.runtime in (RUNTIME_NAME, COSCHEDULING_RUNTIME_NAME)
    values = {
        "options": options,
        "pod": _pod(options, options.pvc, starts_in_work_dir=is_own_runtime),
        "replicated_jobs": _replicated_jobs(options) if options.variant == "jobset" else [],
        "is_own_runtime": is_own_runtime,
        "runtime_grace_s": RUNTIME_GRACE_S,
        "runtime_user": RUNTIME_USER,
        "shm_mounts": [] if is_own_runtime else [{"name": "paceline-shm", "mountPath": "/dev/shm"}],
    }
    objects = list(yaml.safe_load_all(template("job.yaml.jinja").render(values)))
    objects[-2]["data"] = {"config.yaml": to_yaml(options.hosts.config)}
    return objects


def _pod(
    options: KubernetesOptions,
    work_pvc: str | None,
    job: str = "node",
    endpoint: str = "",
    starts_in_work_dir: bool = True,
) -> PodFields:
    """Return the fields of a pod.

    Args:
        work_pvc: volume claim of the working folder; None: the folder is deleted with the pod.
        job: the replicated job that the pod belongs to.
        endpoint: host name of the rendezvous endpoint.
        starts_in_work_dir: the pod template sets the working folder.
    """
    values = {
        "options": options,
        "work_pvc": work_pvc,
        "job": job,
        "endpoint": endpoint,
        "port": _PORT,
        "starts_in_work_dir": starts_in_work_dir,
        "config_dir": CONFIG_FOLDER,
        "work_dir": WORK_FOLDER,
        "data_dir": DATA_FOLDER,
        "cache_dir": CACHE_FOLDER,
    }
    pod: PodFields = yaml.safe_load(template("pod.yaml.jinja").render(values))
    return pod


def _replicated_jobs(options: KubernetesOptions) -> list[dict[str, JsonValue]]:
    """Return one Job of all pods or, if only the first pod has a volume claim, one of that pod and
    one of the others. A pod that is replaced keeps its host name."""
    nodes = options.hosts.nodes
    sizes = {"node": (nodes, options.pvc)}
    if options.endpoint_pvc is not None:
        sizes = {"endpoint": (1, options.endpoint_pvc), "node": (nodes - 1, None)}
    endpoint = f"{options.name}-{next(iter(sizes))}-0-0.{options.name}"
    return [
        _replicated_job(options, name, count, _pod(options, work_pvc, name, endpoint))
        for name, (count, work_pvc) in sizes.items()
        if count
    ]


def _replicated_job(
    options: KubernetesOptions, name: str, count: int, fields: PodFields
) -> dict[str, JsonValue]:
    """Fit the Job template of the shipped runtime (retry policies and pod template) to the
    options."""
    runtime = yaml.safe_load(runtime_text())
    job = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    pod["terminationGracePeriodSeconds"] = options.grace_s
    pod["securityContext"].update(fields["securityContext"])
    if options.user == 0:
        del pod["securityContext"]["fsGroup"], pod["securityContext"]["fsGroupChangePolicy"]
    pod.update(fields["access"] or {})
    own_volumes = [volume for volume in pod["volumes"] if volume["name"] != "paceline-shm"]
    pod["volumes"] = own_volumes + fields["volumes"]
    container = pod["containers"][0]
    container.update(
        env=container["env"] + fields["rendezvous_env"] + (fields["env"] or []),
        volumeMounts=container["volumeMounts"] + fields["volumeMounts"],
        resources=fields["resources"],
        ports=[{"name": "rendezvous", "containerPort": _PORT}],
    )
    first = {"name": container["name"], "image": options.image, "command": fields["command"]}
    pod["containers"] = [first | container]
    deadline = {"activeDeadlineSeconds": options.time_s} if options.time_s else {}
    spec = {"completions": count, "parallelism": count, **deadline, **job}
    spec["backoffLimitPerIndex"] = options.hosts.config.recovery.max_restarts
    return {"name": name, "replicas": 1, "template": {"spec": spec}}


def notices(options: KubernetesOptions) -> list[tuple[str, str]]:
    """Return notices (level, text) about the job."""
    notes: list[tuple[str, str]] = []
    if options.variant == "kubeflow":
        notes += _runtime_notices(options)
    if not options.memory_is_limit:
        text = (
            f"each pod requests {options.memory} of memory, estimated from the config, without a"
            " limit; set request and limit with `--memory-per-node`"
        )
        notes.append(("info", text))
    if options.pvc is None and options.endpoint_pvc is None:
        text = "no `--pvc`: files in the local folder of the run, such as the log, are deleted"
        notes.append(("warning", f"{text} with the pods"))
    if options.queue:
        text = f"the job is created suspended; Kueue starts it when the queue `{options.queue}`"
        notes.append(("info", f"{text} admits it"))
    if not options.network_policy:
        text = "no NetworkPolicy: any pod that can connect to the rendezvous port can run code in"
        notes.append(("warning", f"{text} the pods of this job"))
    config, mounted = options.hosts.config, [WORK_FOLDER]
    if options.data_pvc:
        mounted.append(DATA_FOLDER)
    if options.cache_pvc:
        mounted.append(CACHE_FOLDER)
    outside = [
        path
        for path in (config.output_dir, config.model, *(source.path for source in config.sources()))
        if path.startswith(("/", "~")) and not any(map(PurePosixPath(path).is_relative_to, mounted))
    ]
    if outside:
        text = f"{', '.join(outside)}: outside of {', '.join(mounted)}, so it must be in the image"
        notes.append(("warning", text))
    if options.endpoint_pvc and options.hosts.nodes > 1:
        text = (
            f"only the first pod mounts `{options.endpoint_pvc}`: datasets and models must come"
            " from a hub, the image, `--data-pvc` or `--cache-pvc`"
        )
        notes.append(("info", text))
    return notes


def _runtime_notices(options: KubernetesOptions) -> list[tuple[str, str]]:
    if options.runtime in (RUNTIME_NAME, COSCHEDULING_RUNTIME_NAME):
        flag = " --coscheduling" if options.runtime == COSCHEDULING_RUNTIME_NAME else ""
        text = f"the TrainJob requires the runtime `{options.runtime}` in the cluster: `paceline"
        notes = [("info", f"{text} kubernetes --runtime-manifest{flag}`")]
    else:
        text = "retry policies, user and environment of the pods come from the runtime"
        text += f" `{options.runtime}`: check its backoffLimit and podFailurePolicy"
        notes = [("warning", text)]
    if options.grace_s != RUNTIME_GRACE_S:
        text = f"`terminationGracePeriodSeconds: {options.grace_s}` in a TrainJob requires Kubeflow"
        notes.append(("info", f"{text} Trainer 2.3 or newer; 2.2 rejects the field"))
    return notes


def runtime_text() -> str:
    """Return the shipped ClusterTrainingRuntime, as its file has it."""
    return (Path(__file__).parent / "runtime.yaml").read_text(encoding="utf-8")


#: How long the scheduler holds back pods of a job if its other pods do not fit.
_GANG_TIMEOUT_S = 300


def runtime_manifest(coscheduling: bool, scheduler: str | None) -> str:
    """Return the shipped ClusterTrainingRuntime; with ``coscheduling``, one whose pods are
    scheduled together or not at all.

    Args:
        scheduler: name of the scheduler, if the coscheduling plugin is not in the default one.
    """
    text = runtime_text()
    if not coscheduling:
        return text
    gang = (
        f"  podGroupPolicy:\n    coscheduling:\n      scheduleTimeoutSeconds: {_GANG_TIMEOUT_S}\n"
    )
    text = text.replace(f"  name: {RUNTIME_NAME}\n", f"  name: {COSCHEDULING_RUNTIME_NAME}\n", 1)
    text = text.replace("spec:\n  mlPolicy:", f"spec:\n{gang}  mlPolicy:", 1)
    text = text.replace(
        "kubernetes --runtime-manifest", "kubernetes --runtime-manifest --coscheduling", 1
    )
    if scheduler is not None:
        place = "                  automountServiceAccountToken:"
        text = text.replace(place, f"                  schedulerName: {scheduler}\n{place}", 1)
    return text
