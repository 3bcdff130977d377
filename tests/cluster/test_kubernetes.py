"""Test the manifests of `paceline kubernetes` against the schemas of Kubeflow Trainer, JobSet and
Kubernetes, the commands of their pods, and the errors for invalid options. Needs no cluster."""

import copy
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import report, start
from ranks import free_port
from schemas import Object, get_jobs, validate
from slow_task import SLOW

from paceline.cli import main
from paceline.cluster.jobs.kubernetes import runtime_text
from paceline.config.load import load_config

BASE = ("--nodes", "2", "--gpus-per-node", "8", "--image", "registry.example.org/paceline:1.0")
OPTIONS = (*BASE, "--pvc", "runs")
JOBSET = (*OPTIONS, "--variant", "jobset")
#: All options, so that every field is validated against the schemas.
ALL_OPTIONS = (
    "--namespace", "team-a", "--queue", "gpu-queue", "--time", "1-0", "--data-pvc", "data",
    "--cache-pvc", "hub", "--cpus-per-node", "32", "--memory-per-node", "256Gi", "--shm-size",
    "32Gi", "--grace-period", "900", "--user", "2000", "--secret-env",
    "HF_TOKEN=hub/token,AWS_SECRET_ACCESS_KEY=s3/secret.key", "--image-pull-secret", "registry",
    "--service-account", "trainer",
)  # fmt: skip

Generate = Callable[..., list[Object]]


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "My_run.yaml").write_text(
        "model: builtin:qwen2-micro\ndataset: builtin:python-docs#64\n"
    )
    return tmp_path


@pytest.fixture
def generate(workdir: Path, capsys: pytest.CaptureFixture[str]) -> Generate:
    """Return a function that runs `paceline kubernetes` and returns the validated objects."""

    def write(*args: str) -> list[Object]:
        assert main(["kubernetes", *args]) == 0
        objects = list(yaml.safe_load_all(capsys.readouterr().out))
        for manifest in objects:
            validate(manifest)
        return objects

    return write


def get_pod(template: Object) -> tuple[Object, Object]:
    """Return the pod's spec and its container."""
    pod = template["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    return pod, container


def get_patched_pod(job: Object) -> tuple[Object, Object]:
    (patch,) = job["spec"]["runtimePatches"]
    (replicated,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["name"] == "node"
    return get_pod(replicated["template"])


def get_mounts(pod: Object, container: Object) -> dict[str, Object]:
    """Return {mount path: volume}."""
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    return {
        mount["mountPath"]: volumes[mount["name"]]
        for mount in container["volumeMounts"]
        if mount["name"] in volumes
    }


def get_env(container: Object) -> dict[str, str]:
    return {entry["name"]: entry.get("value", "") for entry in container["env"]}


@pytest.mark.parametrize("variant", ["kubeflow", "jobset"])
def test_manifest_with_all_options_is_valid(generate: Generate, variant: str) -> None:
    extra_args = ("--ttl", "3600") if variant == "jobset" else ()
    policy, config_map, job = generate(
        "My_run.yaml", *OPTIONS, *ALL_OPTIONS, *extra_args, "--variant", variant
    )
    assert {manifest["metadata"]["namespace"] for manifest in (policy, config_map, job)} == {
        "team-a"
    }
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpu-queue"
    assert job["spec"]["suspend"] is True, "Kueue starts the job"
    if variant == "jobset":
        pod, container = get_pod(get_jobs(job)[0])
        resources, environment, job_spec = (
            container["resources"],
            container["env"],
            get_jobs(job)[0]["spec"],
        )
    else:
        pod, container = get_patched_pod(job)
        resources, environment, job_spec = (
            job["spec"]["trainer"]["resourcesPerNode"],
            job["spec"]["trainer"]["env"],
            job["spec"],
        )
    assert (
        resources["requests"]
        == resources["limits"]
        == {"cpu": "32", "memory": "256Gi", "nvidia.com/gpu": "8"}
    )
    assert job_spec["activeDeadlineSeconds"] == 86_400
    assert pod["terminationGracePeriodSeconds"] == 900
    assert (pod["securityContext"]["runAsUser"], pod["securityContext"]["runAsNonRoot"]) == (
        2000,
        True,
    )
    assert (pod["serviceAccountName"], pod["imagePullSecrets"]) == (
        "trainer",
        [{"name": "registry"}],
    )
    mounts = get_mounts(pod, container)
    assert mounts["/workspace"]["persistentVolumeClaim"] == {"claimName": "runs"}
    assert mounts["/data"]["persistentVolumeClaim"] == {"claimName": "data", "readOnly": True}
    assert {"name": "HF_HOME", "value": "/cache"} in environment
    secret = {"name": "s3", "key": "secret.key"}
    assert {"name": "AWS_SECRET_ACCESS_KEY", "valueFrom": {"secretKeyRef": secret}} in environment


def test_train_job(workdir: Path, generate: Generate) -> None:
    args = (
        "parallel.mode=zero3",
        "system=line one\nline two: 'x'",
        "parallel.collective_timeout_s=1200",
    )
    policy, config_map, job = generate("My_run.yaml", *args, *OPTIONS)
    assert config_map["metadata"]["name"] == "my-run-config"
    assert config_map["immutable"] is True
    (workdir / "again.yaml").write_text(config_map["data"]["config.yaml"])
    config = load_config(workdir / "again.yaml").config
    assert (config.parallel.nnodes, config.parallel.num_gpus, config.parallel.mode) == (
        2,
        8,
        "zero3",
    )
    assert config.system == "line one\nline two: 'x'"
    spec = job["spec"]
    assert (spec["runtimeRef"]["name"], spec["trainer"]["numNodes"]) == ("paceline", 2)
    assert spec["trainer"]["resourcesPerNode"]["limits"] == {"nvidia.com/gpu": "8"}
    assert set(spec["trainer"]["resourcesPerNode"]["requests"]) == {
        "cpu",
        "memory",
        "nvidia.com/gpu",
    }
    assert "suspend" not in spec
    pod, container = get_patched_pod(job)
    assert pod["terminationGracePeriodSeconds"] == 1260, "covers `parallel.collective_timeout_s`"
    mounts = get_mounts(pod, container)
    assert mounts["/etc/paceline"]["configMap"]["name"] == config_map["metadata"]["name"]
    assert {"name": "paceline-shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}} in pod[
        "volumes"
    ]
    (rule,) = policy["spec"]["ingress"]
    assert rule["from"] == [{"podSelector": policy["spec"]["podSelector"]}]
    assert policy["spec"]["podSelector"]["matchLabels"] == {
        "jobset.sigs.k8s.io/jobset-name": "my-run"
    }
    assert "ports" not in rule


def test_train_job_does_not_patch_runtime_values(generate: Generate) -> None:
    """`terminationGracePeriodSeconds` can be patched only since Trainer 2.3."""
    pod, _ = get_patched_pod(generate("My_run.yaml", *OPTIONS)[-1])
    assert sorted(pod) == ["containers", "volumes"]


def check_policies(template: Object, shm: str) -> None:
    """Check the failure policy of a Job, including what the API server requires beyond the
    schema."""
    spec, (pod, container) = template["spec"], get_pod(template)
    assert spec["completionMode"] == "Indexed"  # required by backoffLimitPerIndex
    assert pod["restartPolicy"] == "Never"  # required by podFailurePolicy and backoffLimitPerIndex
    assert (spec["backoffLimitPerIndex"], spec["maxFailedIndexes"]) == (3, 0)
    disrupted, stopped, config_error = spec["podFailurePolicy"]["rules"]
    assert disrupted == {
        "action": "Ignore",
        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
    }
    codes = {"containerName": container["name"], "operator": "In"}
    assert stopped == {"action": "Ignore", "onExitCodes": {**codes, "values": [143]}}
    assert config_error == {"action": "FailJob", "onExitCodes": {**codes, "values": [2]}}
    context = pod["securityContext"]
    assert (context["runAsNonRoot"], context["seccompProfile"]) == (
        True,
        {"type": "RuntimeDefault"},
    )
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["shareProcessNamespace"] is True
    assert (
        template["spec"]["template"]["metadata"]["annotations"]["karpenter.sh/do-not-disrupt"]
        == "true"
    )
    assert get_mounts(pod, container)["/dev/shm"]["emptyDir"] == {
        "medium": "Memory",
        "sizeLimit": shm,
    }


def test_runtime_manifest(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kubernetes", "--runtime-manifest"]) == 0
    text = capsys.readouterr().out
    assert text == runtime_text()
    runtime = yaml.safe_load(text)
    validate(runtime)
    assert runtime["kind"] == "ClusterTrainingRuntime"
    (template,) = get_jobs(runtime)
    assert template["metadata"]["labels"] == {
        "trainer.kubeflow.org/trainjob-ancestor-step": "trainer"
    }
    check_policies(template, "8Gi")
    assert get_pod(template)[0]["terminationGracePeriodSeconds"] == 660
    assert main(["kubernetes", "--runtime-manifest", "--coscheduling", "--scheduler", "gang"]) == 0
    gang = yaml.safe_load(capsys.readouterr().out)
    validate(gang)
    assert gang["metadata"].pop("name") == "paceline-coscheduling"
    assert gang["spec"].pop("podGroupPolicy") == {"coscheduling": {"scheduleTimeoutSeconds": 300}}
    assert get_pod(get_jobs(gang)[0])[0].pop("schedulerName") == "gang"
    del runtime["metadata"]["name"]
    assert gang == runtime, "everything else is equal"


def test_runtime_reference_of_job(generate: Generate) -> None:
    assert (
        generate("My_run.yaml", *OPTIONS, "--coscheduling")[-1]["spec"]["runtimeRef"]["name"]
        == "paceline-coscheduling"
    )
    other = generate("My_run.yaml", *OPTIONS, "--runtime", "torch-distributed")[-1]
    assert other["spec"]["runtimeRef"]["name"] == "torch-distributed"
    assert other["spec"]["trainer"]["command"][:2] == [
        "/bin/sh",
        "-c",
    ], "pods of that runtime start in another folder"
    pod, container = get_patched_pod(other)
    assert "emptyDir" in get_mounts(pod, container)["/dev/shm"]
    assert pod["terminationGracePeriodSeconds"] == 660


def test_jobset(generate: Generate) -> None:
    _, _, job = generate("My_run.yaml", *JOBSET)
    assert "suspend" not in job["spec"]
    (template,) = get_jobs(job)
    check_policies(template, "16Gi")
    assert (template["spec"]["parallelism"], template["spec"]["completions"]) == (2, 2)
    pod, container = get_pod(template)
    env = get_env(container)
    assert (env["PET_NNODES"], env["PET_MASTER_ADDR"]) == ("2", "my-run-node-0-0.my-run")
    assert "PET_NODE_RANK" in env
    assert pod["terminationGracePeriodSeconds"] == 660
    assert get_mounts(pod, container)["/workspace"]["persistentVolumeClaim"]["claimName"] == "runs"
    names = [volume["name"] for volume in pod["volumes"]]
    assert len(names) == len(set(names))


def test_jobset_retries_follow_max_restarts(generate: Generate) -> None:
    (template,) = get_jobs(generate("My_run.yaml", *JOBSET, "recovery.max_restarts=0")[-1])
    assert template["spec"]["backoffLimitPerIndex"] == 0


def test_endpoint_pvc_is_mounted_in_first_pod_only(generate: Generate) -> None:
    job = generate(
        "My_run.yaml", *BASE, "--nodes", "3", "--variant", "jobset", "--endpoint-pvc", "disk"
    )[-1]
    first, others = get_jobs(job)
    assert [first["spec"]["completions"], others["spec"]["completions"]] == [1, 2]
    assert get_mounts(*get_pod(first))["/workspace"]["persistentVolumeClaim"]["claimName"] == "disk"
    assert get_mounts(*get_pod(others))["/workspace"]["emptyDir"] == {}
    for template, node_rank in ((first, "0"), (others, None)):
        env = get_env(get_pod(template)[1])
        assert (env["PET_NNODES"], env["PET_MASTER_ADDR"]) == (
            "3",
            "my-run-endpoint-0-0.my-run",
        )
        assert env.get("PET_NODE_RANK") == node_rank


def test_pods_can_run_as_root(generate: Generate) -> None:
    pod, _ = get_pod(get_jobs(generate("My_run.yaml", *JOBSET, "--user", "0")[-1])[0])
    assert (pod["securityContext"]["runAsNonRoot"], pod["securityContext"]["runAsUser"]) == (
        False,
        0,
    )


def test_cpu_ranks_on_one_node(generate: Generate) -> None:
    args = (
        "--nodes",
        "1",
        "--gpus-per-node",
        "0",
        "--image",
        "paceline:1",
        "--name",
        "small",
        "dataloader_num_workers=1",
    )
    _, config_map, job = generate("My_run.yaml", *args)
    assert set(job["spec"]["trainer"]["resourcesPerNode"]["requests"]) == {"cpu", "memory"}
    assert job["spec"]["trainer"]["resourcesPerNode"]["requests"]["cpu"] == "4", (
        "two ranks with a loader process each"
    )
    assert "device: cpu" in config_map["data"]["config.yaml"]
    assert job["metadata"]["name"] == "small"


def test_no_network_policy(generate: Generate) -> None:
    assert [
        manifest["kind"] for manifest in generate("My_run.yaml", *OPTIONS, "--no-network-policy")
    ] == [
        "ConfigMap",
        "TrainJob",
    ]


INVALID: list[tuple[str, Callable[[Object], Any]]] = [
    ("spec.retries", lambda job: job["spec"].update(retries=3)),
    (
        "securityContext.runAsNobody",
        lambda job: get_pod(get_jobs(job)[0])[0]["securityContext"].update(runAsNobody=True),
    ),
    (
        "emptyDir.size",
        lambda job: get_pod(get_jobs(job)[0])[0]["volumes"][2]["emptyDir"].update(size="8Gi"),
    ),
    (
        "rules.0..onPodCondition",
        lambda job: get_jobs(job)[0]["spec"]["podFailurePolicy"]["rules"][0].update(
            onPodCondition=[]
        ),
    ),
    ("completions", lambda job: get_jobs(job)[0]["spec"].update(completions="2")),
    (
        "valueFrom.secretRef",
        lambda job: get_pod(get_jobs(job)[0])[1]["env"].append(
            {"name": "A", "valueFrom": {"secretRef": {}}}
        ),
    ),
]


@pytest.mark.parametrize(("name", "change"), INVALID, ids=[name for name, _ in INVALID])
def test_validation_rejects_invalid_manifest(
    generate: Generate, name: str, change: Callable[[Object], Any]
) -> None:
    job = generate("My_run.yaml", *JOBSET)[-1]
    invalid = copy.deepcopy(job)
    change(invalid)
    assert invalid != job
    with pytest.raises(Exception, match=name.rpartition(".")[2]):
        validate(invalid)


def make_environment(container: Object, index: int, port: int) -> dict[str, str]:
    """Return the environment that the kubelet would set for the pod of this index, with 127.0.0.1
    in place of the pods' host names."""
    env = get_env(container)
    env.update({"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port)})
    for entry in container["env"]:
        path = entry.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
        if path is not None:
            assert path == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
            env[entry["name"]] = str(index)
    return {name: value for name, value in env.items() if name not in ("HOME", "HF_HOME")}


@pytest.mark.soak
def test_pods_train_as_in_manifest(workdir: Path, generate: Generate) -> None:
    """Run each pod's command with the config and the environment of the manifest."""
    args = (
        *SLOW,
        "max_steps=6",
        "parallel.num_gpus=1",
        "parallel.collective_timeout_s=60",
        "--variant=jobset",
        "--pvc=runs",
    )
    _, config_map, job = generate(*args, "--nodes=2", "--gpus-per-node=0", "--image=paceline:1")
    (workdir / "config.yaml").write_text(config_map["data"]["config.yaml"])
    (template,) = get_jobs(job)
    _, container = get_pod(template)
    assert container["command"] == ["paceline", "sft", "/etc/paceline/config.yaml"]
    port = free_port()
    environments = [
        {**os.environ, **make_environment(container, index, port)}
        for index in range(template["spec"]["completions"])
    ]
    pods = [start("config.yaml", env=environment) for environment in environments]
    for process in pods:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
    assert report(workdir / "output" / "run")["world_size"] == 2


def test_command_becomes_pid_1_of_container(generate: Generate, tmp_path: Path) -> None:
    """Run the command of a pod that starts in another folder, with a fake `paceline` that prints
    its PID, folder and arguments."""
    job = generate("My_run.yaml", *OPTIONS, "--runtime", "torch-distributed")[-1]
    shell, flag, line = job["spec"]["trainer"]["command"]
    fake = tmp_path / "paceline"
    fake.write_text('#!/bin/sh\necho "$$ $(pwd) $@"\n')
    fake.chmod(0o755)
    line = line.replace("/workspace", str(tmp_path))
    process = subprocess.Popen(
        [shell, flag, line],
        stdout=subprocess.PIPE,
        text=True,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
    )
    assert process.communicate()[0] == f"{process.pid} {tmp_path} sft /etc/paceline/config.yaml\n"


def test_output_file_json_and_warnings(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = (
        "kubernetes",
        "My_run.yaml",
        *BASE,
        "output_dir=/data/run",
        "--output",
        "job.yaml",
        "--json",
    )
    assert main([*args[:3], "1", *args[4:]]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {"manifest": (workdir / "job.yaml").read_text(), "path": "job.yaml"}
    assert "no `--pvc`" in err
    assert "/data/run: outside of /workspace" in err
    assert "paceline kubernetes --runtime-manifest" in err
    assert "--memory-per-node" in err


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (OPTIONS[:4], ["needs `--image`", "--image registry"]),
        (BASE, ["`--nodes 2` needs persistent storage", "--pvc", "--endpoint-pvc"]),
        ((*OPTIONS, "--name", "My_run"), ["`--name My_run`"]),
        ((*OPTIONS, "--name", "a" * 45), ["45 characters", "at most 44"]),
        ((*OPTIONS, "--namespace", "-"), ["`--namespace -`"]),
        ((*OPTIONS, "--pvcc", "x"), ["`--pvcc`", "`--pvc`"]),
        ((*OPTIONS, "--image", "two words"), ["`--image two words`"]),
        ((*OPTIONS, "--output", "no/folder.yaml"), ["no/folder.yaml"]),
        (
            (*OPTIONS, "parallel.shard=3", "parallel.mode=zero3"),
            ["2 hosts × 8 ranks", "parallel.shard: 3"],
        ),
        ((*OPTIONS, "max_steps=no"), ["max_steps"]),
        ((*OPTIONS, "--variant", "job"), ["`--variant job`", "kubeflow, jobset"]),
        ((*JOBSET, "--coscheduling"), ["`--coscheduling`", "--queue"]),
        ((*JOBSET, "--runtime", "x"), ["`--runtime`"]),
        ((*OPTIONS, "--endpoint-pvc", "x"), ["`--endpoint-pvc`", "--variant jobset"]),
        ((*JOBSET, "--endpoint-pvc", "x"), ["`--pvc` is not supported with `--endpoint-pvc`"]),
        ((*OPTIONS, "--ttl", "60"), ["`--ttl`", "--variant jobset"]),
        (
            (*OPTIONS, "--coscheduling", "--runtime", "x"),
            ["`--coscheduling` is not supported with `--runtime`"],
        ),
        ((*OPTIONS, "--scheduler", "x"), ["`--scheduler`", "--runtime-manifest"]),
        ((*OPTIONS, "--memory-per-node", "64 GB"), ["`--memory-per-node 64 GB`", "64Gi"]),
        ((*OPTIONS, "--shm-size", "0"), ["`--shm-size 0`"]),
        ((*OPTIONS, "--grace-period", "0"), ["`--grace-period 0`", "1 to 86,400"]),
        ((*OPTIONS, "--user", "-1"), ["`--user -1`"]),
        ((*OPTIONS, "--time", "4h"), ["`--time 4h`"]),
        (
            (*OPTIONS, "--secret-env", "HF_TOKEN=plain"),
            ["`--secret-env HF_TOKEN=plain`", "VARIABLE=SECRET/KEY"],
        ),
        ((*OPTIONS, "--runtime-manifest"), ["`--runtime-manifest`", "`--pvc`", "`My_run.yaml`"]),
    ],
)
def test_rejects_invalid_options(
    workdir: Path, capsys: pytest.CaptureFixture[str], args: tuple[str, ...], parts: list[str]
) -> None:
    before = sorted(workdir.iterdir())
    assert main(["kubernetes", "My_run.yaml", *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert sorted(workdir.iterdir()) == before
    for part in parts:
        assert part in err, err
