"""`diloco`: workers train on their own; how far they came in so many steps is the gradient of an
outer optimizer."""

import torch
from torch import nn

from paceline.parallel.local_sgd.schedule import fragment
from paceline.parallel.local_sgd.strategy import LocalSGDBase
from paceline.parallel.local_sgd.sync import GroupMean, PendingSync


class DiLoCoStrategy(LocalSGDBase):
    """Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models" (2023),
    algorithm 1: the outer gradient is the mean over the workers of the outer parameters less their
    own; the outer optimizer is SGD with Nesterov momentum, in torch's form: m ← μ m + Δ, θ ← θ - η
    (Δ + μ m).

    Fragments, overlap and outer gradients of few bits are those of Douillard et al., "Streaming
    DiLoCo with overlapping communication" (2025), section 2: an overlapped synchronisation ends
    with a mixture of a worker's own parameters (a share of ``overlap_mix``) and the outer ones.

    A rank keeps the outer parameters and their momentum for its share alone: all of them where a
    worker is one rank.
    """

    name = "diloco"

    def setup(self, model: nn.Module) -> nn.Module:
        model = super().setup(model)
        self.outer = [self.vector.read(*self.share_of(one)) for one in range(self.rhythm.fragments)]
        self.momentum = [torch.zeros_like(one) for one in self.outer]
        return model

    def start_apart(self) -> None:
        for number, outer in enumerate(self.outer):
            outer.copy_(self.vector.read(*self.share_of(number)))

    def depart(self, number: int) -> PendingSync:
        gradient = self.outer[number] - self.vector.read(*self.share_of(number))
        return PendingSync(GroupMean(gradient, self.far, self.local.outer_dtype))

    def arrive(self, number: int, landed: torch.Tensor) -> None:
        outer, momentum = self.outer[number], self.momentum[number]
        decay, rate = self.local.outer_momentum, self.local.outer_learning_rate
        momentum.mul_(decay).add_(landed)
        outer.sub_(landed.add(momentum, alpha=decay), alpha=rate)
        start, stop = fragment(self.vector.size, self.rhythm.fragments, number)
        values = self.hand_on(outer, start, stop)
        if self.rhythm.overlap:
            values = torch.lerp(values, self.vector.read(start, stop), self.local.overlap_mix)
        self.vector.write(start, values)

    def outer_state(self) -> dict[str, list[tuple[int, torch.Tensor]]]:
        starts = [self.share_of(one)[0] for one in range(self.rhythm.fragments)]
        return {
            "outer/parameters": list(zip(starts, self.outer, strict=True)),
            "outer/momentum": list(zip(starts, self.momentum, strict=True)),
        }
