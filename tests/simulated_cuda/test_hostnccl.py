"""Test the backend with NCCL's rules: its values, what it refuses, and what it detects."""

import os
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from simulated import BACKEND, simulate_values

pytestmark = pytest.mark.slow


def connect(env, timeout_s=60.0):
    """Join a process group of simulated devices."""
    simulate_values()
    os.environ[BACKEND] = "hostnccl"
    device = torch.device("cuda", env.rank)
    torch.accelerator.set_device_index(env.rank)
    dist.init_process_group(
        dist.get_default_backend_for_device(device), rank=env.rank, world_size=env.world_size,
        timeout=timedelta(seconds=timeout_s), device_id=device,
    )  # fmt: skip
    return device


def on_ranks(function, *args, world_size=2):
    return run_ranks(function, world_size, *args, init_process_group=False)


def run_every_operation(env):
    device, rank, size = connect(env), env.rank, env.world_size
    values = torch.arange(4.0, device=device) + 10 * rank
    results = {}

    def collect(name, *tensors):
        results[name] = [tensor.tolist() for tensor in tensors]

    for op in ("SUM", "AVG", "MAX", "MIN", "PRODUCT"):
        tensor = values.clone()
        dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
        collect(op, tensor)
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8):
        tensor = values.to(dtype)
        dist.all_reduce(tensor)
        collect(str(dtype), tensor.double())
    flags = values > 10
    dist.all_reduce(flags)
    collect("bool", flags)
    tensor = values.clone()
    dist.reduce(tensor, 1)
    collect("reduce", tensor)
    tensor = values.clone()
    dist.broadcast(tensor, 1)
    collect("broadcast", tensor)
    gathered = values.new_empty(size * 4)
    dist.all_gather_into_tensor(gathered, values)
    collect("all_gather_into_tensor", gathered)
    parts = [torch.empty_like(values) for _ in range(size)]
    dist.all_gather(parts, values)
    collect("all_gather", *parts)
    part = values.new_empty(2)
    dist.reduce_scatter_tensor(part, values)
    collect("reduce_scatter_tensor", part)
    dist.reduce_scatter(part, list(values.mul(2).chunk(size)))
    collect("reduce_scatter", part)
    exchanged = torch.empty_like(values)
    dist.all_to_all_single(exchanged, values)
    collect("all_to_all_single", exchanged)
    sizes = [[1, 3], [1, 3]] if rank == 0 else [[3, 1], [3, 1]]
    uneven = values.new_empty(2 if rank == 0 else 6)
    received = [1, 1] if rank == 0 else [3, 3]
    dist.all_to_all_single(uneven, values, received, [1, 3])
    collect("uneven", uneven, torch.tensor(sizes))
    outputs = [values.new_empty(2) for _ in range(size)]
    dist.all_to_all(outputs, list(values.chunk(size)))
    collect("all_to_all", *outputs)
    dist.gather(values, parts if rank == 0 else None, 0)
    collect("gather", *parts)
    dist.scatter(part, list(values.chunk(size)) if rank == 1 else None, 1)
    collect("scatter", part)
    if rank == 0:
        dist.send(values, 1)
    else:
        dist.recv(tensor, 0)
        collect("recv", tensor)
    arrived = torch.empty_like(values)
    peer = 1 - rank
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, values, peer), dist.P2POp(dist.irecv, arrived, peer)]
    )
    for work in works:
        work.wait()
    collect("batch", arrived)
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    results["objects"] = objects
    half = dist.new_group([1])
    dist.barrier()
    results["groups"] = half == dist.GroupMember.NON_GROUP_MEMBER
    split = dist.split_group(split_ranks=[[0], [1]])
    results["split"] = dist.get_world_size(split)
    dist.destroy_process_group()
    return results


def test_values_of_every_operation():
    first, second = on_ranks(run_every_operation)
    print(first, second)
