"""The optimizer and the learning rate's schedule, by torch and transformers."""

import inspect
from typing import Any

import torch
from torch import nn

from paceline.config.derive import ResolvedValues
from paceline.config.schema.train_args import TrainArgs


def matrices_of(model: nn.Module) -> frozenset[str]:
    """Names of the parameters that weight decay falls on: matrices, not biases and norms."""
    return frozenset(
        name for name, one in model.named_parameters(remove_duplicate=False) if one.dim() >= 2
    )


def build_optimizer(
    args: TrainArgs,
    learning_rate: float,
    named: list[tuple[str, nn.Parameter]],
    matrices: frozenset[str],
) -> torch.optim.Optimizer:
    """The optimizer over (name, parameter) pairs. Weight decay falls on those in ``matrices`` (see
    :func:`matrices_of`): a part of a matrix, as sharding strategies hand over, has no shape to tell
    it by."""
    decayed = [one for name, one in named if name in matrices]
    plain = [one for name, one in named if name not in matrices]
    groups: list[dict[str, Any]] = [
        {"params": group, "weight_decay": decay}
        for group, decay in ((decayed, args.weight_decay), (plain, 0.0))
        if group
    ]
    betas = (args.adam_beta1, args.adam_beta2)
    if args.optim in ("adamw", "adam"):
        kind = torch.optim.AdamW if args.optim == "adamw" else torch.optim.Adam
        return kind(
            groups, lr=learning_rate, betas=betas, eps=args.adam_epsilon, fused=_can_fuse(named)
        )
    if args.optim == "sgd":
        return torch.optim.SGD(groups, lr=learning_rate, momentum=args.momentum)
    if args.optim == "rmsprop":
        return torch.optim.RMSprop(groups, lr=learning_rate, momentum=args.momentum)
    if args.optim == "adagrad":
        return torch.optim.Adagrad(groups, lr=learning_rate)
    from transformers.optimization import Adafactor

    return Adafactor(groups, lr=learning_rate, scale_parameter=False, relative_step=False)


def _can_fuse(named: list[tuple[str, nn.Parameter]]) -> bool:
    kinds = {one.device.type for _, one in named}
    return kinds <= {"cpu", "cuda", "xpu", "mps"} and all(
        one.is_floating_point() for _, one in named
    )


class Schedule:
    """Learning rate as a function of the step alone, so that there is nothing to replay after a
    resume.

    Wraps transformers' schedules (all of them multiply the base rate by a function of the step).
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, args: TrainArgs, derived: ResolvedValues
    ) -> None:
        from transformers.optimization import get_scheduler

        self.optimizer = optimizer
        self.base_rates = [group["lr"] for group in optimizer.param_groups]
        self.inner = get_scheduler(
            args.lr_scheduler_type,
            optimizer,
            num_warmup_steps=derived.warmup_steps,
            num_training_steps=derived.steps,
            scheduler_specific_kwargs=_schedule_arguments(args, derived),
        )

    def set_step(self, step: int) -> float:
        """Set the rate for the update number ``step`` (from 0) and return it."""
        rate = 0.0
        for group, base, factor in zip(
            self.optimizer.param_groups, self.base_rates, self.inner.lr_lambdas, strict=True
        ):
            rate = base * factor(step)
            group["lr"] = rate
        return rate


def _schedule_arguments(args: TrainArgs, derived: ResolvedValues) -> dict[str, float | int | str]:
    arguments = dict(args.lr_scheduler_kwargs)
    if args.lr_scheduler_type == "cosine_with_min_lr" and "min_lr" not in arguments:
        arguments.setdefault("min_lr_rate", 0.1)
    if args.lr_scheduler_type == "warmup_stable_decay":
        arguments.setdefault("num_decay_steps", max(1, derived.steps // 10))
    return arguments


def check_schedule(args: TrainArgs) -> str | None:
    """What is wrong with ``lr_scheduler_kwargs``, or None."""
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION, SchedulerType

    accepted = set(
        inspect.signature(
            TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(args.lr_scheduler_type)]  # type: ignore[arg-type]
        ).parameters
    )
    accepted -= {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"}
    unknown = [key for key in args.lr_scheduler_kwargs if key not in accepted]
    if not unknown:
        return None
    return (
        f"{', '.join(unknown)}: `{args.lr_scheduler_type}` takes"
        f" {', '.join(sorted(accepted)) or 'no arguments'}"
    )
