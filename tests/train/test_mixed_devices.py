"""Hosts with devices of different types: supported modes, exchange of the types, and alignment of
replicas."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.distributed.communicator import (
    Communicator,
    _exchange_device_types,
    init_communicator,
)
from paceline.distributed.environment import RankEnv
from paceline.health.replicas import align_replicas
from paceline.parallel.strategy import make_strategy
from paceline.train.mixed_devices import check_mixed_devices, mixed_devices_notices


def make_world(*types: str) -> Communicator:
    world = Communicator(RankEnv(0, 2, 0, 1), torch.device("cpu"))
    world.device_types = frozenset(types)
    return world


@pytest.mark.parametrize("mode", ["ddp", "local_sgd"])
def test_accepts_cpu_and_cuda_ranks(mode: str) -> None:
    world = make_world("cpu", "cuda")
    check_mixed_devices(world, Config(model="m", dataset="d"), mode)
    assert "cpu and cuda ranks in one run, over Gloo" in mixed_devices_notices(world)[0][1]


@pytest.mark.parametrize(
    "mode", ["zero1", "zero2", "zero3", "deepspeed", "hybrid", "tensor", "pipeline", "diloco"]
)
def test_rejects_unsupported_modes(mode: str) -> None:
    check_mixed_devices(make_world("cpu"), Config(model="m", dataset="d"), mode)
    with pytest.raises(ConfigError) as caught:
        check_mixed_devices(make_world("cpu", "cuda"), Config(model="m", dataset="d"), mode)
    assert f"(cpu, cuda) are not supported with `parallel.mode: {mode}`" in caught.value.paragraph()


@pytest.mark.parametrize(
    ("types", "mode", "settings", "reason"),
    [
        (("cpu", "mps"), "ddp", {}, "Gloo cannot send tensors of mps"),
        (
            ("cpu", "cuda"),
            "ddp",
            {"compression": {"method": "powersgd"}},
            "`compression.method: powersgd`",
        ),
        (
            ("cpu", "cuda"),
            "ddp",
            {"parallel": {"all_reduce_algorithm": "ring"}},
            "`parallel.all_reduce_algorithm: ring`",
        ),
        (("cpu", "cuda"), "local_sgd", {"local_sgd": {"workers": 1}}, "`local_sgd.workers: 1`"),
    ],
)
def test_rejects_settings_that_require_one_device_type(
    types: tuple[str, ...], mode: str, settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_mixed_devices(make_world(*types), Config(model="m", dataset="d", **settings), mode)
    assert reason in caught.value.paragraph()


def run_on_two_hosts(env: RankEnv) -> tuple[list[str], float, str, bool, list[list[float]]]:
    """Run one rank per simulated host, exchange the device types through the process group's store,
    and align the replicas."""
    host = RankEnv(env.rank, env.world_size, 0, 1)
    store, _, _ = next(
        dist.rendezvous("env://", env.rank, env.world_size, timeout=timedelta(seconds=60))
    )
    types = _exchange_device_types(
        dist.PrefixStore("test", store), 2, "cuda" if env.rank else "cpu"
    )
    world = init_communicator(host, "cpu", 60.0)
    total = world.sum(env.rank + 1.0)[0]
    mixed = world.mixes_devices

    strategy = make_strategy("ddp", Config(model="m", dataset="d"), world)
    model = strategy.setup(torch.nn.Linear(4, 3))
    optimizer = strategy.setup_optimizer(
        lambda named: torch.optim.AdamW([param for _, param in named], lr=1e-2)
    )
    strategy.forward_backward(lambda _, module: module(torch.ones(2, 4)).sum(), 1)
    optimizer.step()
    with torch.no_grad():
        model.weight.mul_(1 + 1e-6 * env.rank)  # simulates a device that rounds differently
        optimizer.state[model.weight]["exp_avg"].mul_(1 + 1e-6 * env.rank)
    weight_before = model.weight.clone()
    align_replicas(strategy)
    tensors = [weight_before, model.weight, optimizer.state[model.weight]["exp_avg"]]
    return (
        sorted(types),
        total,
        str(dist.get_backend()),
        mixed,
        [tensor.flatten().tolist() for tensor in tensors],
    )


@pytest.mark.slow
def test_device_types_are_exchanged_and_replicas_aligned() -> None:
    first, second = run_ranks(run_on_two_hosts, 2, init_process_group=False)
    assert first[:4] == second[:4] == (["cpu", "cuda"], 3.0, "gloo", False)
    assert first[4][0] != second[4][0]
    assert first[4][1:] == second[4][1:]
    assert first[4][0] == first[4][1]  # rank 0's values
