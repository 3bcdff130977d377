"""`zero2` and `zero3`: weights, gradients and optimizer state in shards, by torch's FSDP2."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.distributed.collectives.volume import all_reduce_bytes, scatter_bytes
from paceline.distributed.communicator import Communicator
from paceline.distributed.mesh import ParallelDims
from paceline.models.shape.record import modules_around
from paceline.parallel.base import MicroStep, OptimizerFactory, Strategy, optimizer_tensors
from paceline.parallel.cost import Cost, ModelShape, TensorShape, Workload
from paceline.parallel.fsdp.sharding import FSDPSharding, shard_dim
from paceline.parallel.gradients import clip_to
from paceline.parallel.state import TensorShard, frozen_parts
from paceline.parallel.zero1.common import (
    batch_norm_names,
    check_elementwise,
    low_bytes_of,
    statistics_traffic,
    step_count_bytes,
)

__all__ = ["FSDPSharding", "FSDPStrategy", "ZeRO2Strategy"]


class FSDPStrategy(Strategy):
    """ZeRO stage 3 (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
    Parameter Models", 2020, section 5.3): each rank holds a shard of everything, and gathers the
    weights of a block when forward or backward comes to it.

    With the axis ``data`` beside ``shard`` the shards are repeated, and their gradients all-reduced
    once a step, in the last backward (hybrid sharding).
    """

    name = "zero3"
    rank0_has_full_model = False
    reshard_after_forward = True

    @classmethod
    def check(cls, config: Config, axes: ParallelDims) -> None:
        check_elementwise(config, cls.name)
        if config.evaluation.where == "rank0":
            raise ConfigError(
                f"`evaluation.where: rank0`, and with `mode: {cls.name}` rank 0 holds a part of the"
                " model",
                allowed=f"with {cls.name}: `evaluation.where: all`",
                fix="set `evaluation.where: all`, or `parallel.mode: zero1`",
            )
        _check_offload(config, cls.name)

    def setup(self, model: nn.Module) -> nn.Module:
        self.sharding = FSDPSharding(
            model,
            self.world,
            low_dtype=self.low_dtype,
            reshard_after_forward=self.reshard_after_forward,
            offload=self.settings.offload == "all",
        )
        return model

    def setup_optimizer(self, build: OptimizerFactory) -> torch.optim.Optimizer:
        self.optimizer = build(self.sharding.named_pieces())
        return self.optimizer

    def forward_backward(self, micro_step: MicroStep, num_micro_batches: int) -> None:
        self.sharding.begin_step()
        for number in range(num_micro_batches):
            last = number == num_micro_batches - 1
            if last:
                self.sharding.prepare_last_backward()
            loss = micro_step(number, self.sharding.model)
            if last and not self.reshard_after_forward:
                self.sharding.note_gathered()
            loss.backward()
        self.sharding.end_step()

    def clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        squared = self.sharding.squared_norm()
        self.world.wait(self.sharding.shards.all_reduce(squared))
        return clip_to(max_norm, squared.sqrt().float(), self.sharding.scale)

    def evaluate(
        self, run: Callable[[nn.Module], dict[str, torch.Tensor]], model: nn.Module
    ) -> dict[str, torch.Tensor] | None:
        found = super().evaluate(run, model)
        self.sharding.reshard()
        return found

    @property
    def replica_group(self) -> Communicator | None:
        return self.sharding.copies

    def replicated_tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        yield from super().replicated_tensors()
        yield from frozen_parts(self.sharding.model)

    def tensor_shards(self) -> Iterable[TensorShard]:
        return self.sharding.tensor_shards()

    def after_load(self) -> None:
        self.sharding.reshard()

    def memory_tensors(self) -> list[Any]:
        return [*self.sharding.memory_tensors(), *optimizer_tensors(self.optimizer)]

    def memory_bytes(self) -> int:
        return super().memory_bytes() + self.sharding.gathered_bytes

    @classmethod
    def estimate_cost(
        cls, shape: ModelShape, axes: ParallelDims, work: Workload, config: Config
    ) -> Cost:
        """Per trained parameter, N shards, Adam: stage 3 16/N bytes (4 weights, 4 gradients, 8
        moments: Rajbhandari et al., 2020, section 5.3, figure 1), the weights gathered for the
        moment counted with the activations; stage 2 besides the gathered weights, 2 bytes in mixed
        precision or 4 (section 5.2; the paper's 2 + 14/N has gradients in the low precision, FSDP2
        keeps float32). A frozen parameter is whole on every rank in stage 2, and sharded in stage
        3.

        Each micro-batch reduce-scatters the gradients, Ψ(N-1)/N; trained weights are gathered once
        a step in stage 2, and all weights in forward and backward of each micro-batch in stage 3
        (section 7.2). Over D replicas of the shards an all-reduce of a shard's gradients once a
        step, both reductions in float32. Padding of each parameter's cut is counted."""
        weights = whole = gathered = gradients = state = reduced = 0
        normed = batch_norm_names(shape)
        backward = _reached_by_backward(shape)
        num_shards, gathers = axes.shard, 0
        for one in shape.parameters:
            each = low_bytes_of(one, shape.low_bytes, normed)
            if not one.trainable and not cls.reshard_after_forward:
                whole += one.numel * (each if one.shape else one.element_bytes)
                continue
            cut, padded = _cut(one, num_shards)
            weights += cut * one.element_bytes
            gathered += padded * each if one.shape else 0
            if cls.reshard_after_forward:
                gathers += (
                    work.micro_batches * (2 if one.name in backward else 1) * padded * each
                    if one.shape
                    else 0
                )
            if one.trainable:
                gradients += cut * one.element_bytes
                state += cut * shape.optimizer_bytes_per_element + step_count_bytes(config)
                low_bytes = each if axes.data == 1 else one.element_bytes
                reduced += padded * low_bytes if one.shape else 0
        if not cls.reshard_after_forward:
            gathers = gathered
        scalars = sum(one.size_bytes for one in shape.trained if not one.shape)
        traffic = {
            "reduce_scatter": work.micro_batches * scatter_bytes(reduced, num_shards),
            "all_gather": scatter_bytes(gathers, num_shards),
            "all_reduce": (
                all_reduce_bytes(gradients - scalars, axes.data)
                + all_reduce_bytes(scalars, axes.replicas)
            ),
            **statistics_traffic(shape, axes.replicas),
        }
        on_host = config.parallel.offload == "all"
        stays = whole + (0 if cls.reshard_after_forward else gathered)
        passing = _largest_gathered(shape, num_shards, normed) if cls.reshard_after_forward else 0
        return Cost(
            parameters=(0 if on_host else weights) + stays + shape.buffer_bytes,
            gradients=0 if on_host else gradients,
            optimizer=0 if on_host else state,
            activations=work.activation_bytes + passing,
            traffic=traffic,
        )


class ZeRO2Strategy(FSDPStrategy):
    """ZeRO stage 2 (section 5.2): the gathered weights stay from the first forward of a step to its
    last backward, which frees them block by block; gradients are in shards after each micro-batch.
    """

    name = "zero2"
    reshard_after_forward = False


def _check_offload(config: Config, mode: str) -> None:
    offload = config.parallel.offload
    if offload == "none":
        return
    if offload == "optimizer":
        raise ConfigError(
            f"`parallel.offload: optimizer`, and with `mode: {mode}` optimizer state lies where the"
            " shards of the weights lie",
            allowed=f"with {mode}: none, all",
            fix=(
                "set `parallel.offload: all`, or `parallel.mode: deepspeed`, which moves the"
                " optimizer's state alone"
            ),
        )
    device = config.parallel.device
    if device == "cpu" or (device == "auto" and not torch.accelerator.is_available()):
        raise ConfigError(
            f"`parallel.offload: {offload}` needs an accelerator whose memory it spares, and the"
            " device is the CPU",
            allowed="on the CPU: `parallel.offload: none`",
            fix="leave `parallel.offload` out",
        )


def _cut(one: TensorShape, num_shards: int) -> tuple[int, int]:
    """Elements of a parameter on the fullest rank, and gathered: with the padding of its cut."""
    return _cut_sizes(one.shape, num_shards)


@lru_cache(maxsize=4096)
def _cut_sizes(shape: tuple[int, ...], num_shards: int) -> tuple[int, int]:
    if not shape:
        return 1, 1
    dim = shard_dim(shape, num_shards)
    rows = math.ceil(shape[dim] / num_shards)
    rest = math.prod(shape) // shape[dim] if shape[dim] else 0
    return rows * rest, rows * rest * num_shards


def _block_of(name: str, blocks: Container[str]) -> str:
    """The block that a parameter belongs to; "" for the root."""
    return next((one for one in modules_around(name) if one in blocks), "")


def _blocks_by_parameter(shape: ModelShape) -> dict[str, str]:
    """Parameter → block that is gathered with it. A block that shares a parameter with the rest
    goes with the root."""
    key = "blocks by parameter"
    if key in shape.memo:
        return shape.memo[key]  # type: ignore[no-any-return]
    blocks = frozenset(shape.blocks)
    found = {one.name: _block_of(one.name, blocks) for one in shape.parameters}
    shared = {
        block
        for alias, first in shape.aliases.items()
        for block in (_block_of(alias, blocks), found[first])
        if _block_of(alias, blocks) != found[first]
    }
    shape.memo[key] = {name: "" if block in shared else block for name, block in found.items()}
    return shape.memo[key]  # type: ignore[no-any-return]


def _reached_by_backward(shape: ModelShape) -> set[str]:
    """Parameters whose block takes part in backward: the blocks from the first trained parameter
    on, and the root."""
    blocks = _blocks_by_parameter(shape)
    trained = {blocks[one.name] for one in shape.trained}
    reached: set[str] = {""}
    begun = False
    for one in shape.parameters:
        begun = begun or one.trainable
        if begun or blocks[one.name] in trained:
            reached.add(blocks[one.name])
    return {name for name, block in blocks.items() if block in reached}


def _largest_gathered(shape: ModelShape, num_shards: int, normed: frozenset[str]) -> int:
    """Bytes of weights that are gathered at a time in stage 3: the root's and two blocks', the next
    being fetched meanwhile, and one block's gradients before they are cut."""
    blocks = _blocks_by_parameter(shape)
    sizes: dict[str, int] = {}
    for one in shape.parameters:
        if one.shape:
            size = _cut(one, num_shards)[1] * low_bytes_of(one, shape.low_bytes, normed)
            sizes[blocks[one.name]] = sizes.get(blocks[one.name], 0) + size
    root = sizes.pop("", 0)
    largest = sorted(sizes.values())[-2:]
    return root + sum(largest) + max([root, *largest])
