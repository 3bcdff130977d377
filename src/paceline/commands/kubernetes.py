"""`paceline kubernetes`: write manifests for Kubernetes."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.commands.job_options import TimeLimit, add_hosts, check_required
from paceline.commands.options import (
    Choice,
    Integer,
    InvalidValue,
    OptionParser,
    OutputFile,
    Pattern,
    add_config,
    config_and_overrides,
    print_notices,
)
from paceline.commands.reports import write_output
from paceline.core.errors import EXIT_DONE, ConfigError

if TYPE_CHECKING:
    from paceline.cluster.jobs.hosts import Hosts
    from paceline.cluster.jobs.kubernetes_options import KubernetesOptions

_VARIANTS = ("kubeflow", "jobset")
_SUBDOMAIN_REGEX = r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?"  # RFC 1123
#: RFC 1035, which the API requires of a TrainJob's name.
_LABEL = Pattern(
    r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", "lower-case letters, digits and -, starting with a letter"
)
_SUBDOMAIN = Pattern(_SUBDOMAIN_REGEX, "lower-case letters, digits, - and .")
_QUANTITY = Pattern(r"[1-9][0-9]*([KMGT]i|[kMGT])?", "a Kubernetes quantity, such as 64Gi")
_IMAGE = Pattern(r"[\w./:@-]+", "an image, such as registry.example.org/paceline:1.0")
_SCHEDULER = Pattern(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", "the name of a scheduler")
_SECRET_ENV = Pattern(
    rf"[A-Za-z_]\w*=({_SUBDOMAIN_REGEX})/([-\w.]+)",
    "comma-separated VARIABLE=SECRET/KEY, e.g. HF_TOKEN=hub/token",
)


@dataclass(frozen=True)
class JobName:
    """The name of a job, which is a prefix of the names of its pods."""

    allowed: str = _LABEL.allowed

    def __call__(self, text: str) -> str:
        from paceline.cluster.jobs.kubernetes_options import MAX_NAME_LENGTH

        _LABEL(text)
        if len(text) > MAX_NAME_LENGTH:
            raise InvalidValue(f"has {len(text)} characters", allowed=f"at most {MAX_NAME_LENGTH}")
        return text


@dataclass(frozen=True)
class SecretVariables:
    """Environment variables from secrets, as tuples (variable, secret, key of the secret)."""

    allowed: str = _SECRET_ENV.allowed

    def __call__(self, text: str) -> tuple[tuple[str, str, str], ...]:
        entries = []
        for entry in text.split(","):
            _SECRET_ENV(entry)
            variable, _, source = entry.partition("=")
            secret, _, key = source.partition("/")
            entries.append((variable, secret, key))
        return tuple(entries)


def add_arguments(parser: OptionParser) -> None:
    add_config(parser, only_known_keys=True)
    add_hosts(parser)
    add = parser.add_option
    add("--image", _IMAGE, "IMAGE", "image with Paceline; required")
    add(
        "--variant",
        Choice(_VARIANTS),
        "NAME",
        "TrainJob of Kubeflow Trainer, or JobSet (default: kubeflow)",
    )
    add("--name", JobName(), "NAME", "name of the job (default: name of the config file)")
    add("--namespace", _LABEL, "NAME", "namespace of the objects")
    add("--runtime", _SUBDOMAIN, "NAME", "runtime of Kubeflow Trainer (default: paceline)")
    add("--queue", _LABEL, "NAME", "queue of Kueue")
    add("--time", TimeLimit(), "LIMIT", "time limit of the job, which then ends with a checkpoint")
    add(
        "--ttl",
        Integer(0, 31_536_000),
        "SECONDS",
        "delete the job this long after its end; JobSet only",
    )
    add("--pvc", _SUBDOMAIN, "NAME", "volume with the working folder of all pods")
    add(
        "--endpoint-pvc",
        _SUBDOMAIN,
        "NAME",
        "volume with the working folder of the first pod; JobSet only",
    )
    add("--data-pvc", _SUBDOMAIN, "NAME", "volume with data, at /data")
    add("--cache-pvc", _SUBDOMAIN, "NAME", "volume for caches, at /cache")
    add("--cpus-per-node", Integer(1, 4096), "N", "CPU cores of each pod")
    add("--memory-per-node", _QUANTITY, "SIZE", "memory of each pod")
    add("--shm-size", _QUANTITY, "SIZE", "size of /dev/shm")
    add(
        "--grace-period",
        Integer(1, 86_400),
        "SECONDS",
        "time for a checkpoint before the pods are killed",
    )
    add("--user", Integer(0, 65_535), "UID", "user of the pods")
    add("--secret-env", SecretVariables(), "NAME=...", "environment variables from secrets")
    add("--image-pull-secret", _SUBDOMAIN, "NAME", "secret of the registry")
    add("--service-account", _SUBDOMAIN, "NAME", "service account of the pods")
    add("--scheduler", _SCHEDULER, "NAME", "scheduler of the runtime")
    add("--output", OutputFile(), "FILE", "manifest to write (default: standard output)")
    parser.add_flag("--coscheduling", "start all pods together; Kubeflow only")
    parser.add_flag("--no-network-policy", "allow other pods to connect to the pods of the job")
    parser.add_flag("--runtime-manifest", "write the runtime that TrainJobs need")
    parser.example = (
        "paceline kubernetes CONFIG.yaml --nodes 2 --gpus-per-node 8"
        " --image registry.example.org/paceline:1.0 --pvc runs"
    )


def run(args: Namespace) -> int:
    """Write the manifest, or print it."""
    from paceline.cluster.jobs.kubernetes import manifest_text, notices

    if args.runtime_manifest:
        text = _runtime_text(args)
    else:
        options = make_options(args)
        print_notices([*options.hosts.loaded.notices, *notices(options)])
        text = manifest_text(options)
    if args.output is not None:
        write_output(args.output, text)
    if args.json:
        path = None if args.output is None else str(args.output)
        print(json.dumps({"manifest": text, "path": path}, indent=2))
    elif args.output is not None:
        print(f"start the job with: kubectl apply -f {args.output}")
    else:
        print(text, end="")
    return EXIT_DONE


def make_options(args: Namespace) -> KubernetesOptions:
    """Check the options against each other, and fit the config to the hosts.

    Raises:
        ConfigError: an option is missing or excludes another, or the config is invalid or does not
            fit the pods.
    """
    from paceline.cluster.jobs import kubernetes_options as defaults
    from paceline.cluster.jobs.hosts import fit_to_hosts
    from paceline.planner.upper_bound import upper_bound

    path, overrides = config_and_overrides(args)
    check_required(args, "nodes", "gpus-per-node", "image")
    _check_variant(args)
    hosts = fit_to_hosts(path, overrides, args.nodes, args.gpus_per_node)
    config = hosts.config
    _check_shared_storage(hosts, args)
    defaults.check_config_size(config)
    runtime = defaults.COSCHEDULING_RUNTIME_NAME if args.coscheduling else defaults.RUNTIME_NAME
    memory = args.memory_per_node or defaults.estimate_memory(
        hosts, upper_bound(config), counts_shm=args.shm_size is None
    )
    return defaults.KubernetesOptions(
        hosts=hosts,
        variant=args.variant or _VARIANTS[0],
        image=args.image,
        name=args.name or defaults.name_from(path),
        namespace=args.namespace,
        runtime=args.runtime or runtime,
        queue=args.queue,
        time_s=None if args.time is None else args.time.seconds,
        ttl_s=args.ttl,
        pvc=args.pvc,
        endpoint_pvc=args.endpoint_pvc,
        data_pvc=args.data_pvc,
        cache_pvc=args.cache_pvc,
        cpus=args.cpus_per_node or hosts.min_cpus,
        cpus_is_limit=args.cpus_per_node is not None,
        memory=memory,
        memory_is_limit=args.memory_per_node is not None,
        shm=args.shm_size or defaults.default_shm(hosts),
        grace_s=args.grace_period or defaults.default_grace_s(config),
        user=defaults.RUNTIME_USER if args.user is None else args.user,
        secret_env=args.secret_env or (),
        image_pull_secret=args.image_pull_secret,
        service_account=args.service_account,
        network_policy=not args.no_network_policy,
    )


def _runtime_text(args: Namespace) -> str:
    """Return the ClusterTrainingRuntime, which is the same for all configs.

    Raises:
        ConfigError: an option belongs to a job.
    """
    from paceline.cluster.jobs.kubernetes import runtime_manifest

    excluded = [
        f"`{name}`"
        for name, action in args.command.options.items()
        if action.nargs != 0
        and name not in ("--output", "--scheduler")
        and getattr(args, action.dest) is not None
    ] + [f"`{token}`" for token in args.config_tokens]
    if excluded:
        raise ConfigError(
            "{excluded} is not supported with `--runtime-manifest`: the runtime does not depend on"
            " the config or the job",
            code="option-of-job",
            allowed="--coscheduling, --scheduler NAME, --output FILE, --json",
            excluded=", ".join(excluded),
        )
    if args.scheduler is not None and not args.coscheduling:
        raise ConfigError(
            "`--scheduler` is not supported without `--coscheduling`: it sets the scheduler of the"
            " coscheduling plugin",
            code="scheduler-without-coscheduling",
            fix="add `--coscheduling`",
        )
    return runtime_manifest(args.coscheduling, args.scheduler)


def _check_variant(args: Namespace) -> None:
    """Raise ConfigError if an option is not supported with the variant or with another option."""
    if args.variant == "jobset" and (args.runtime or args.coscheduling):
        name = "--runtime" if args.runtime else "--coscheduling"
        raise ConfigError(
            "`{name}` is not supported with `--variant jobset`: it belongs to a runtime of"
            " Kubeflow Trainer",
            code="option-with-jobset",
            fix="omit it; to start all pods together, use Kueue: `--queue NAME`",
            name=name,
        )
    if args.variant != "jobset" and (args.endpoint_pvc or args.ttl is not None):
        name = "--endpoint-pvc" if args.endpoint_pvc else "--ttl"
        raise ConfigError(
            "`{name}` is not supported with `--variant kubeflow`: a TrainJob cannot set it",
            code="option-with-kubeflow",
            fix="omit it, or set `--variant jobset`",
            name=name,
        )
    if args.scheduler is not None:
        raise ConfigError(
            "`--scheduler` is not supported without `--runtime-manifest`: it belongs to the"
            " runtime",
            code="scheduler-without-runtime-manifest",
            fix="use it with `--runtime-manifest --coscheduling`",
        )
    if args.coscheduling and args.runtime:
        raise ConfigError(
            "`--coscheduling` is not supported with `--runtime`: both select a runtime",
            code="coscheduling-with-runtime",
            fix="set one of them",
        )


def _check_shared_storage(hosts: Hosts, args: Namespace) -> None:
    if args.pvc and args.endpoint_pvc:
        raise ConfigError(
            "`--pvc` is not supported with `--endpoint-pvc`: both mount the working folder",
            code="pvc-with-endpoint-pvc",
            fix="set one of them",
        )
    is_remote = "://" in str(hosts.config.checkpoint_dir or "")
    if hosts.nodes > 1 and not (is_remote or args.pvc or args.endpoint_pvc):
        raise ConfigError(
            "`--nodes {nodes}` needs persistent storage for the checkpoints",
            code="missing-storage",
            fix="name a PersistentVolumeClaim that all pods can mount (ReadWriteMany) with `--pvc"
            " NAME`, or with `--variant jobset` one for the first pod alone (ReadWriteOnce)"
            " with `--endpoint-pvc NAME`",
            nodes=hosts.nodes,
        )
