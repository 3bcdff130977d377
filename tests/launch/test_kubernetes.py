"""The manifest that `paceline kubernetes` writes, held against Kubeflow Trainer's published models; and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import report, start
from kubeflow_trainer_api.models import IoK8sApiCoreV1ConfigMap, TrainerV1alpha1TrainJob
from ranks import free_port
from slow_task import SLOW

from paceline.cli import main
from paceline.config.load import load_config

OPTIONS = ("--nodes", "2", "--gpus-per-node", "8", "--image", "registry.example.org/paceline:1.0", "--claim", "runs")

Write = Callable[..., str]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "My_run.yaml").write_text("model: builtin:qwen2-micro\ndataset: builtin:python-docs#64\n")
    return tmp_path


@pytest.fixture
def written(here: Path, capsys: pytest.CaptureFixture[str]) -> Write:
    def check(*words: str) -> str:
        assert main(["kubernetes", *words]) == 0
        return capsys.readouterr().out

    return check


def objects(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The ConfigMap and the TrainJob, each held against the API: no field that is not known there, none of another type."""
    config_map, job = yaml.safe_load_all(text)
    for given, kind in ((config_map, IoK8sApiCoreV1ConfigMap), (job, TrainerV1alpha1TrainJob)):
        assert kind.from_dict(given).to_dict() == given
    return config_map, job


def test_the_manifest(here: Path, written: Write) -> None:
    words = ("parallel.mode=zero3", "system=line one\nline two: 'x'", "--namespace", "team-a", "--cpus-per-node", "32")
    config_map, job = objects(written("My_run.yaml", *words, *OPTIONS))
    assert config_map["metadata"] == {"name": "my-run-config", "namespace": "team-a"}
    assert job["metadata"] == {"name": "my-run", "namespace": "team-a"}
    (here / "again.yaml").write_text(config_map["data"]["config.yaml"])
    config = load_config(here / "again.yaml").config
    assert (config.parallel.nnodes, config.parallel.num_gpus, config.parallel.mode) == (2, 8, "zero3")
    assert config.system == "line one\nline two: 'x'"
    spec = job["spec"]
    assert (spec["runtimeRef"]["name"], spec["trainer"]["numNodes"]) == ("torch-distributed", 2)
    assert spec["trainer"]["resourcesPerNode"]["limits"] == {"cpu": "32", "nvidia.com/gpu": "8"}
    (patch,) = spec["runtimePatches"]
    (replicated,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = replicated["template"]["spec"]["template"]["spec"]
    volumes = {one["name"]: one for one in pod["volumes"]}
    mounts = {one["mountPath"]: volumes[one["name"]] for one in pod["containers"][0]["volumeMounts"]}
    assert mounts["/etc/paceline"]["configMap"]["name"] == config_map["metadata"]["name"]
    assert mounts["/workspace"]["persistentVolumeClaim"]["claimName"] == "runs"
    assert mounts["/dev/shm"]["emptyDir"] == {"medium": "Memory"}


def test_the_command_becomes_the_first_process_of_its_container(written: Write, tmp_path: Path) -> None:
    """The container's command, run here with a stand-in for `paceline` that says how it was called."""
    _, job = objects(written("My_run.yaml", *OPTIONS))
    shell, flag, line = job["spec"]["trainer"]["command"]
    stand_in = tmp_path / "paceline"
    stand_in.write_text('#!/bin/sh\necho "$$ $(pwd) $@"\n')
    stand_in.chmod(0o755)
    line = line.replace("/workspace", str(tmp_path))
    process = subprocess.Popen(
        [shell, flag, line], stdout=subprocess.PIPE, text=True, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}
    )
    assert process.communicate()[0] == f"{process.pid} {tmp_path} sft /etc/paceline/config.yaml\n"


def test_ranks_on_the_cpu_of_one_host(written: Write) -> None:
    text = written("My_run.yaml", "--nodes", "1", "--gpus-per-node", "0", "--image", "paceline:1", "--name", "small")
    config_map, job = objects(text)
    assert "resourcesPerNode" not in job["spec"]["trainer"]
    assert "device: cpu" in config_map["data"]["config.yaml"]
    assert job["metadata"]["name"] == "small"


@pytest.mark.slow
def test_two_pods_train_what_the_manifest_says(here: Path, written: Write) -> None:
    """Two launchers, each with the config of the manifest and the variables that Kubeflow sets in its pod."""
    words = (*SLOW, "max_steps=6", "parallel.num_gpus=1", "parallel.timeout_s=60")
    config_map, job = objects(written(*words, "--nodes=2", "--gpus-per-node=0", "--image=paceline:1", "--claim=runs"))
    (here / "config.yaml").write_text(config_map["data"]["config.yaml"])
    told = {
        "PET_NNODES": str(job["spec"]["trainer"]["numNodes"]),
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(free_port()),
    }
    pods = [start("config.yaml", env={**os.environ, **told, "PET_NODE_RANK": str(number)}) for number in range(2)]
    for pod in pods:
        _, err = pod.communicate(timeout=120)
        assert pod.returncode == 0, err
    assert report(here / "output" / "run")["world_size"] == 2


def test_a_file_json_and_warnings(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("kubernetes", "My_run.yaml", *OPTIONS[:-2], "output_dir=/data/run", "--output", "job.yaml", "--json")
    assert main([*words[:3], "1", *words[4:]]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found == {"manifest": (here / "job.yaml").read_text(), "path": "job.yaml"}
    assert "no `--claim`" in err
    assert "/data/run: looked for in the image" in err


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (OPTIONS[:4], ["needs `--image`", "--image registry"]),
        (OPTIONS[:-2], ["`--nodes 2` needs a volume", "--claim"]),
        ((*OPTIONS, "--name", "My_run"), ["`--name`", "'My_run'"]),
        ((*OPTIONS, "--name", "a" * 51), ["51 characters", "at most 50"]),
        ((*OPTIONS, "--namespace", "-"), ["`--namespace`"]),
        ((*OPTIONS, "--clam", "x"), ["`--clam`", "`--claim`"]),
        ((*OPTIONS, "--image", "two words"), ["`--image`"]),
        ((*OPTIONS, "--output", "no/folder.yaml"), ["no/folder.yaml"]),
        ((*OPTIONS, "parallel.shard=3", "parallel.mode=zero3"), ["2 hosts × 8 ranks", "parallel.shard: 3"]),
        ((*OPTIONS, "max_steps=no"), ["max_steps"]),
    ],
)
def test_what_is_refused(here: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], parts: list[str]) -> None:
    before = sorted(here.iterdir())
    assert main(["kubernetes", "My_run.yaml", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert sorted(here.iterdir()) == before
    for part in parts:
        assert part in err, err
