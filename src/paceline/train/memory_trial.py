"""Try the largest micro-batch of a run before its first step, so that a lack of memory shows at
once and not hours later, when the longest samples are reached."""

from __future__ import annotations

import random
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from paceline.data.largest import largest_keys
from paceline.data.loader import load_micro_batch
from paceline.distributed.seeds import seed_everything
from paceline.distributed.timing.progress import PROGRESS
from paceline.distributed.traffic import uncounted
from paceline.parallel.state import local_tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from paceline.config.schema import Config
    from paceline.data.pipeline import DataPipeline
    from paceline.distributed.mesh import ParallelDims
    from paceline.parallel.strategy import MicroStep, Strategy
    from paceline.train.run_spec import RunSpec
    from paceline.train.state import TrainComponents


def needs_trial(spec: RunSpec, components: TrainComponents, data: DataPipeline) -> bool:
    """Return whether the largest micro-batch is tried: on accelerators, in a new run and after
    memory settings were made smaller. The rows of a stream are not known in advance, and ranks on a
    CPU cannot take part."""
    world = components.strategy.world
    is_new = spec.resume_from is None or spec.memory_fallback is not None
    can_try = components.strategy.runs_trials and data.counts is None and data.accumulation > 0
    return is_new and can_try and spec.device_type != "cpu" and not world.mixes_devices


def try_largest_micro_batch(
    spec: RunSpec, components: TrainComponents, data: DataPipeline, step: int
) -> None:
    """Run forward and backward of the largest micro-batch of the run on every rank, without an
    update. Weights, buffers, random state and counts are as before. A collective.

    Args:
        step: the number of completed steps.
    """
    strategy, device = components.strategy, components.strategy.world.device
    keys = largest_keys(
        data.order,
        getattr(data.train_dataset, "lengths", None),
        data.num_replicas * data.accumulation,
        range(step, spec.derived.steps),
        is_packed=spec.config.train_args.packing is not False,
    )
    batch = load_micro_batch(data.train_dataset, keys, data.collate, data.order.seed).to(device)
    with uncounted(), _restored(components.model, device), _reserved(spec.config, components):
        micro_step = _micro_step(spec.config, components, batch.data)
        count = _num_micro_batches(strategy, spec.layout.axes, data.accumulation)
        strategy.forward_backward(micro_step, count)
        strategy.discard_gradients()
    # What was reserved is not a measured peak.
    torch.accelerator.reset_peak_memory_stats(device)


def _num_micro_batches(strategy: Strategy, axes: ParallelDims, accumulation: int) -> int:
    """Return the number of micro-batches to run: two, because the second one meets the gradients of
    the first, or all if several are in memory at once."""
    has_several = axes.pipeline > 1 or strategy.num_devices > 1
    return accumulation if has_several else min(2, accumulation)


def _micro_step(config: Config, components: TrainComponents, batch: Any) -> MicroStep:
    """Return the function with which the strategy computes the loss of each micro-batch."""
    task, precision = components.task, components.precision
    count = max(1.0, float(task.count(batch)))

    def micro_step(number: int, model: nn.Module) -> torch.Tensor:
        PROGRESS.enter("forward")
        seed_everything(config.train_args.seed, "trial", number)
        with precision.autocast():
            loss = task.loss(model, batch)
        PROGRESS.enter("backward")
        return precision.scale(loss / count)

    return micro_step


@contextmanager
def _restored(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore the buffers and the random state after the block."""
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    states = random.getstate(), np.random.get_state()
    devices = [] if device.index is None else [device.index]
    with torch.random.fork_rng(devices, device_type=device.type):
        yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])


@contextmanager
def _reserved(config: Config, components: TrainComponents) -> Iterator[None]:
    """Hold as much memory as the state of the optimizer, which the first update creates."""
    device = components.strategy.world.device
    reserved = None
    if not components.optimizer.state and config.parallel.state_offload == "none":
        parameters = [
            each for group in components.optimizer.param_groups for each in group["params"]
        ]
        memory = components.shape.optimizer
        sizes = [memory.moment_bytes("", local_tensor(each).numel()) for each in parameters]
        reserved = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    try:
        yield
    finally:
        del reserved
