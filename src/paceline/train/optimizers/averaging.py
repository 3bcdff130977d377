"""Keep an exponential moving average of the trained weights (`train_args.ema_decay`).

The average of an element depends on that element only, so every strategy computes the same one,
however it shards the weights. It is part of the optimizer's state, and so it is sharded, offloaded
and saved with it.
"""

from typing import Any

import torch

#: Entry of a parameter's state: the average; the weights of training while the parameter has the
#: average.
_AVERAGE, _TRAIN_WEIGHTS = "average", "train_weights"


class AveragedWeights(torch.optim.Optimizer):
    """Added in front of the class of an optimizer by :func:`average_weights`.

    Evaluation, checkpoints and the trained model have the average as their weights. A checkpoint
    contains the weights of training as ``train_weights``.
    """

    ema_decay: float

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the parameters and then their average, which begins with the initial weights."""
        assert closure is None
        params = [param for group in self.param_groups for param in group["params"]]
        # Some optimizers create the state of a parameter at its first gradient, if there is none.
        initial = {
            param: param.clone()
            for param in params
            if param.grad is not None and _AVERAGE not in self.state.get(param, {})
        }
        super().step()
        share: float | torch.Tensor = 1 - self.ema_decay
        skipped = getattr(self, "found_inf", None)  # 1 if a fused optimizer has skipped the step
        if skipped is not None:
            share = share * (1 - skipped)
        for param, weights in initial.items():
            self.state[param][_AVERAGE] = weights
        for param in params:
            if _AVERAGE in self.state.get(param, {}):
                self.state[param][_AVERAGE].lerp_(param, share)

    def eval(self) -> None:
        """Replace the weights by their average."""
        self._swap(_AVERAGE, _TRAIN_WEIGHTS)

    def train(self) -> None:
        """Restore the weights of training, also after loading a checkpoint."""
        self._swap(_TRAIN_WEIGHTS, _AVERAGE)

    @torch.no_grad()
    def _swap(self, before: str, after: str) -> None:
        """Exchange the weights with an entry of the state, which is renamed."""
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if before in state:
                    weights, other = param.clone(), state.pop(before)
                    param.copy_(other)
                    other.copy_(weights)
                    state[after] = other


def average_weights(optimizer: torch.optim.Optimizer, decay: float) -> None:
    """Make an optimizer keep an average of the weights.

    Args:
        decay: share of the previous average in the next one.
    """
    cls = type(optimizer)
    optimizer.__class__ = type(f"Averaged{cls.__name__}", (AveragedWeights, cls), {})
    assert isinstance(optimizer, AveragedWeights)
    optimizer.ema_decay = decay
