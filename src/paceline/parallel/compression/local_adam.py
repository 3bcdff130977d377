"""Adam's second moment of this rank's own gradient, and the direction that follows from it.

Where few elements are sent, a common Adam sees a gradient that is zero nearly everywhere and large
where many steps' worth comes at once: its second moment is then that of the bursts, and training is
many times slower. So each rank keeps the moment of its own, whole gradient, and what is compressed,
with error feedback, is the direction (Chen et al., "Quantized Adam with Error Feedback", 2021,
algorithm 1; Chen et al., "Efficient-Adam: Communication-Efficient Distributed Adam", 2022). The
moment is not that of the global gradient: the noise of a smaller batch is in it, so directions are
a little shorter.

Unlike theirs there is no first moment. An element waits many steps in the residual before it is
sent, and its directions are added up there meanwhile: that is the average which the first moment
would make, and both together would be late twice. The memory is so that of Adam: residual and
second moment.
"""

from collections.abc import Callable
from typing import Any

import torch

from paceline.distributed import torch_compat
from paceline.parallel.compression.base import CompressorState, blocks
from paceline.parallel.compression.sizes import BucketShape

SECOND = "exp_avg_sq"


class LocalAdam:
    """Turns gradients into directions. The moment is in the :class:`CompressorState` of each
    bucket.

    Args:
        beta, epsilon: Adam's beta 2 and epsilon.
    """

    def __init__(self, beta: float, epsilon: float) -> None:
        self.beta = beta
        self.epsilon = epsilon

    def add_state(self, state: CompressorState, bucket: BucketShape, device: torch.device) -> None:
        state.flats[SECOND] = torch.zeros(bucket.size, dtype=torch.float32, device=device)

    def direct(self, flat: torch.Tensor, state: CompressorState, age: int, num_ranks: int) -> None:
        """Put this rank's share of the direction in the place of its share of the gradient: both
        add up over the ranks.

        Kingma & Ba, "Adam: A Method for Stochastic Optimization", 2015, algorithm 1 with a beta 1
        of 0, without learning rate. N times this rank's gradient is an estimate of the whole one:
        the moment is of that.

        Args:
            age: how many gradients the moment has seen, this one among them.
        """
        for values, second in blocks(flat, state.flats[SECOND]):
            second.mul_(self.beta).addcmul_(values, values, value=(1 - self.beta) * num_ranks**2)
            values.div_((second / (1 - self.beta**age)).sqrt_().add_(self.epsilon))


class DirectionOptimizer(torch.optim.Optimizer):
    """Makes the step along a direction that is there already: no state of its own.

    Args:
        groups: with ``params``, ``lr`` and ``weight_decay``; the decay is decoupled (Loshchilov &
            Hutter, "Decoupled Weight Decay Regularization", 2019, algorithm 2).
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
                torch_compat.foreach_mul_(moved, 1 - group["lr"] * group["weight_decay"])
            torch_compat.foreach_add_(moved, [one.grad for one in moved], alpha=-group["lr"])
