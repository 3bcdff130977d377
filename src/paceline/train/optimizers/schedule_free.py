"""Schedule-free AdamW (Defazio et al., "The Road Less Scheduled", 2024), from schedulefree."""

from schedulefree import AdamWScheduleFree
from torch import Tensor, float64, no_grad, tensor

#: Scalars of a parameter group that a checkpoint contains for each parameter.
_SCALARS = ("k", "weight_sum", "lr_max")


class ScheduleFreeAdamW(AdamWScheduleFree):  # type: ignore[misc]
    """AdamWScheduleFree whose weights can be replaced by their average and restored exactly.

    Training changes weights between the average and the last iterate ``z``. For evaluation, for
    checkpoints and for the trained model they are replaced by the average. schedulefree computes
    the weights of training from the average again, with other rounding; here they are kept in the
    state meanwhile, so that neither evaluation nor a checkpoint changes the run. A checkpoint
    contains them as ``train_weights``.
    """

    @no_grad()
    def eval(self) -> None:
        """Replace the weights by their average."""
        for group in self.param_groups:
            if not group["train_mode"]:
                continue
            for param in group["params"]:
                state = self.state[param]
                if "z" in state:
                    state["train_weights"] = param.clone()
                    state.update(
                        {key: tensor(float(group[key]), dtype=float64) for key in _SCALARS}
                    )
        super().eval()

    @no_grad()
    def train(self) -> None:
        """Restore the weights of training, also after loading a checkpoint."""
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if "train_weights" in state:
                    param.copy_(state.pop("train_weights"))
                    values: dict[str, Tensor] = {key: state.pop(key) for key in _SCALARS}
                    group["k"] = int(values["k"])
                    group["weight_sum"] = float(values["weight_sum"])
                    group["lr_max"] = float(values["lr_max"])
            group["train_mode"] = True
