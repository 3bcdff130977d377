"""Muon for hidden matrices (Jordan et al., 2024; Liu et al., "Muon is Scalable for LLM Training",
2025) together with AdamW for the other parameters."""

from collections.abc import Callable

import torch
from torch.optim.optimizer import ParamsT


class MuonWithAdamW(torch.optim.Optimizer):
    """torch's Muon and AdamW as one optimizer with a common state.

    Args:
        groups: parameter groups; ``is_hidden`` is true in those that Muon updates, whose parameters
            must be 2-D.
        lr: learning rate of both. Muon's steps are scaled so that they are as large as AdamW's.
        betas: betas of AdamW.
        eps: epsilon of AdamW.
        momentum: momentum of Muon.
        fused: whether AdamW is fused.
    """

    def __init__(
        self,
        groups: ParamsT,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        momentum: float,
        fused: bool,
    ) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0, "fused": fused})
        hidden = [group for group in self.param_groups if group["is_hidden"]]
        others = [group for group in self.param_groups if not group["is_hidden"]]
        self.parts: list[torch.optim.Optimizer] = []
        # The parts keep the groups themselves, not copies, so the schedule sets their rates too.
        if hidden:
            self.parts.append(
                torch.optim.Muon(hidden, lr, momentum=momentum, adjust_lr_fn="match_rms_adamw")
            )
        if others:
            self.parts.append(torch.optim.AdamW(others, lr, betas, eps, fused=fused))
        for part in self.parts:
            part.state = self.state

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()
