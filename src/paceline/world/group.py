"""The process group of a run, and the one place where its collectives are issued and their bytes counted."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from paceline.world.env import RankEnv


@dataclass
class Traffic:
    """Bytes that this rank has sent, by collective. All-reduce of S bytes over N ranks counts 2(N-1)/N × S, what a
    bandwidth-optimal all-reduce sends (Patarasuk & Yuan, 2009, section 3); broadcast counts S."""

    bytes_by_collective: dict[str, int] = field(default_factory=dict)

    def add(self, collective: str, size_bytes: int) -> None:
        self.bytes_by_collective[collective] = self.bytes_by_collective.get(collective, 0) + size_bytes

    @property
    def total(self) -> int:
        return sum(self.bytes_by_collective.values())


def all_reduce_bytes(size_bytes: int, world_size: int) -> int:
    """Bytes one rank sends in a bandwidth-optimal all-reduce of ``size_bytes``."""
    return round(2 * (world_size - 1) / world_size * size_bytes)


class World:
    """This rank, its device, and the collectives among all ranks. With one rank no process group exists and each
    collective is the identity.

    Args:
        env: rank and sizes.
        device: where this rank computes.
    """

    def __init__(self, env: RankEnv, device: torch.device) -> None:
        self.env = env
        self.device = device
        self.traffic = Traffic()
        self.wait_s = 0.0  # seconds this rank has stood still for communication

    @property
    def rank(self) -> int:
        return self.env.rank

    @property
    def size(self) -> int:
        return self.env.world_size

    @property
    def is_first(self) -> bool:
        return self.env.rank == 0

    def all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> dist.Work | None:
        """Start an all-reduce in place; pass the result to :meth:`wait`. None with one rank."""
        if self.size == 1:
            return None
        self.traffic.add("all_reduce", all_reduce_bytes(tensor.numel() * tensor.element_size(), self.size))
        return dist.all_reduce(tensor, op=op, async_op=True)

    def wait(self, work: dist.Work | None) -> None:
        """Wait for a collective, and count the seconds it took."""
        if work is None:
            return
        start = time.perf_counter()
        work.wait()
        self.wait_s += time.perf_counter() - start

    def sum(self, *values: float) -> list[float]:
        """Sum of each value over the ranks, in float64 where the device has it."""
        if self.size == 1:
            return [float(value) for value in values]
        tensor = torch.tensor(values, dtype=self.wide_dtype, device=self.device)
        self.wait(self.all_reduce(tensor))
        return [float(value) for value in tensor.tolist()]

    @property
    def wide_dtype(self) -> torch.dtype:
        """The widest floating type of the device."""
        return torch.float32 if self.device.type == "mps" else torch.float64

    def broadcast(self, tensors: Iterable[torch.Tensor], chunk_bytes: int = 64 << 20) -> None:
        """Copy rank 0's values into every rank's tensors, in place, packed into few messages by dtype."""
        if self.size == 1:
            return
        group: list[torch.Tensor] = []
        size = 0
        for tensor in tensors:
            if group and (tensor.dtype != group[0].dtype or size > chunk_bytes):
                self._broadcast_group(group)
                group, size = [], 0
            group.append(tensor)
            size += tensor.numel() * tensor.element_size()
        if group:
            self._broadcast_group(group)

    def _broadcast_group(self, tensors: list[torch.Tensor]) -> None:
        with torch.no_grad():
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).to(self.device)
            self.traffic.add("broadcast", flat.numel() * flat.element_size())
            dist.broadcast(flat, src=0)
            if self.rank != 0:
                for tensor, part in zip(tensors, flat.split([one.numel() for one in tensors]), strict=True):
                    tensor.copy_(part.view(tensor.shape))

    def broadcast_object(self, value: object) -> object:
        """Rank 0's value on every rank (a small picklable object)."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def gather_numbers(self, value: float) -> list[float]:
        """Each rank's value, in order of rank, on every rank."""
        if self.size == 1:
            return [float(value)]
        tensor = torch.zeros(self.size, dtype=self.wide_dtype, device=self.device)
        tensor[self.rank] = value
        self.wait(self.all_reduce(tensor))
        return [float(one) for one in tensor.tolist()]

    def barrier(self) -> None:
        if self.size > 1:
            self.sum(0.0)

    def close(self) -> None:
        """Leave the process group. Gloo's is left to the end of the process: to destroy it joins its threads, which can wait
        for the very interpreter lock that the caller holds; every rank has passed the last barrier by then, and the sockets
        close with the process."""
        if dist.is_initialized() and dist.get_backend() != "gloo":
            dist.destroy_process_group()


def open_world(env: RankEnv, device_type: str, timeout_s: float) -> World:
    """Choose this rank's device, set the number of threads, and join the process group (where there are several ranks).

    The backend is the one torch names as the default for the device (nccl, gloo, xccl…). CPU ranks of one host share its
    cores evenly.
    """
    if device_type == "cpu":
        device = torch.device("cpu")
        share_cores(env.local_world_size)
    else:
        device = torch.device(device_type, env.local_rank)
        torch.accelerator.set_device_index(env.local_rank)
    if env.world_size > 1:
        backend = dist.get_default_backend_for_device(device)
        options = {} if device.type == "cpu" else {"device_id": device}
        dist.init_process_group(
            backend, rank=env.rank, world_size=env.world_size, timeout=timedelta(seconds=timeout_s), **options
        )
    return World(env, device)


def share_cores(local_world_size: int) -> None:
    """Give this CPU rank its share of the cores as threads; OMP_NUM_THREADS, where the user set it, is kept."""
    if "OMP_NUM_THREADS" in os.environ:
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // local_world_size))
