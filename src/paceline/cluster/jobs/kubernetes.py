"""`paceline kubernetes`: manifests that train a config on several nodes, for Kubeflow Trainer or as
a plain JobSet."""

from pathlib import PurePosixPath
from typing import Any

import yaml

from paceline.cluster.jobs import pods
from paceline.cluster.jobs.jobset import jobset
from paceline.cluster.jobs.kubeflow import train_job
from paceline.cluster.jobs.kubernetes_options import (
    CACHE_FOLDER,
    COSCHEDULING_RUNTIME_NAME,
    DATA_FOLDER,
    RUNTIME_GRACE_S,
    RUNTIME_NAME,
    WORK_FOLDER,
    KubernetesOptions,
)
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
    if options.claim is None and options.endpoint_claim is None:
        notes.append(
            (
                "warning",
                (
                    "no `--claim`: what the run writes to its local folder, such as the log, ends"
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
        *([DATA_FOLDER] if options.data_claim else []),
        *([CACHE_FOLDER] if options.cache_claim else []),
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
    if options.endpoint_claim and options.hosts.nodes > 1:
        text = f"only the first pod mounts `{options.endpoint_claim}`"
        notes.append(
            (
                "info",
                (
                    f"{text}: datasets and models must come from a hub, the image, `--data-claim`"
                    " or `--cache-claim`"
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
