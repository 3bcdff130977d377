"""Slow down the all-reduces of real ranks to the speed of a slow network link."""

import time

import torch.distributed as dist

from paceline.distributed.collective_bytes import all_reduce_bytes
from paceline.distributed.communicator import Communicator


class DelayedWork:
    """A handle of an all-reduce that completes no earlier than the time ``due``."""

    def __init__(self, work, due):
        self.work = work
        self.due = due

    def wait(self):
        self.work.wait()
        time.sleep(max(0.0, self.due - time.perf_counter()))


class SlowCommunicator(Communicator):
    """A communicator whose all-reduces run one after another over a simulated link.

    Each takes ``latency`` seconds for each message of a ring all-reduce, and the number of bytes
    divided by ``rate``.
    """

    rate, latency, free_at = 1e9, 0.0, 0.0

    @classmethod
    def wrap(cls, world, rate, latency):
        """Return a communicator over the group of ``world``, with that bandwidth and latency."""
        slow = cls(world.env, world.device, world.axes, world.group, world.ranks, world.waits)
        slow.rate, slow.latency = rate, latency
        return slow

    def all_reduce(self, tensor, op=dist.ReduceOp.SUM):
        size = all_reduce_bytes(tensor.numel() * tensor.element_size(), self.size)
        duration_s = 2 * (self.size - 1) * self.latency + size / self.rate
        self.free_at = max(self.free_at, time.perf_counter()) + duration_s
        return DelayedWork(super().all_reduce(tensor, op), self.free_at)
