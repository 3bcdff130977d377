"""A JobSet without Kubeflow Trainer. It has the Job template of the shipped runtime, with the
values of this config.

API: https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2/
"""

from paceline.cluster.jobs import pods
from paceline.cluster.jobs.kubernetes_options import KubernetesOptions
from paceline.cluster.jobs.pods import Object

#: The same as Kubeflow Trainer's.
_PORT = 29500
_ENDPOINT_JOB = "endpoint"
#: Set by the Job controller on each pod of an Indexed Job.
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def jobset(options: KubernetesOptions) -> Object:
    """The JobSet: one Job of all pods; or, where only the first pod has a claim, one of that pod
    and one of the others."""
    if options.endpoint_claim is None:
        jobs = [
            _replicated_job(
                options, "node", options.hosts.nodes, options.claim, _endpoint(options, "node")
            )
        ]
    else:
        endpoint = _endpoint(options, _ENDPOINT_JOB)
        jobs = [_replicated_job(options, _ENDPOINT_JOB, 1, options.endpoint_claim, endpoint)]
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
    is_numbered = options.endpoint_claim is None or name == _ENDPOINT_JOB
    return [
        {"name": "PET_NNODES", "value": str(options.hosts.nodes)},
        *([{"name": "PET_NODE_RANK", **index}] if is_numbered else []),
        {"name": "PET_MASTER_ADDR", "value": endpoint},
        {"name": "PET_MASTER_PORT", "value": str(_PORT)},
    ]
