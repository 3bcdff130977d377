"""`paceline kubernetes`: manifests that train a config on several nodes: a TrainJob of Kubeflow
Trainer and the runtime that it refers to, or a JobSet with the Job template of that runtime.

TrainJob: https://www.kubeflow.org/docs/components/trainer/ (version 2.2, which introduced
``runtimePatches``, or newer). JobSet: https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2/
"""

from pathlib import PurePosixPath
from typing import Any

import yaml

from paceline.cluster.jobs import pods
from paceline.cluster.jobs.kubernetes_options import (
    CACHE_FOLDER,
    COSCHEDULING_RUNTIME_NAME,
    DATA_FOLDER,
    RUNTIME_GRACE_S,
    RUNTIME_NAME,
    RUNTIME_USER,
    WORK_FOLDER,
    KubernetesOptions,
)
from paceline.cluster.jobs.pods import Object
from paceline.config.schema import Config


def manifest_text(options: KubernetesOptions) -> str:
    """The manifest as YAML."""
    return yaml.dump_all(
        manifest(options), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120
    )


def manifest(options: KubernetesOptions) -> list[dict[str, Any]]:
    """The objects, in the order in which they are created: the policy is in force before the first
    pod starts."""
    job = jobset(options) if options.variant == "jobset" else train_job(options)
    policy = [pods.network_policy(options)] if options.network_policy else []
    return [*policy, pods.config_map(options), job]


def notices(options: KubernetesOptions) -> list[tuple[str, str]]:
    """What the user should know about the job, as (level, text)."""
    notes: list[tuple[str, str]] = []
    if options.variant == "kubeflow" and options.runtime in (
        RUNTIME_NAME,
        COSCHEDULING_RUNTIME_NAME,
    ):
        flag = " --coscheduling" if options.runtime == COSCHEDULING_RUNTIME_NAME else ""
        text = (
            f"the TrainJob needs the runtime `{options.runtime}` in the cluster: `paceline"
            f" kubernetes --runtime-manifest{flag}`"
        )
        notes.append(("info", text))
    elif options.variant == "kubeflow":
        text = (
            "retry policies, user and environment of the pods are those of the runtime"
            f" `{options.runtime}`"
        )
        notes.append(("warning", f"{text}: check its backoffLimit and podFailurePolicy"))
    if options.variant == "kubeflow" and options.grace_s != RUNTIME_GRACE_S:
        text = (
            f"`terminationGracePeriodSeconds: {options.grace_s}` in a TrainJob needs Kubeflow"
            " Trainer 2.3 or newer"
        )
        notes.append(("info", f"{text}; 2.2 refuses the field"))
    if not options.memory_is_limit:
        text = (
            f"each pod requests {options.memory} of memory, an estimate from the config without a"
            " limit"
        )
        notes.append(("info", f"{text}; set request and limit with `--memory-per-node`"))
    if options.pvc is None and options.endpoint_pvc is None:
        notes.append(
            (
                "warning",
                (
                    "no `--pvc`: what the run writes to its local folder, such as the log, ends"
                    " with the pods"
                ),
            )
        )
    if options.queue:
        notes.append(
            (
                "info",
                (
                    "the job is created suspended; Kueue starts it when the queue"
                    f" `{options.queue}` admits it"
                ),
            )
        )
    if not options.network_policy:
        text = (
            "no NetworkPolicy: any pod that reaches the rendezvous port can run code in this job's"
            " pods"
        )
        notes.append(("warning", text))
    return notes + _path_notices(options)


def _path_notices(options: KubernetesOptions) -> list[tuple[str, str]]:
    mounted = [
        WORK_FOLDER,
        *([DATA_FOLDER] if options.data_pvc else []),
        *([CACHE_FOLDER] if options.cache_pvc else []),
    ]
    config = options.hosts.config
    notes = []
    outside = [
        path
        for path in _absolute_paths(config)
        if not any(map(PurePosixPath(path).is_relative_to, mounted))
    ]
    if outside:
        notes.append(
            (
                "warning",
                f"{', '.join(outside)}: outside {', '.join(mounted)}, so it must be in the image",
            )
        )
    if options.endpoint_pvc and options.hosts.nodes > 1:
        text = f"only the first pod mounts `{options.endpoint_pvc}`"
        notes.append(
            (
                "info",
                (
                    f"{text}: datasets and models must come from a hub, the image, `--data-pvc`"
                    " or `--cache-pvc`"
                ),
            )
        )
    return notes


def _absolute_paths(config: Config) -> list[str]:
    paths = [config.output_dir, config.model, *(source.path for source in config.sources())]
    return [path for path in paths if path.startswith(("/", "~"))]


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as a block, so that the config in the manifest can be read, and
    no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str", value, style="|" if "\n" in value else None
    )


_Dumper.add_representer(str, _text)

#: The same as Kubeflow Trainer's.
_PORT = 29500

_ENDPOINT_JOB = "endpoint"

#: Set by the Job controller on each pod of an Indexed Job.
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def jobset(options: KubernetesOptions) -> Object:
    """The JobSet: one Job of all pods; or, where only the first pod has a claim, one of that pod
    and one of the others."""
    if options.endpoint_pvc is None:
        jobs = [
            _replicated_job(
                options, "node", options.hosts.nodes, options.pvc, _endpoint(options, "node")
            )
        ]
    else:
        endpoint = _endpoint(options, _ENDPOINT_JOB)
        jobs = [_replicated_job(options, _ENDPOINT_JOB, 1, options.endpoint_pvc, endpoint)]
        if options.hosts.nodes > 1:
            jobs.append(_replicated_job(options, "node", options.hosts.nodes - 1, None, endpoint))
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": pods.metadata(options, options.name, queued=True),
        "spec": {
            **({"suspend": True} if options.queue else {}),  # until Kueue admits it
            **({"ttlSecondsAfterFinished": options.ttl_s} if options.ttl_s is not None else {}),
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": 0},
            "replicatedJobs": jobs,
        },
    }


def _endpoint(options: KubernetesOptions, job: str) -> str:
    """The name of the first pod of a replicated job, which it keeps when it is replaced."""
    return f"{options.name}-{job}-0-0.{options.name}"


def _replicated_job(
    options: KubernetesOptions, name: str, count: int, work_claim: str | None, endpoint: str
) -> Object:
    template = pods.job_template()
    del template["metadata"]  # Kubeflow Trainer's label
    template["spec"] = {
        "completions": count,
        "parallelism": count,
        **({"activeDeadlineSeconds": options.time_s} if options.time_s else {}),
        **template["spec"],
        "backoffLimitPerIndex": options.hosts.config.recovery.max_restarts,
    }
    pod = template["spec"]["template"]["spec"]
    pod["terminationGracePeriodSeconds"] = options.grace_s
    pod["securityContext"].update(pods.user_context(options))
    if options.user == 0:
        del pod["securityContext"]["fsGroup"], pod["securityContext"]["fsGroupChangePolicy"]
    pod.update(pods.access(options))
    sources, mounts = pods.volumes(options, work_claim)
    pod["volumes"] = [
        *(volume for volume in pod["volumes"] if volume["name"] != "paceline-shm"),
        *sources,
    ]
    container = pod["containers"][0]
    first = {
        "name": container["name"],
        "image": options.image,
        "command": pods.command(),
        "workingDir": container["workingDir"],
    }
    container.update(
        env=[*container["env"], *_place(options, name, endpoint), *pods.environment(options)],
        volumeMounts=[*container["volumeMounts"], *mounts],
        resources=pods.pod_resources(options),
        ports=[{"name": "rendezvous", "containerPort": _PORT}],
    )
    pod["containers"] = [
        {**first, **{key: value for key, value in container.items() if key not in first}}
    ]
    return {"name": name, "replicas": 1, "template": template}


def _place(options: KubernetesOptions, name: str, endpoint: str) -> list[Object]:
    """The variables that Kubeflow Trainer sets: the number of pods, this pod's number, and the
    rendezvous endpoint.

    Beside a Job for the endpoint alone, the indexes of the other pods start at 0 too: they take the
    numbers that are free.
    """
    index = (
        {"value": "0"}
        if name == _ENDPOINT_JOB
        else {"valueFrom": {"fieldRef": {"fieldPath": _INDEX}}}
    )
    is_numbered = options.endpoint_pvc is None or name == _ENDPOINT_JOB
    return [
        {"name": "PET_NNODES", "value": str(options.hosts.nodes)},
        *([{"name": "PET_NODE_RANK", **index}] if is_numbered else []),
        {"name": "PET_MASTER_ADDR", "value": endpoint},
        {"name": "PET_MASTER_PORT", "value": str(_PORT)},
    ]


#: How long the scheduler holds back pods of a job whose other pods do not fit.
_GANG_TIMEOUT_S = 300


def runtime_manifest(coscheduling: bool, scheduler: str | None) -> str:
    """The shipped ClusterTrainingRuntime; with ``coscheduling`` one whose pods are scheduled
    together or not at all.

    Args:
        scheduler: the scheduler's name, where the coscheduling plugin is not in the default
            scheduler.
    """
    text = pods.runtime_text()
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


def train_job(options: KubernetesOptions) -> Object:
    """The TrainJob."""
    ours = options.runtime in (RUNTIME_NAME, COSCHEDULING_RUNTIME_NAME)
    environment = pods.environment(options)
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": pods.metadata(options, options.name, queued=True),
        "spec": {
            **({"suspend": True} if options.queue else {}),  # until Kueue admits it
            **({"activeDeadlineSeconds": options.time_s} if options.time_s else {}),
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": "ClusterTrainingRuntime",
                "name": options.runtime,
            },
            "trainer": {
                "image": options.image,
                "command": pods.command(in_folder=ours),
                **({"env": environment} if environment else {}),
                "numNodes": options.hosts.nodes,
                "resourcesPerNode": pods.pod_resources(options),
            },
            "runtimePatches": [_patch(options, ours)],
        },
    }


def _patch(options: KubernetesOptions, ours: bool) -> Object:
    """The fields of the pods that depend on the options. Those that are the runtime's already are
    left out."""
    sources, mounts = pods.volumes(options, options.pvc)
    if not ours:
        mounts.append({"name": "paceline-shm", "mountPath": "/dev/shm"})
    pod = {
        **(
            {"terminationGracePeriodSeconds": options.grace_s}
            if not ours or options.grace_s != RUNTIME_GRACE_S
            else {}
        ),
        **({"securityContext": pods.user_context(options)} if options.user != RUNTIME_USER else {}),
        **pods.access(options),
        "containers": [{"name": "node", "volumeMounts": mounts}],
        "volumes": sources,
    }
    template = {
        "spec": {
            "replicatedJobs": [{"name": "node", "template": {"spec": {"template": {"spec": pod}}}}]
        }
    }
    return {"manager": "paceline/cli", "trainingRuntimeSpec": {"template": template}}
