"""`dp`: data parallelism as in DataParallel, in which threads of one process drive several devices.

This mode exists for comparison: `ddp` gives the same losses and is faster. It does not use
``torch.nn.DataParallel`` for three reasons. That class does nothing on a CPU. It only gathers
outputs, so it supports neither a task's loss with its global token count nor gradient accumulation.
And it hides the traffic that makes this kind of data parallelism slow, which this mode reports.
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
from paceline.parallel.buckets.gradients import GradientBuckets
from paceline.parallel.gradients import clip_to
from paceline.parallel.optimizer_state import optimizer_tensors
from paceline.parallel.state import TensorShard, full_shards, trained_parameters
from paceline.parallel.strategy import MicroStep, Strategy

_NOTICES = [
    (
        "warning",
        (
            "`parallel.mode: dp` is meant for comparison: one process drives all devices and device"
            " 0 makes the updates; `ddp` gives the same losses and is faster"
        ),
    ),
    (
        "info",
        (
            "dp: the threads share torch's random generators, so a run with dropout is not"
            " reproducible bit for bit"
        ),
    ),
]


class ThreadedDPStrategy(Strategy):
    """Runs micro-batches on one replica per device, each in a thread, and updates the weights on
    device 0.

    In each step the weights of device 0 are copied to the other replicas, and the gradients are
    summed on device 0 in the order of the replicas.

    ``num_devices`` is set before :meth:`setup`; the default is ``parallel.num_gpus``, else 2. With
    ``parallel.device: cpu`` all replicas compute on the CPU, each with separate tensors.

    On accelerators a batch is on device 0. A replica copies its inputs to its own device and its
    outputs back to device 0, where the task computes the loss. These copies depend on the task and
    are not counted as traffic; the copies of weights and gradients are.
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
        """Return a function that limits a new thread to its share of the CPU cores, as for a rank.
        Return None on an accelerator or if ``OMP_NUM_THREADS`` is set."""
        if self.world.device.type != "cpu" or "OMP_NUM_THREADS" in os.environ:
            return None
        share = max(1, torch.get_num_threads() // self.num_devices)
        return lambda: torch.set_num_threads(share)

    def forward_backward(self, micro_step: MicroStep, num_micro_batches: int) -> None:
        self.begin_accumulation()
        for first in range(0, num_micro_batches, self.num_devices):
            self._run(micro_step, range(first, min(first + self.num_devices, num_micro_batches)))
        self.end_accumulation()

    def begin_accumulation(self) -> None:
        self.buckets.zero()
        self._send_weights()
        training = self.model.training
        for replica in self.replicas[1:]:
            replica.train(training)

    def end_accumulation(self) -> None:
        self._sum_gradients()

    def _run(self, micro_step: MicroStep, numbers: range) -> None:
        """Run one micro-batch on each replica at the same time and wait for all of them."""

        def run(number: int, replica: nn.Module, device: torch.device) -> None:
            if device.type != "cpu":
                torch.accelerator.set_device_index(device.index)
            micro_step(number, replica).backward()

        started = [
            self.threads.submit(run, number, replica, device)
            for number, replica, device in zip(numbers, self.replicas, self.devices, strict=False)
        ]
        wait(started)
        for future in started:
            future.result()

    def _send_weights(self) -> None:
        """Copy device 0's trained weights and buffers to the replicas."""
        with torch.no_grad():
            sources = [*self.trained.values(), *self.model.buffers()]
            for replica in self.replicas[1:]:
                targets = [*trained_parameters(replica).values(), *replica.buffers()]
                for target, source in zip(targets, sources, strict=True):
                    target.copy_(source, non_blocking=True)
                self._count(sources)

    def _sum_gradients(self) -> None:
        """Add the replicas' gradients to the gradients of device 0, always in the same order:
        floating-point addition is not associative."""
        for replica in self.replicas[1:]:
            sources = trained_parameters(replica).values()
            moved = []
            for target, source in zip(self.trained.values(), sources, strict=True):
                if source.grad is not None and target.grad is not None:
                    target.grad.add_(source.grad.to(target.device))
                    moved.append(source.grad)
                source.grad = None
            self._count(moved)

    def _count(self, tensors: Iterable[torch.Tensor]) -> None:
        self.world.traffic.add("copy", sum(tensor.nbytes for tensor in tensors))

    def clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        return clip_to(max_norm, self.buckets.norm(), self.buckets.scale)

    def tensor_shards(self) -> Iterable[TensorShard]:
        return full_shards(self.trained, self.model)

    def memory_tensors(self) -> list[torch.Tensor]:
        """Return the tensors on device 0, which holds the most: weights, summed gradients and
        optimizer state.

        The other devices hold weights and gradients. On a CPU they are in the same memory, but are
        not counted.
        """
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
    """Return a deep copy of the model on ``device``; tied weights stay tied.

    Raises:
        ConfigError: if the model cannot be copied.
    """
    try:
        replica = copy.deepcopy(model).to(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            "`parallel.mode: dp` is not supported with {kind}: the model cannot be copied to each"
            " device: {reason}",
            code="model-not-copyable",
            allowed="models that copy.deepcopy can copy",
            fix="set `parallel.mode: ddp`",
            kind=type(model).__name__,
            reason=error,
        ) from error
    if device != first:
        replica.register_forward_pre_hook(
            lambda _, args, kwargs: _moved((args, kwargs), device), with_kwargs=True
        )
        replica.register_forward_hook(lambda _, args, output: _moved(output, first))
    return replica


def _moved(tree: Any, device: torch.device) -> Any:
    return map_tensors(tree, lambda tensor: tensor.to(device))
