"""`local_sgd`: workers train independently and average their parameters every few steps.
`diloco`: the change of the parameters over these steps is the gradient of an outer optimizer."""

import torch
from torch import nn

from paceline.strategies.local_sgd.state import ResumableLocalSGD
from paceline.strategies.local_sgd.sync import FlatParams, GroupMean, PendingSync


class LocalSGDStrategy(ResumableLocalSGD):
    """Stich, "Local SGD Converges Fast and Communicates Little" (2019), algorithm 1; with
    ``warmup_steps`` post-local SGD (Lin et al., "Don't Use Large Mini-Batches, Use Local SGD",
    2020, section 3).

    With a delay of k steps, each worker adds to its parameters, k steps after the average was
    taken, the difference between the average and its parameters at that time; its steps since then
    are kept (Zhou et al., "DaSGD: Squeezing SGD Parallelization Performance in Distributed Training
    Using Delayed Averaging", 2020, section 3).
    """

    name = "local_sgd"
    has_common_result = False  # each worker has its own correction

    def start_sync(self, number: int) -> PendingSync:
        message = self.params.read(*self.local_range(number))
        sent = message.clone() if self.schedule.delay else None
        return PendingSync(GroupMean(message, self.inter_group), sent)

    def finish_sync(self, number: int, result: torch.Tensor) -> None:
        start, stop = self.fragment_range(number)
        values = self.all_gather_share(result, start, stop)
        if self.schedule.delay:
            values = self.params.read(start, stop).add_(values)
        self.params.write(start, values)
        if self.settings.average_optimizer_state:
            for moments in self._moments():
                local = moments.read(*self.local_range(number))
                mean = GroupMean(local, self.inter_group).value()
                moments.write(start, self.all_gather_share(mean, start, stop))

    def _moments(self) -> list[FlatParams]:
        """Return the optimizer's state of each kind that has the shapes of the parameters."""
        parameters = list(self.trained.values())
        states = [self.optimizer.state.get(parameter, {}) for parameter in parameters]
        moments = []
        for kind in sorted({key for state in states for key in state} - {"step"}):
            tensors = [state.get(kind) for state in states]
            if all(
                isinstance(tensor, torch.Tensor) and tensor.shape == parameter.shape
                for tensor, parameter in zip(tensors, parameters, strict=True)
            ):
                moments.append(FlatParams(tensors))
        return moments


class DiLoCoStrategy(ResumableLocalSGD):
    """Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models" (2023),
    algorithm 1: the outer gradient is the mean over the workers of the outer parameters minus their
    local ones; the outer optimizer is SGD with Nesterov momentum, in torch's form: m ← μ m + Δ, θ ←
    θ - η (Δ + μ m).

    Fragments, delayed synchronization and outer gradients in fewer bits follow Douillard et al.,
    "Streaming DiLoCo with overlapping communication" (2025), section 2: a delayed
    synchronization completes with a mix of a worker's local parameters (a share of
    ``fragment_update_alpha``) and the outer ones.

    A rank keeps the outer parameters and their momentum only for its share: all of them if a worker
    is one rank.
    """

    name = "diloco"

    def setup(self, model: nn.Module) -> nn.Module:
        model = super().setup(model)
        ranges = map(self.local_range, range(self.schedule.fragments))
        self.outer = [self.params.read(start, stop) for start, stop in ranges]
        self.momentum = [torch.zeros_like(outer) for outer in self.outer]
        return model

    def start_local_training(self) -> None:
        for number, outer in enumerate(self.outer):
            outer.copy_(self.params.read(*self.local_range(number)))

    def start_sync(self, number: int) -> PendingSync:
        gradient = self.outer[number] - self.params.read(*self.local_range(number))
        return PendingSync(GroupMean(gradient, self.inter_group, self.settings.outer_dtype))

    def finish_sync(self, number: int, result: torch.Tensor) -> None:
        outer, momentum = self.outer[number], self.momentum[number]
        decay, rate = self.settings.outer_momentum, self.settings.outer_learning_rate
        momentum.mul_(decay).add_(result)
        outer.sub_(result.add(momentum, alpha=decay), alpha=rate)
        start, stop = self.fragment_range(number)
        values = self.all_gather_share(outer, start, stop)
        if self.schedule.delay:
            local = self.params.read(start, stop)
            values = torch.lerp(values, local, self.settings.fragment_update_alpha)
        self.params.write(start, values)

    def outer_state(self) -> dict[str, list[tuple[int, torch.Tensor]]]:
        starts = [self.local_range(number)[0] for number in range(self.schedule.fragments)]
        return {
            "outer/parameters": list(zip(starts, self.outer, strict=True)),
            "outer/momentum": list(zip(starts, self.momentum, strict=True)),
        }
