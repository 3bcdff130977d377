"""Adam's second moment of each rank's local gradient, and the direction that follows from it.

If few elements are sent, a common Adam sees a gradient that is zero nearly everywhere and large
where the gradients of many steps arrive at once. Its second moment is then the moment of the
bursts, and training is many times slower. So each rank keeps the moment of its full local gradient
and compresses the direction, with error feedback (Chen et al., "Quantized Adam with Error
Feedback", 2021, algorithm 1; Chen et al., "Efficient-Adam: Communication-Efficient Distributed
Adam", 2022). This is not the moment of the global gradient: it has the noise of a smaller batch, so
directions are slightly shorter.

Unlike in these papers there is no first moment. An element waits many steps in the residual before
it is sent, and its directions are added up there meanwhile. That is the average that a first moment
would make; both together would delay twice. So it takes as much memory as Adam: residual and
second moment.
"""

from collections.abc import Callable

import torch
from torch.optim.optimizer import ParamsT

from paceline.distributed import torch_compat
from paceline.parallel.state import SECOND_MOMENT
from paceline.strategies.reducers.compression.base import CompressorState, blocks


class LocalAdam:
    """Turns gradients into directions. The moment is in the :class:`CompressorState` of each
    bucket.

    Args:
        beta, epsilon: Adam's beta 2 and epsilon.
    """

    def __init__(self, beta: float, epsilon: float) -> None:
        self.beta = beta
        self.epsilon = epsilon

    def add_state(self, state: CompressorState, device: torch.device) -> None:
        """Add the second moment, zero, to the state of a bucket."""
        state.flats[SECOND_MOMENT] = torch.zeros(state.bucket.size, device=device)

    def direct(self, flat: torch.Tensor, state: CompressorState, age: int, num_ranks: int) -> None:
        """Replace this rank's share of the gradient by its share of the direction. Both add up
        over the ranks.

        Kingma & Ba, "Adam: A Method for Stochastic Optimization", 2015, algorithm 1 with a beta 1
        of 0, without the learning rate. N times this rank's gradient is an estimate of the global
        one: the moment is of that.

        Args:
            age: number of gradients in the moment, including this one.
        """
        for values, second in blocks(flat, state.flats[SECOND_MOMENT]):
            second.mul_(self.beta).addcmul_(values, values, value=(1 - self.beta) * num_ranks**2)
            values.div_((second / (1 - self.beta**age)).sqrt_().add_(self.epsilon))


class DirectionOptimizer(torch.optim.Optimizer):
    """Steps along directions that are already in the gradients. It has no state.

    Args:
        groups: with ``params``, ``lr`` and ``weight_decay``; the decay is decoupled (Loshchilov &
            Hutter, "Decoupled Weight Decay Regularization", 2019, algorithm 2).
    """

    def __init__(self, groups: ParamsT) -> None:
        super().__init__(groups, {"lr": 1e-3, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters = [each for each in group["params"] if each.grad is not None]
            if not parameters:
                continue
            if group["weight_decay"]:
                torch_compat.foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
            gradients = [parameter.grad for parameter in parameters]
            torch_compat.foreach_add_(parameters, gradients, alpha=-group["lr"])
