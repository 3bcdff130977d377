"""`local_sgd`: workers train independently and average their parameters every few steps.
`diloco`: the change of the parameters over these steps is the gradient of an outer optimizer."""

import torch
from torch import nn

from paceline.parallel.local_sgd.schedule import fragment
from paceline.parallel.local_sgd.strategy import LocalSGDBase
from paceline.parallel.local_sgd.sync import FlatParams, GroupMean, PendingSync


class LocalSGDStrategy(LocalSGDBase):
    """Stich, "Local SGD Converges Fast and Communicates Little" (2019), algorithm 1; with
    ``warmup_steps`` post-local SGD (Lin et al., "Don't Use Large Mini-Batches, Use Local SGD",
    2020, section 3).

    Overlapped: after k more steps each worker adds to its parameters how far, when the average was
    taken, they lay from it; its steps since then are kept (Zhou et al., "DaSGD: Squeezing SGD
    Parallelization Performance in Distributed Training Using Delayed Averaging", 2020, section 3).
    """

    name = "local_sgd"
    flights_are_shared = False  # each worker's correction

    def depart(self, number: int) -> PendingSync:
        message = self.vector.read(*self.share_of(number))
        own = message.clone() if self.rhythm.overlap else None
        return PendingSync(GroupMean(message, self.far), own)

    def arrive(self, number: int, landed: torch.Tensor) -> None:
        start, stop = fragment(self.vector.size, self.rhythm.fragments, number)
        values = self.hand_on(landed, start, stop)
        if self.rhythm.overlap:
            values = self.vector.read(start, stop).add_(values)
        self.vector.write(start, values)
        if self.local.average_optimizer_state:
            for moments in self._moments():
                mean = GroupMean(moments.read(*self.share_of(number)), self.far).value()
                moments.write(start, self.hand_on(mean, start, stop))

    def _moments(self) -> list[FlatParams]:
        """The optimizer's state of each kind that has an element for each of a parameter's."""
        states = [self.optimizer.state.get(one, {}) for one in self.trained.values()]
        kinds = sorted({key for state in states for key in state} - {"step"})
        shapes = [one.shape for one in self.trained.values()]
        found = []
        for kind in kinds:
            tensors = [state.get(kind) for state in states]
            if all(
                isinstance(one, torch.Tensor) and one.shape == shape
                for one, shape in zip(tensors, shapes, strict=True)
            ):
                found.append(FlatParams(tensors))
        return found


class DiLoCoStrategy(LocalSGDBase):
    """Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models" (2023),
    algorithm 1: the outer gradient is the mean over the workers of the outer parameters less their
    own; the outer optimizer is SGD with Nesterov momentum, in torch's form: m ← μ m + Δ, θ ← θ - η
    (Δ + μ m).

    Fragments, overlap and outer gradients of few bits are those of Douillard et al., "Streaming
    DiLoCo with overlapping communication" (2025), section 2: an overlapped synchronisation ends
    with a mixture of a worker's own parameters (a share of ``fragment_update_alpha``) and the outer
    ones.

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
            values = torch.lerp(
                values, self.vector.read(start, stop), self.local.fragment_update_alpha
            )
        self.vector.write(start, values)

    def outer_state(self) -> dict[str, list[tuple[int, torch.Tensor]]]:
        starts = [self.share_of(one)[0] for one in range(self.rhythm.fragments)]
        return {
            "outer/parameters": list(zip(starts, self.outer, strict=True)),
            "outer/momentum": list(zip(starts, self.momentum, strict=True)),
        }
