"""Adam's moments of this rank's own gradient, and the direction that follows from them.

Where few elements are sent, a common Adam sees a gradient that is zero nearly everywhere and large where many steps' worth
comes at once: its second moment is then that of the bursts, and training is many times slower. So each rank keeps the moments
of its own, whole gradient, and what is compressed, with error feedback, is the direction (Chen et al., "Quantized Adam with
Error Feedback", 2021, algorithm 1; Chen et al., "Efficient-Adam: Communication-Efficient Distributed Adam", 2022). The moments
are not those of the global gradient: the noise of a smaller batch is in them, so directions are a little shorter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paceline.compress.base import BucketShape, State

MOMENTS = ("exp_avg", "exp_avg_sq")


class LocalAdam:
    """Turns gradients into directions. The moments are in the :class:`State` of each bucket.

    Args:
        betas, epsilon: as torch.optim.Adam's.
    """

    def __init__(self, betas: tuple[float, float], epsilon: float) -> None:
        self.betas = betas
        self.epsilon = epsilon

    def add_state(self, state: State, bucket: BucketShape, device: torch.device) -> None:
        for kind in MOMENTS:
            state.flats[kind] = torch.zeros(bucket.size, dtype=torch.float32, device=device)

    def state_bytes(self, bucket: BucketShape) -> int:
        return 4 * bucket.size * len(MOMENTS)

    def direct(self, flat: torch.Tensor, state: State, age: int, num_ranks: int) -> None:
        """Put this rank's share of the direction in the place of its share of the gradient: both add up over the ranks.

        Kingma & Ba, "Adam: A Method for Stochastic Optimization", 2015, algorithm 1; without the learning rate.

        Args:
            age: how many gradients the moments have seen, this one among them.
        """
        first, second = (state.flats[kind] for kind in MOMENTS)
        beta1, beta2 = self.betas
        flat.mul_(num_ranks)  # an estimate of the whole gradient
        first.lerp_(flat, 1 - beta1)
        second.mul_(beta2).addcmul_(flat, flat, value=1 - beta2)
        torch.div(second, 1 - beta2**age, out=flat)
        flat.sqrt_().add_(self.epsilon)
        torch.div(first, flat, out=flat)
        flat.div_((1 - beta1**age) * num_ranks)


class Apply(torch.optim.Optimizer):
    """Makes the step along a direction that is there already: no state of its own.

    Args:
        groups: with ``params``, ``lr`` and ``weight_decay``; the decay is decoupled (Loshchilov & Hutter, "Decoupled Weight
            Decay Regularization", 2019, algorithm 2).
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {"lr": 1e-3, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            moved = [one for one in group["params"] if one.grad is not None]
            if not moved:
                continue
            if group["weight_decay"]:
                torch._foreach_mul_(moved, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(moved, [one.grad for one in moved], alpha=-group["lr"])
