"""`ddp` that sums the gradient of each parameter after backward, one after another."""

from collections.abc import Iterable

import torch
from torch import nn

from paceline.parallel.gradients import clip_to
from paceline.parallel.initial_weights import sync_weights
from paceline.parallel.optimizer_state import optimizer_tensors
from paceline.parallel.state import TensorShard, all_buffers, full_shards, trained_parameters
from paceline.parallel.strategy import MicroStep, Strategy


class LateDDPStrategy(Strategy):
    """Each rank has a full replica. Gradients are summed once all micro-batches are done."""

    name = "late_ddp"

    def setup(self, model: nn.Module) -> nn.Module:
        self.model = model
        self.trained = trained_parameters(model)
        sync_weights(model, self.world)
        return model

    def begin_accumulation(self) -> None:
        for param in self.trained.values():
            param.grad = torch.zeros_like(param)

    def forward_backward(self, micro_step: MicroStep, num_micro_batches: int) -> None:
        self.accumulate(micro_step, self.model, num_micro_batches)

    def end_accumulation(self) -> None:
        for grad in self.grads:
            self.world.wait(self.world.all_reduce(grad))

    def clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        norm = torch.linalg.vector_norm(torch.stack([grad.norm() for grad in self.grads]))
        return clip_to(max_norm, norm, lambda factor: torch._foreach_mul_(self.grads, factor))

    def tensor_shards(self) -> Iterable[TensorShard]:
        return full_shards(self.trained, self.model, owned=self.world.is_rank_zero)

    def memory_tensors(self) -> list[torch.Tensor]:
        state = [*self.grads, *optimizer_tensors(self.optimizer)]
        return [*self.model.parameters(), *all_buffers(self.model), *state]

    @property
    def grads(self) -> list[torch.Tensor]:
        return [param.grad for param in self.trained.values() if param.grad is not None]
