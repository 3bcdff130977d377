"""Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023)."""

from collections.abc import Callable, Iterable
from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """Lion: the step is the sign of an interpolation of momentum and gradient, with decoupled
    weight decay. Its state is one float32 momentum per element.

    Args:
        params: parameters or parameter groups.
        lr: learning rate.
        betas: weights of the momentum in the step and in the running mean.
        weight_decay: decoupled weight decay.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float],
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            rate, (beta1, beta2) = group["lr"], group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param)
                momentum = state["exp_avg"]
                param.mul_(1 - rate * group["weight_decay"])
                param.add_(torch.lerp(param.grad, momentum, beta1).sign_(), alpha=-rate)
                momentum.lerp_(param.grad, 1 - beta2)
