"""`dp`: DataParallel's scheme, one process that drives several devices by threads. Here for
comparison: `ddp` gives the same loss, faster.

The scheme is laid open here instead of left to ``torch.nn.DataParallel``, for three reasons: that
class does nothing on a CPU; it gathers outputs alone, so a task's loss with its global count and
accumulation over micro-batches have no place in it; and it hides the traffic that makes the scheme
slow, which is what it is here to show.
"""

import copy
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import nn

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.data.collate import map_tensors
from paceline.distributed.communicator import Communicator
from paceline.parallel.base import (
    MicroStep,
    OptimizerFactory,
    OptimizerStep,
    Strategy,
    optimizer_tensors,
    trained_parameters,
    whole_shards,
)
from paceline.parallel.ddp.buckets import GradientBuckets
from paceline.parallel.gradients import clip_to
from paceline.parallel.state import TensorShard

_NOTICES = [
    (
        "warning",
        (
            "parallel.mode: dp is here for comparison: one process drives all devices and device 0"
            " makes the updates; `ddp` gives the same losses and is faster"
        ),
    ),
    (
        "info",
        (
            "dp: its threads share torch's random generators, so a run with dropout is not"
            " repeatable to the bit"
        ),
    ),
]


class ThreadedDPStrategy(Strategy):
    """Each step: the weights of device 0 are copied to a replica on every other device;
    micro-batches run on the replicas, one thread each; the gradients are summed on device 0 in the
    order of the replicas; device 0 makes the update.

    ``num_devices`` is set before :meth:`setup` (else ``parallel.num_gpus``, else 2). On a CPU all
    replicas compute on it, each with copies of its own: they share nothing.

    On accelerators a batch is on device 0 as the engine made it: a replica takes its inputs over to
    its own device and gives its outputs back to device 0, where the task computes the loss. These
    copies depend on the task; they are not counted as traffic, weights and gradients are.
    """

    name = "dp"

    def __init__(self, config: Config, world: Communicator) -> None:
        super().__init__(config, world)
        self.num_devices = (
            config.parallel.num_gpus if isinstance(config.parallel.num_gpus, int) else 2
        )
        self.notices = list(_NOTICES)

    def setup(self, model: nn.Module) -> nn.Module:
        self.model = model
        self.trained = trained_parameters(model)
        self.devices = _devices(self.world.device, self.num_devices)
        self.replicas = [
            model,
            *(_copy_to(model, device, self.world.device) for device in self.devices[1:]),
        ]
        self.buckets = GradientBuckets(
            self.trained.values(), int(self.config.parallel.bucket_cap_mb * 2**20), self.world
        )
        self.threads = ThreadPoolExecutor(
            self.num_devices, "replica", initializer=self._share_cores()
        )
        return model

    def _share_cores(self) -> Callable[[], None] | None:
        """For the start of a thread on a CPU: its share of the cores, as ranks have theirs."""
        if self.world.device.type != "cpu" or "OMP_NUM_THREADS" in os.environ:
            return None
        share = max(1, torch.get_num_threads() // self.num_devices)
        return lambda: torch.set_num_threads(share)

    def setup_optimizer(self, build: OptimizerFactory) -> torch.optim.Optimizer:
        self.optimizer = build(list(self.trained.items()))
        return self.optimizer

    def forward_backward(self, micro_step: MicroStep, num_micro_batches: int) -> None:
        self.buckets.zero()
        self._send_weights()
        training = self.model.training
        for replica in self.replicas[1:]:
            replica.train(training)
        for first in range(0, num_micro_batches, self.num_devices):
            numbers = range(first, min(first + self.num_devices, num_micro_batches))
            self._run(micro_step, numbers)
        self._sum_gradients()

    def _run(self, micro_step: MicroStep, numbers: range) -> None:
        """One micro-batch on each replica at the same time. All have ended when this returns or
        raises."""

        def run(number: int, replica: nn.Module, device: torch.device) -> None:
            if device.type != "cpu":
                torch.accelerator.set_device_index(device.index)
            micro_step(number, replica).backward()

        started = [
            self.threads.submit(run, number, replica, device)
            for number, replica, device in zip(numbers, self.replicas, self.devices, strict=False)
        ]
        wait(started)
        for one in started:
            one.result()

    def _send_weights(self) -> None:
        """Device 0's weights and buffers to the replicas. Frozen weights are there already."""
        with torch.no_grad():
            mine = [*self.trained.values(), *self.model.buffers()]
            for replica in self.replicas[1:]:
                theirs = [
                    *(one for one in replica.parameters() if one.requires_grad),
                    *replica.buffers(),
                ]
                for target, source in zip(theirs, mine, strict=True):
                    target.copy_(source, non_blocking=True)
                self._count(mine)

    def _sum_gradients(self) -> None:
        """The replicas' gradients onto device 0's, always in the same order: sums in float are not
        associative."""
        for replica in self.replicas[1:]:
            theirs = [one for one in replica.parameters() if one.requires_grad]
            moved = []
            for target, source in zip(self.trained.values(), theirs, strict=True):
                if source.grad is not None and target.grad is not None:
                    target.grad.add_(source.grad.to(target.device))
                    moved.append(source.grad)
                source.grad = None
            self._count(moved)

    def _count(self, tensors: Iterable[torch.Tensor]) -> None:
        self.world.traffic.add("copy", sum(one.numel() * one.element_size() for one in tensors))

    def clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        return clip_to(max_norm, self.buckets.norm(), self.buckets.scale)

    def optimizer_step(self, apply: OptimizerStep) -> bool:
        return apply(self.optimizer)

    def tensor_shards(self) -> Iterable[TensorShard]:
        return whole_shards(self.trained, self.model)

    def memory_tensors(self) -> list[torch.Tensor]:
        """Device 0's load, the fullest: its weights, the summed gradients, the optimizer. The other
        devices hold weights and their own gradients; on a CPU those lie in the same memory, and are
        not counted here."""
        return [
            *self.model.parameters(),
            *self.model.buffers(),
            *self.buckets.flats,
            *optimizer_tensors(self.optimizer),
        ]


def _devices(first: torch.device, count: int) -> list[torch.device]:
    if first.type == "cpu":
        return [first] * count
    start = first.index or 0
    return [torch.device(first.type, start + number) for number in range(count)]


def _copy_to(model: nn.Module, device: torch.device, first: torch.device) -> nn.Module:
    """A replica with storages of its own on ``device``. Weights shared within the model are shared
    within the copy."""
    try:
        replica = copy.deepcopy(model).to(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f"`parallel.mode: dp` copies the model to each device, and {type(model).__name__}"
            f" cannot be copied: {error}",
            allowed="models that copy.deepcopy can copy",
            fix="set `parallel.mode: ddp`",
        ) from error
    if device != first:
        replica.register_forward_pre_hook(
            lambda _, args, kwargs: _moved((args, kwargs), device), with_kwargs=True
        )
        replica.register_forward_hook(lambda _, args, output: _moved(output, first))
    return replica


def _moved(tree: Any, device: torch.device) -> Any:
    return map_tensors(tree, lambda tensor: tensor.to(device))
