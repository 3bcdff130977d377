"""The rank of this process and of this host, from the environment variables of launchers and
schedulers."""

import os

import pytest
from raised import raises_error

from paceline.config.schema.parallel import Parallel
from paceline.core.errors import ConfigError
from paceline.distributed.environment import (
    HostEnv,
    RankEnv,
    first_host,
    from_environment,
    outer_launcher,
    scheduled_host,
    with_scheduler,
)

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "host0", "MASTER_PORT": "1234",
}  # fmt: skip


@pytest.fixture(autouse=True)
def clear_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name in (*TORCHRUN, "TORCHELASTIC_RUN_ID", "KUBERNETES_SERVICE_HOST") or name.startswith(
            ("SLURM_", "PET_")
        ):
            monkeypatch.delenv(name)


def test_single_process_without_a_launcher() -> None:
    assert outer_launcher() is None
    assert from_environment() == RankEnv(0, 1, 0, 1)


def test_ignores_world_size_without_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # some notebooks and clusters set these variables
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, TORCHRUN[name])
    assert outer_launcher() is None


def test_reads_variables_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert outer_launcher() == RankEnv(rank=3, world_size=4, local_rank=1, local_world_size=2)


def test_missing_local_world_size_means_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        if name != "LOCAL_WORLD_SIZE":
            monkeypatch.setenv(name, value)
    with raises_error(ConfigError, code="missing-local-world-size", naming="LOCAL_WORLD_SIZE"):
        outer_launcher()
    monkeypatch.setenv("LOCAL_SIZE", "2")
    assert outer_launcher() == RankEnv(rank=3, world_size=4, local_rank=1, local_world_size=2)
    monkeypatch.delenv("LOCAL_SIZE")
    monkeypatch.setenv("RANK", "1")
    rank = outer_launcher()
    assert rank is not None
    assert rank.local_world_size == 4


@pytest.mark.parametrize("missing", ["WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_rejects_incomplete_launcher_variables(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    for name, value in TORCHRUN.items():
        if name != missing:
            monkeypatch.setenv(name, value)
    with raises_error(ConfigError, code="incomplete-environment", naming=missing):
        outer_launcher()


def test_rejects_rank_that_is_not_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RANK", "first")
    with raises_error(ConfigError, code="invalid-environment", naming="RANK"):
        outer_launcher()


SLURM = {
    "SLURM_JOB_ID": "123456", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "gpu[003-004]-ib",
    "SLURM_JOB_NODELIST": "gpu[003-009]-ib",
}  # fmt: skip
TRAINER = {
    "PET_NNODES": "4", "PET_NPROC_PER_NODE": "8", "PET_NODE_RANK": "2",
    "PET_MASTER_ADDR": "mine-node-0-0.mine", "PET_MASTER_PORT": "29500",
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
}  # fmt: skip
PYTORCH_JOB = {
    "RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "mine-master-0", "MASTER_PORT": "23456",
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
}  # fmt: skip


@pytest.mark.parametrize(
    ("variables", "host"),
    [
        ({}, None),
        (SLURM, HostEnv("Slurm", (2, 2), 1, "gpu003-ib:23456", "Slurm job 123456.0")),
        ({**SLURM, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"}, None),
        (TRAINER, HostEnv("Kubeflow", (4, 4), 2, "mine-node-0-0.mine:29500")),
        ({**TRAINER, "PET_NNODES": "1"}, None),
        (
            {"PET_NNODES": "1:4", "PET_RDZV_ENDPOINT": "head:7000"},
            HostEnv("PET_NNODES", (1, 4), None, "head:7000"),
        ),
        (PYTORCH_JOB, HostEnv("PyTorchJob", (3, 3), 1, "mine-master-0:23456")),
        ({**PYTORCH_JOB, **TRAINER}, HostEnv("Kubeflow", (4, 4), 2, "mine-node-0-0.mine:29500")),
    ],
    ids=[
        "none",
        "Slurm",
        "Slurm, one node",
        "Trainer",
        "Trainer, one node",
        "elastic",
        "PyTorchJob",
        "PyTorchJob and Trainer",
    ],
)
def test_host_of_each_scheduler(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], host: HostEnv | None
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert outer_launcher() is None
    assert scheduled_host() == host


@pytest.mark.parametrize(
    ("names", "first"),
    [
        ("n1", "n1"),
        ("n[1-2]", "n1"),
        ("a[08,10]-x,b", "a08-x"),
        ("r[0-3]n[5,7-9],z[1-2]", "r0n5"),
        ("login,a[1-2]", "login"),
    ],
)
def test_first_host_of_a_node_list(names: str, first: str) -> None:
    assert first_host(names) == first


@pytest.mark.parametrize(
    ("variables", "error"),
    [
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "16"}, ("wrong-number-of-tasks", "")),
        ({**SLURM, "SLURM_NODEID": "x"}, ("invalid-environment", "SLURM_NODEID")),
        ({**TRAINER, "PET_NNODES": "4:1"}, ("invalid-pet-nnodes", "PET_NNODES")),
        (
            {"PET_NNODES": "2", "PET_NODE_RANK": "0"},
            ("unknown-rendezvous-address", "PET_MASTER_ADDR"),
        ),
    ],
)
def test_rejects_inconsistent_scheduler_variables(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], error: tuple[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with raises_error(ConfigError, code=error[0], naming=error[1]):
        scheduled_host()


HOST = HostEnv("Slurm", (2, 2), 1, "gpu003:23456")


def test_scheduler_fills_unset_settings() -> None:
    assert with_scheduler(Parallel(), None) == Parallel()
    assert with_scheduler(Parallel(), HOST) == Parallel(
        nnodes=2, node_rank=1, rdzv_endpoint="gpu003:23456"
    )
    assert with_scheduler(Parallel(nnodes="1:4", rdzv_endpoint="10.0.0.1"), HOST) == Parallel(
        nnodes="1:4", node_rank=1, rdzv_endpoint="10.0.0.1"
    )
    elastic = HostEnv("PET_NNODES", (1, 4), None, "head:7000")
    assert with_scheduler(Parallel(), elastic) == Parallel(nnodes="1:4", rdzv_endpoint="head:7000")


@pytest.mark.parametrize(
    ("parallel", "error"),
    [
        (
            Parallel(nnodes=4),
            ("contradicts-launcher", "parallel.nnodes"),
        ),
        (
            Parallel(node_rank=0),
            ("node-rank-contradicts-launcher", "parallel.node_rank"),
        ),
    ],
)
def test_rejects_config_that_contradicts_the_scheduler(
    parallel: Parallel, error: tuple[str, str]
) -> None:
    with raises_error(ConfigError, code=error[0], naming=error[1]):
        with_scheduler(parallel, HOST)
