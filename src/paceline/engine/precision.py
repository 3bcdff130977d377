"""Mixed precision and activation checkpointing."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline.config.schema import TrainArgs
from paceline.core.errors import ConfigError
from paceline.world.group import World


class Precision:
    """Autocast around forward and, for float16, dynamic loss scaling (Micikevicius et al., 2018, section 3.2).

    float32 runs through here unchanged. The scale is part of the checkpoint.
    """

    def __init__(self, args: TrainArgs, world: World) -> None:
        self.world = world
        device = world.device
        self.dtype = None if args.mixed_dtype is None else getattr(torch, args.mixed_dtype)
        self.device = device
        self.scaler = torch.amp.GradScaler(device.type) if args.mixed_dtype == "float16" else None

    def autocast(self) -> AbstractContextManager[Any]:
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss if self.scaler is None else self.scaler.scale(loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, norm: torch.Tensor | None = None, late: bool = False) -> bool:
        """Make the optimizer's step. False where it was skipped: float16 gradients overflowed, on any rank, or the gradient's
        ``norm`` is given and not finite. ``late``: the device decides, see :func:`skips_on_device`; True is returned."""
        if self.scaler is None:
            if norm is None:
                optimizer.step()
            elif late:
                _step_where(optimizer, norm.isfinite())
            elif bool(norm.isfinite()):
                optimizer.step()
            else:
                return False
            return True
        before = self.scaler.get_scale()
        # A rank that holds a part of the gradients sees the overflows of that part alone.
        for found in self.scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
            self.world.wait(self.world.all_reduce(found, dist.ReduceOp.MAX))
        self.scaler.step(optimizer)
        self.scaler.update()
        return self.scaler.get_scale() >= before

    def state(self) -> dict[str, torch.Tensor]:
        if self.scaler is None:
            return {}
        held = self.scaler.state_dict()
        return {
            "scaler/scale": torch.tensor(held["scale"], dtype=torch.float64),
            "scaler/growth_tracker": torch.tensor(held["_growth_tracker"]),
        }

    def load_state(self, numbers: dict[str, float]) -> None:
        if self.scaler is None or "scaler/scale" not in numbers:
            return
        held = self.scaler.state_dict()
        held["scale"] = float(numbers["scaler/scale"])
        held["_growth_tracker"] = int(numbers["scaler/growth_tracker"])
        self.scaler.load_state_dict(held)


def skips_on_device(optimizer: torch.optim.Optimizer, norm: torch.Tensor) -> bool:
    """Whether the optimizer can leave a step out by a flag on the device of ``norm``: torch's fused ones."""
    able = getattr(optimizer, "_step_supports_amp_scaling", False)
    return bool(able) and all(one.device == norm.device for group in optimizer.param_groups for one in group["params"])


def _step_where(optimizer: Any, finite: torch.Tensor) -> None:
    # As torch's own GradScaler hands it over: parameters, moments and step counts stay as they are.
    optimizer.found_inf = (~finite).float()
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf


def checkpoint_activations(model: nn.Module) -> None:
    """Recompute activations in backward, block by block: by the model's own switch where it has one, else for each child of
    every ModuleList and Sequential.

    Raises:
        ConfigError: the model has no blocks to do it for.
    """
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if callable(enable):
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return
    blocks = [
        child
        for module in model.modules()
        if isinstance(module, nn.ModuleList | nn.Sequential)
        for child in module
        if not isinstance(child, nn.ModuleList | nn.Sequential) and any(True for _ in child.parameters())
    ]
    if not blocks:
        raise ConfigError(
            f"`gradient_checkpointing: true`, and {type(model).__name__} has no ModuleList or Sequential to recompute",
            fix="turn it off, or give the model a method gradient_checkpointing_enable(gradient_checkpointing_kwargs)",
        )
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
