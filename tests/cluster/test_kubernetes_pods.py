"""Simulate the pods of a JobSet as hosts in network namespaces, with the environment and the
storage of the manifest. /etc/hosts replaces the DNS of the cluster; there is no kubelet or
controller."""

import os
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from commands import MICRO, digest, run
from hosts import THREADS, Cluster, start_cluster
from schemas import Object, get_jobs
from test_kubernetes import get_env, get_pod

from paceline.cli import main

pytestmark = [pytest.mark.alone, pytest.mark.slow, pytest.mark.soak]

#: LoRA adapters with dropout, and frequent checkpoints so that few steps are repeated.
TRAINING = (
    *MICRO, "lora.enable=true", "lora.dropout=0.1", "max_steps=120", "save_steps=5",
    "parallel.num_gpus=1", "parallel.collective_timeout_s=60",
)  # fmt: skip
POD_NAME = "pods-endpoint-0-0.pods"


def start_pod(cluster: Cluster, number: int, template: Object, config: Path) -> None:
    """Start the pod's command as the kubelet would, with the ConfigMap at another path."""
    _, container = get_pod(template)
    paceline, verb, _ = container["command"]
    assert paceline == "paceline"
    pod_environment = {
        name: value for name, value in get_env(container).items() if name.startswith("PET_")
    }
    cluster.execute(
        number, [sys.executable, "-m", "paceline", verb, str(config)], **pod_environment
    )


def test_replaced_pods_rejoin(
    pytestconfig: pytest.Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Replace the second pod, which loses its disk, and then the first, which is the rendezvous
    endpoint and keeps its persistent volume but gets another address. The name of the first pod
    resolves only after both have started."""
    args = (*TRAINING, f"output_dir={tmp_path}/hosts/disk/run")
    options = (
        "--nodes=2",
        "--gpus-per-node=0",
        "--image=paceline:1",
        "--variant=jobset",
        "--name=pods",
        "--endpoint-pvc=disk",
    )
    assert main(["kubernetes", *args, *options]) == 0
    _, config_map, job = yaml.safe_load_all(capsys.readouterr().out)
    config = tmp_path / "config.yaml"
    config.write_text(config_map["data"]["config.yaml"])
    first, other = get_jobs(job)
    assert get_env(get_pod(other)[1])["PET_MASTER_ADDR"] == POD_NAME
    (tmp_path / "hosts").mkdir()
    with start_cluster(pytestconfig, tmp_path / "hosts", 2) as cluster:
        start_pod(cluster, 0, first, config)
        start_pod(cluster, 1, other, config)
        cluster.set_name(POD_NAME, cluster.hosts[0].address)
        cluster.wait_for_step(12)

        cluster.hosts[1].kill()
        shutil.rmtree(cluster.hosts[1].disk)
        cluster.hosts[1].disk.mkdir()
        start_pod(cluster, 1, other, config)
        cluster.wait_for_start(2, world_size=2)
        restarted_at = cluster.last_step
        cluster.wait_for_step(restarted_at + 12)

        cluster.hosts[0].kill()
        cluster.move(0, cluster.hosts[0].address.rpartition(".")[0] + ".77")
        start_pod(cluster, 0, first, config)
        cluster.wait(
            lambda: "not an address of this host" in cluster.hosts[0].output,
            "the name still has the old address",
        )
        cluster.set_name(POD_NAME, cluster.hosts[0].address)
        for host in cluster.hosts:
            host.wait_for_exit()
        replaced_digest = cluster.digest()
    reference = tmp_path / "reference"
    run(
        *(arg for arg in TRAINING if "num_gpus" not in arg),
        "parallel.num_gpus=2",
        f"output_dir={reference}",
        env={**os.environ, **THREADS},
    )
    assert replaced_digest == digest(reference)
