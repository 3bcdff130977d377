"""A worker that simulates training as common tools do it instead of with Paceline's settings: the
logits of all tokens, gradients summed in float32 by FSDP, whose root has the embedding and the head
and is freed after forward, whole embeddings and heads, and weights of tensor parallelism in
bfloat16 with gradients that are freed after each step. Started by test_simulated_ranks.py."""

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.flop_counter import FlopCounterMode

from paceline.models.blocks import ModelEnds
from paceline.models.tensor_plan.style import VOCABULARY
from paceline.parallel.buckets.gradients import squared_norm_of
from paceline.simulation import rank, worker
from paceline.strategies.fsdp import sharding
from paceline.strategies.hybrid import strategy as hybrid
from paceline.strategies.tensor import shard
from paceline.tasks.language import LanguageTask


def full_loss(task: LanguageTask, model: Any, batch: Any) -> Any:
    """Return the loss of transformers, which computes all logits."""
    return model(input_ids=batch["input_ids"], labels=batch["input_ids"], use_cache=False).loss


class SeparateGradients:
    """Gradients that are all-reduced one by one after backward."""

    def __init__(self, parameters: Iterable[nn.Parameter], _: int, world: Any, __: Any) -> None:
        self.parameters, self.world = list(parameters), world

    @property
    def flats(self) -> list[torch.Tensor]:
        return [each.grad for each in self.parameters if each.grad is not None]

    def zero(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def start_reducing(self) -> None:
        pass

    def finish(self) -> None:
        for gradient in self.flats:
            self.world.wait(self.world.all_reduce(gradient))

    def local_sum(self) -> torch.Tensor:
        return self.parameters[0].new_zeros(())

    def norm(self) -> torch.Tensor:
        return squared_norm_of(self.flats, self.world.device).sqrt().float()

    def scale(self, factor: torch.Tensor) -> None:
        for gradient in self.flats:
            gradient.mul_(factor.to(gradient.dtype))


def _free_after_forward(module: nn.Module, **settings: Any) -> None:
    fully_shard(module, **{**settings, "reshard_after_forward": True})


def use_plain_settings(with_tensor_parallelism: bool) -> None:
    LanguageTask.loss = full_loss  # type: ignore[method-assign]
    sharding.find_ends = lambda model: ModelEnds()
    sharding.fully_shard = _free_after_forward
    LanguageTask.setup = lambda task, model: []  # type: ignore[method-assign]
    if with_tensor_parallelism:
        find_plan = hybrid.find_tensor_plan
        hybrid.find_tensor_plan = lambda model, configured: {
            name: style
            for name, style in find_plan(model, configured).items()
            if style not in VOCABULARY
        }
        shard.uses_sequence_parallel = lambda *_: False
        build = rank.language_model_on_meta
        rank.language_model_on_meta = lambda config, device: build(config, device).bfloat16()
        hybrid.make_buckets = lambda strategy, trained, group: (
            SeparateGradients(trained.values(), 0, group, None),
            None,
        )


def count_operations() -> None:
    """Run the second step within torch's FlopCounterMode, whose hooks keep outputs of modules
    during backward."""
    step = rank.SimulatedRank._step

    def counted(self: rank.SimulatedRank, number: int) -> None:
        run = self.strategy.forward_backward

        def forward_backward(*args: Any) -> None:
            with FlopCounterMode(display=False):
                run(*args)

        self.strategy.forward_backward = forward_backward if number else run  # type: ignore[method-assign]
        try:
            step(self, number)
        finally:
            self.strategy.forward_backward = run  # type: ignore[method-assign]

    rank.SimulatedRank._step = counted  # type: ignore[method-assign]


if __name__ == "__main__":
    if "counted" in sys.argv:
        count_operations()
    use_plain_settings(with_tensor_parallelism="tensor 4" in sys.argv)
    worker.main()
