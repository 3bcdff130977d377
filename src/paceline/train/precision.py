"""Mixed precision."""

import os
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from paceline.config.schema.train_args import TrainArgs
from paceline.core.errors import ConfigError
from paceline.core.formatting import rank_names
from paceline.distributed.communicator import Communicator
from paceline.health.anomalies import UpdateDecision
from paceline.parallel.loss_scale import LossScaler


class Precision:
    """Autocast for the forward pass and, for float16, dynamic loss scaling; neither for float32.
    The loss scale is part of the checkpoint. For float32 products, `train_args.tf32` is set in this
    process."""

    def __init__(self, args: TrainArgs, world: Communicator) -> None:
        assert args.precision != "auto" or world.device.type == "cpu", (
            "`precision: auto` is resolved before ranks start"
        )
        set_float32_precision(args.tf32)
        self.device = world.device
        self.dtype = None if args.mixed_dtype is None else getattr(torch, args.mixed_dtype)
        self.scaler = LossScaler(world.device) if args.mixed_dtype == "float16" else None

    def autocast(self) -> AbstractContextManager[Any]:
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss if self.scaler is None else loss * self.scaler.scale.to(loss.device)

    def step(self, optimizer: torch.optim.Optimizer, decision: UpdateDecision) -> bool:
        """Run the optimizer's step and adapt the loss scale.

        A strategy that itself decides whether to skip the step calls :meth:`update_scale`
        afterwards.

        Returns:
            False if the step was skipped because the gradient is not finite. True if it was made,
            or if a fused optimizer decides on the device.
        """
        if decision.grad_norm is None:
            optimizer.step()
            return True
        is_finite = decision.grad_norm.isfinite()
        updates = decision.on_device or bool(is_finite)
        if decision.on_device:
            # As in torch's GradScaler, a skipped step leaves parameters, moments and step counts
            # unchanged.
            fused: Any = optimizer
            fused.found_inf = (~is_finite).float()
            try:
                optimizer.step()
            finally:
                del fused.found_inf
        elif updates:
            optimizer.step()
        self.update_scale(is_finite)
        return updates

    def update_scale(self, grad_is_finite: torch.Tensor | bool) -> None:
        """Adapt the loss scale to the outcome of a step."""
        if self.scaler is not None:
            self.scaler.update(grad_is_finite)


def set_float32_precision(tf32: bool | None) -> None:
    """Set `train_args.tf32` for all matrix products, convolutions and recurrent layers of this
    process. None leaves torch's defaults."""
    if tf32 is not None:
        # `fp32_precision` does not set what Inductor reads, and torch refuses to read a mixture.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch prefers `fp32_precision`
            torch.backends.cuda.matmul.allow_tf32 = tf32
            torch.backends.cudnn.allow_tf32 = tf32


def use_deterministic_algorithms() -> None:
    """Make each operation of this process give the same bits in every run. Must be called before
    anything is computed on an accelerator. An operation without such an algorithm raises an
    error."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("FLASH_ATTENTION_DETERMINISTIC", "1")  # read by transformers
    torch.use_deterministic_algorithms(True)
    # Only finds reads of memory that was never written, and takes time.
    settings: Any = torch.utils.deterministic
    settings.fill_uninitialized_memory = False


def check_same_precision(world: Communicator, args: TrainArgs) -> None:
    """Raise ConfigError if ``precision: auto`` was resolved to different precisions on different
    ranks. A collective."""
    precisions = world.gather_objects(args.precision)
    if len(set(precisions)) > 1:
        ranks: dict[str, list[int]] = {precision: [] for precision in precisions}
        for rank, precision in enumerate(precisions):
            ranks[precision].append(rank)
        by_precision = "; ".join(f"{name} on {rank_names(ranks[name])}" for name in ranks)
        raise ConfigError(
            "`precision: auto` is not the same on all ranks: {by_precision}",
            code="different-precision",
            fix="set `train_args.precision`: `fp16-mixed` and `32` are supported on all of them",
            by_precision=by_precision,
        )
