"""A group of real ranks whose all-reduces take as long as a slow link would make them."""

import time

import torch.distributed as dist

from paceline.distributed.collectives.schedules import all_reduce_bytes
from paceline.distributed.communicator import Communicator


class Delayed:
    """An all-reduce that is over when it has come and its time has."""

    def __init__(self, work, due):
        self.work = work
        self.due = due

    def wait(self):
        self.work.wait()
        time.sleep(max(0.0, self.due - time.perf_counter()))


class Shaped(Communicator):
    """All-reduces go one after the other, each for ``latency`` seconds a message and bytes /
    ``rate``."""

    rate, latency, free_at = 1e9, 0.0, 0.0

    @classmethod
    def of(cls, world, rate, latency):
        made = cls(world.env, world.device, world.axes, world.group, world.ranks, world.waits)
        made.rate, made.latency = rate, latency
        return made

    def all_reduce(self, tensor, op=dist.ReduceOp.SUM):
        size = all_reduce_bytes(tensor.numel() * tensor.element_size(), self.size)
        takes = 2 * (self.size - 1) * self.latency + size / self.rate
        self.free_at = max(self.free_at, time.perf_counter()) + takes
        return Delayed(super().all_reduce(tensor, op), self.free_at)
