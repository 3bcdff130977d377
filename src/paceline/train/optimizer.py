"""Build the optimizer (from torch) and the learning rate schedule (from transformers)."""

import inspect
from typing import Any

import torch
from torch import nn

from paceline.config.derive import ResolvedValues
from paceline.config.schema.train_args import TrainArgs

#: ``train_args.lr_scheduler_type`` → name of the function in transformers.
_SCHEDULES = {
    "linear": "get_linear_schedule_with_warmup",
    "cosine": "get_cosine_schedule_with_warmup",
    "cosine_with_restarts": "get_cosine_with_hard_restarts_schedule_with_warmup",
    "cosine_with_min_lr": "get_cosine_with_min_lr_schedule_with_warmup",
    "polynomial": "get_polynomial_decay_schedule_with_warmup",
    "constant": "get_constant_schedule",
    "constant_with_warmup": "get_constant_schedule_with_warmup",
    "inverse_sqrt": "get_inverse_sqrt_schedule",
    "warmup_stable_decay": "get_wsd_schedule",
}


def matrices_of(model: nn.Module) -> frozenset[str]:
    """Return the names of the parameters that weight decay applies to: matrices, not biases and
    norms."""
    named = model.named_parameters(remove_duplicate=False)
    return frozenset(name for name, param in named if param.dim() >= 2)


def build_optimizer(
    args: TrainArgs,
    learning_rate: float,
    named: list[tuple[str, nn.Parameter]],
    matrices: frozenset[str],
) -> torch.optim.Optimizer:
    """Return the optimizer for the (name, parameter) pairs ``named``. Weight decay applies to the
    names in ``matrices`` (from :func:`matrices_of`): the shape of a shard does not show whether
    its parameter is a matrix."""
    decayed = [param for name, param in named if name in matrices]
    not_decayed = [param for name, param in named if name not in matrices]
    groups: list[dict[str, Any]] = [
        {"params": params, "weight_decay": decay}
        for params, decay in ((decayed, args.weight_decay), (not_decayed, 0.0))
        if params
    ]
    betas = (args.adam_beta1, args.adam_beta2)
    if args.optim in ("adamw", "adam"):
        optimizer_class = torch.optim.AdamW if args.optim == "adamw" else torch.optim.Adam
        can_fuse = all(
            param.device.type in ("cpu", "cuda", "xpu", "mps") and param.is_floating_point()
            for _, param in named
        )
        return optimizer_class(
            groups, lr=learning_rate, betas=betas, eps=args.adam_epsilon, fused=can_fuse
        )
    if args.optim == "sgd":
        return torch.optim.SGD(groups, lr=learning_rate, momentum=args.momentum)
    if args.optim == "rmsprop":
        return torch.optim.RMSprop(groups, lr=learning_rate, momentum=args.momentum)
    if args.optim == "adagrad":
        return torch.optim.Adagrad(groups, lr=learning_rate)
    from transformers.optimization import Adafactor

    return Adafactor(groups, lr=learning_rate, scale_parameter=False, relative_step=False)


class Schedule:
    """The learning rate as a function of the step, so that a resumed run need not replay earlier
    steps.

    Wraps transformers' schedules, all of which multiply the base rate by a function of the step.
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
        """Set the learning rate for step ``step`` (from 0) and return it."""
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
    """Return a description of the problem with ``lr_scheduler_kwargs``, or None if they are
    valid."""
    from transformers import optimization

    schedule = getattr(optimization, _SCHEDULES[args.lr_scheduler_type])
    accepted = set(inspect.signature(schedule).parameters)
    accepted -= {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"}
    unknown = [key for key in args.lr_scheduler_kwargs if key not in accepted]
    if not unknown:
        return None
    names = ", ".join(sorted(accepted)) or "no arguments"
    return f"unknown keys {', '.join(unknown)}: `{args.lr_scheduler_type}` accepts {names}"
