"""A TrainJob of Kubeflow Trainer, and the runtime that it refers to.

API: https://www.kubeflow.org/docs/components/trainer/ (version 2.2, which introduced
``runtimePatches``, or newer).
"""

from paceline.cluster.jobs import pods
from paceline.cluster.jobs.kubernetes_options import (
    COSCHEDULING_RUNTIME_NAME,
    RUNTIME_GRACE_S,
    RUNTIME_NAME,
    RUNTIME_USER,
    KubernetesOptions,
)
from paceline.cluster.jobs.pods import Object

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
    sources, mounts = pods.volumes(options, options.claim)
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
