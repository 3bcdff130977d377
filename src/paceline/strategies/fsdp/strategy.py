"""`zero2` and `zero3`: shard weights, gradients and optimizer state with torch's FSDP2."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager

import torch
from torch import nn

from paceline.config.schema import Config
from paceline.distributed.communicator import Communicator
from paceline.models.weights.load import deferred_conversion
from paceline.parallel.gradients import clip_to
from paceline.parallel.optimizer_state import optimizer_tensors
from paceline.parallel.save_load import trained_state
from paceline.parallel.state import TensorShard, frozen_parts, low_dtype
from paceline.parallel.strategy import EvalFn, MicroStep, Strategy
from paceline.strategies.fsdp.gather import gathered, gathered_bytes
from paceline.strategies.fsdp.sharding import FSDPSharding


class FSDPStrategy(Strategy):
    """ZeRO stages 2 and 3 (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
    Parameter Models", 2020, sections 5.2 and 5.3).

    In stage 3, each rank holds one shard of weights, gradients and optimizer state, and gathers the
    weights of a block when forward or backward reaches it. In stage 2
    (``reshard_after_forward=False``), gathered weights are kept from the first forward of a step to
    its last backward, which frees them block by block. Gradients are sharded after each
    micro-batch.

    With hybrid sharding (axis ``data`` in addition to ``shard``), each replica holds all shards,
    and the gradients of the replicas are all-reduced once per step, in the last backward.
    """

    name = "zero3"
    rank0_has_full_model = False

    def __init__(
        self, config: Config, world: Communicator, reshard_after_forward: bool = True
    ) -> None:
        super().__init__(config, world)
        self.reshard_after_forward = reshard_after_forward

    def model_init_context(self) -> AbstractContextManager[None]:
        return deferred_conversion()

    def setup(self, model: nn.Module) -> nn.Module:
        self.sharding = FSDPSharding(
            model,
            self.world,
            low_dtype=low_dtype(self.config),
            reduces_in_float32=self.config.parallel.reduce_dtype == "float32",
            reshard_after_forward=self.reshard_after_forward,
            offload=self.config.parallel.state_offload == "all",
        )
        self.trained = self.sharding.trained
        return model

    def forward_backward(self, micro_step: MicroStep, num_micro_batches: int) -> None:
        self.accumulate(micro_step, self.sharding.model, num_micro_batches)

    def begin_accumulation(self) -> None:
        self.sharding.begin_step()

    def last_backward(self, loss: torch.Tensor) -> None:
        self.sharding.prepare_last_backward()
        if not self.reshard_after_forward:
            self.sharding.note_gathered()
        loss.backward()

    def end_accumulation(self) -> None:
        self.sharding.end_step()

    def clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        squared = self.sharding.squared_norm()
        self.world.wait(self.sharding.shards.all_reduce(squared))
        return clip_to(max_norm, squared.sqrt().float(), self.sharding.scale)

    def evaluate(self, run: EvalFn, model: nn.Module) -> dict[str, torch.Tensor] | None:
        result = run(model)
        self.sharding.reshard()
        return self.reported(result)

    @property
    def bytes_to_gather(self) -> int:
        return gathered_bytes(self.sharding)

    def gathered(self) -> AbstractContextManager[None]:
        return gathered(self.sharding)

    @property
    def replica_group(self) -> Communicator:
        return self.sharding.copies

    def replicated_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from trained_state(self)
        yield from frozen_parts(self.sharding.model)

    def tensor_shards(self) -> Iterable[TensorShard]:
        return self.sharding.tensor_shards()

    def after_load(self) -> None:
        self.sharding.reshard()

    def memory_tensors(self) -> list[torch.Tensor]:
        return [*self.sharding.memory_tensors(), *optimizer_tensors(self.optimizer)]

    @property
    def transient_bytes(self) -> int:
        return self.sharding.gathered_bytes
