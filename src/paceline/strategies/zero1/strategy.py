"""`zero1`: shard the optimizer state over the ranks; every rank has the full weights and
gradients."""

from collections.abc import Iterable

import torch
from torch import nn

from paceline.distributed.communicator import Communicator
from paceline.distributed.traffic import uncounted
from paceline.parallel.gradients import (
    batch_norm_parameters,
    changing_buffers,
    clip_to,
)
from paceline.parallel.initial_weights import sync_weights
from paceline.parallel.optimizer_state import optimizer_tensors
from paceline.parallel.state import (
    TensorShard,
    all_buffers,
    low_dtype,
    persistent_buffers,
    trained_parameters,
)
from paceline.parallel.strategy import MicroStep, OptimizerFactory, OptimizerStep, Strategy
from paceline.strategies.zero1.buckets import ShardedBuckets


class Zero1Strategy(Strategy):
    """ZeRO stage 1 (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
    Parameter Models", 2020, section 5.1).

    The last micro-batch's backward reduce-scatters the gradients bucket by bucket; each rank
    updates its shard of each bucket, then the weights are all-gathered. In mixed precision the
    trained weights are in bfloat16 or float16 on every rank (the weights of batch normalizations
    stay in float32), and each shard has float32 master weights, which checkpoints contain.
    Gradients are accumulated and reduced in float32, unless `parallel.reduce_dtype` is `auto`.
    """

    name = "zero1"

    def setup(self, model: nn.Module) -> nn.Module:
        self.model = model
        self.trained = trained_parameters(model)
        sync_weights(model, self.world)
        self.changing_buffers = changing_buffers(model) if self.world.size > 1 else []
        self.buckets = ShardedBuckets(
            self.trained,
            int(self.config.parallel.bucket_cap_mb * 2**20),
            self.world,
            low_dtype(self.config),
            keep=batch_norm_parameters(model),
            reduces_in_float32=self.config.parallel.reduce_dtype == "float32",
        )
        return model

    def setup_optimizer(self, build: OptimizerFactory) -> torch.optim.Optimizer:
        self.optimizer = build([(piece.name, piece.values) for piece in self.buckets.pieces])
        return self.optimizer

    def forward_backward(self, micro_step: MicroStep, num_micro_batches: int) -> None:
        self.accumulate(micro_step, self.model, num_micro_batches)

    def begin_accumulation(self) -> None:
        self.buckets.zero()

    def last_backward(self, loss: torch.Tensor) -> None:
        self.buckets.start_reducing()
        loss.backward()

    def end_accumulation(self) -> None:
        self.note_computed()
        self.buckets.finish()
        self.world.broadcast(self.changing_buffers)

    def clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        return clip_to(max_norm, self.buckets.norm(), self.buckets.scale)

    def local_grad_finite(self) -> torch.Tensor | None:
        return self.buckets.local_sum()

    @property
    def replica_group(self) -> Communicator:
        return self.world

    def optimizer_step(self, apply: OptimizerStep) -> bool:
        updated = apply(self.optimizer)
        if updated:
            self.buckets.gather()
        return updated

    def after_load(self) -> None:
        with uncounted():
            self.buckets.gather()

    def replicated_tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        return self.model.named_parameters()  # without the optimizer state, which is sharded

    def tensor_shards(self) -> Iterable[TensorShard]:
        for piece in self.buckets.pieces:
            yield TensorShard(
                piece.name, piece.values, piece.shape, (piece.start,), key=piece.values, flat=True
            )
        for name, buffer in persistent_buffers(self.model).items():
            yield TensorShard.full(name, buffer, owned=self.world.is_rank_zero)

    def memory_tensors(self) -> list[torch.Tensor]:
        return [
            *self.model.parameters(),
            *all_buffers(self.model),
            *self.buckets.weights,
            *self.buckets.flats,
            *optimizer_tensors(self.optimizer),
        ]
