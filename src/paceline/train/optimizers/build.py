"""Build the optimizer and the learning rate schedule (from transformers)."""

import logging
from collections.abc import Iterator, Mapping
from typing import NotRequired, TypedDict

import torch
from torch import nn

from paceline.config.derive import ResolvedValues
from paceline.config.schema.schedules import LENGTH
from paceline.config.schema.train_args import TrainArgs
from paceline.core.texts import UserText
from paceline.models.shape.record import QUANTIZED_BLOCK, QUANTIZED_MINIMUM, OptimizerMemory
from paceline.models.transforms.parameters import ParameterSettings
from paceline.train.optimizers.rounding import StochasticRounding


class _ParamGroup(TypedDict):
    """A parameter group. ``is_hidden``: Muon updates it."""

    params: list[nn.Parameter]
    lr: NotRequired[float]
    weight_decay: float
    is_hidden: bool


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
    hidden: frozenset[str] = frozenset(),
    settings: Mapping[str, ParameterSettings] | None = None,
) -> torch.optim.Optimizer:
    """Return the optimizer for the (name, parameter) pairs ``named``. Weight decay applies to the
    names in ``matrices`` (from :func:`matrices_of`): the shape of a shard does not show whether
    its parameter is a matrix. Muon updates the names in ``hidden``. The names in ``settings`` have
    their own learning rate or weight decay."""
    updated_by_muon = [param for name, param in named if name in hidden]
    decayed = [param for name, param in named if name in matrices - hidden]
    not_decayed = [param for name, param in named if name not in matrices]
    split: list[_ParamGroup] = [
        {"params": params, "weight_decay": decay, "is_hidden": params is updated_by_muon}
        for params, decay in (
            (updated_by_muon, args.weight_decay),
            (decayed, args.weight_decay),
            (not_decayed, 0.0),
        )
        if params
    ]
    if settings:
        by_param = {param: settings.get(name, ParameterSettings()) for name, param in named}
        split = list(_split_by_settings(split, by_param, learning_rate))
    groups = [{**group} for group in split]
    betas = (args.adam_beta1, args.adam_beta2)
    can_fuse = all(
        param.device.type in ("cpu", "cuda", "xpu", "mps") and param.is_floating_point()
        for _, param in named
    )
    if args.optim in ("adamw", "adam"):
        optimizer_class = torch.optim.AdamW if args.optim == "adamw" else torch.optim.Adam
        return optimizer_class(
            groups, lr=learning_rate, betas=betas, eps=args.adam_epsilon, fused=can_fuse
        )
    if args.optim == "sgd":
        return torch.optim.SGD(groups, lr=learning_rate, momentum=args.momentum)
    if args.optim == "rmsprop":
        return torch.optim.RMSprop(groups, lr=learning_rate, momentum=args.momentum)
    if args.optim == "adagrad":
        return torch.optim.Adagrad(groups, lr=learning_rate)
    if args.optim == "muon":
        from paceline.train.optimizers.muon import MuonWithAdamW

        return MuonWithAdamW(
            groups, learning_rate, betas, args.adam_epsilon, args.muon_momentum, can_fuse
        )
    if args.optim == "lion":
        from paceline.train.optimizers.lion import Lion

        return Lion(groups, learning_rate, betas)
    if args.optim == "schedule_free_adamw":
        from paceline.train.optimizers.schedule_free import ScheduleFreeAdamW

        optimizer = ScheduleFreeAdamW(groups, learning_rate, betas, args.adam_epsilon)
        optimizer.train()
        return optimizer
    if args.optim in ("adamw_8bit", "paged_adamw_8bit"):
        from paceline.train.optimizers import bnb_adamw

        return bnb_adamw.AdamW8bit(  # type: ignore[no-untyped-call]
            groups,
            learning_rate,
            betas,
            args.adam_epsilon,
            is_paged=args.optim == "paged_adamw_8bit" and named[0][1].device.type != "cpu",
        )
    if args.optim == "adamw_torchao_8bit":
        # It warns about its extensions for other devices.
        logging.getLogger("torchao").setLevel(logging.ERROR)
        from paceline.train.optimizers import torchao_adamw

        return torchao_adamw.TorchaoAdamW8bit(groups, learning_rate, betas, args.adam_epsilon)
    from transformers.optimization import Adafactor

    return Adafactor(groups, lr=learning_rate, scale_parameter=False, relative_step=False)


def _split_by_settings(
    groups: list[_ParamGroup],
    settings: Mapping[nn.Parameter, ParameterSettings],
    learning_rate: float,
) -> Iterator[_ParamGroup]:
    """Yield the groups, divided so that the parameters of each have one learning rate and one
    weight decay."""
    for group in groups:
        parts: dict[tuple[float, float], list[nn.Parameter]] = {}
        for param in group["params"]:
            rate, decay = settings[param].learning_rate, settings[param].weight_decay
            key = (
                learning_rate if rate is None else rate,
                group["weight_decay"] if decay is None else decay,
            )
            parts.setdefault(key, []).append(param)
        for rate, decay in sorted(parts):
            yield {
                "params": parts[rate, decay],
                "lr": rate,
                "weight_decay": decay,
                "is_hidden": group["is_hidden"],
            }


class Schedule:
    """The learning rate as a function of the step, so that a resumed run need not replay earlier
    steps.

    Wraps transformers' schedules, which all multiply the base rate by a function of the step.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, args: TrainArgs, derived: ResolvedValues
    ) -> None:
        from transformers.optimization import get_scheduler

        self.optimizer = optimizer
        self.learning_rate = derived.learning_rate
        self.base_rates = [float(group["lr"]) for group in optimizer.param_groups]
        arguments = _schedule_arguments(args, derived)
        num_steps = int(arguments.pop(LENGTH, derived.steps))
        #: Step from which the rate is constant: a cosine would rise again.
        self.end = max(num_steps, derived.warmup_steps)
        self.inner = get_scheduler(
            "constant" if args.optim == "schedule_free_adamw" else args.lr_scheduler_type,
            optimizer,
            num_warmup_steps=derived.warmup_steps,
            num_training_steps=num_steps,
            scheduler_specific_kwargs=arguments,
        )
        #: Steps of the linear warm-up of schedule-free training, which begins above zero.
        self.warmup_steps = derived.warmup_steps if args.optim == "schedule_free_adamw" else 0

    def set_step(self, step: int) -> float:
        """Set the learning rates for step ``step`` (from 0) and return the config's learning rate;
        the rate of a group may be a multiple of it."""
        rate = 0.0
        for group, base, factor in zip(
            self.optimizer.param_groups, self.base_rates, self.inner.lr_lambdas, strict=True
        ):
            scale = factor(min(step, self.end)) * min(1.0, (step + 1) / max(1, self.warmup_steps))
            rate = self.learning_rate * scale
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(base * scale)
            else:
                group["lr"] = base * scale
        if isinstance(self.optimizer, StochasticRounding):
            self.optimizer.rounding.step = step
        return rate


def optimizer_notices(
    args: TrainArgs,
    memory: OptimizerMemory,
    optimizer: torch.optim.Optimizer,
) -> list[tuple[str, str]]:
    """Return notices (level, text) about what the optimizer does other than its name says.

    Args:
        memory: size of the optimizer's state.
    """
    notices: list[tuple[str, str]] = []
    if args.optim == "schedule_free_adamw" and args.lr_scheduler_type != "constant":
        text = UserText(
            "`optim: schedule_free_adamw` replaces the learning rate schedule: after the"
            " warm-up the rate is constant, and `lr_scheduler_type: {lr_scheduler_type}` is"
            " not used",
            code="schedule-replaced",
            lr_scheduler_type=args.lr_scheduler_type,
        )
        notices.append(("info", text))
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if args.optim == "paged_adamw_8bit" and params[0].device.type == "cpu":
        text = UserText(
            "`optim: paged_adamw_8bit`: there is no paging on a CPU, as with `adamw_8bit`",
            code="no-paging-on-cpu",
        )
        notices.append(("info", text))
    wide = [param.numel() for param in params if not memory.is_quantized(param.numel())]
    if memory.quantizes and sum(wide):
        total = sum(param.numel() for param in params)
        reason = f"fewer than {QUANTIZED_MINIMUM:,} elements"
        if memory.quantizes_whole_blocks:
            reason += f", or not a multiple of {QUANTIZED_BLOCK}"
        text = UserText(
            "`optim: {optim}`: {num_wide_elements} of {total} elements on rank 0 have state in"
            " 32 bit ({num_wide:tensor} with {reason})",
            code="state-not-quantized",
            optim=args.optim,
            num_wide_elements=f"{sum(wide):,}",
            total=f"{total:,}",
            num_wide=len(wide),
            reason=reason,
        )
        notices.append(("info", text))
    return notices


def _schedule_arguments(args: TrainArgs, derived: ResolvedValues) -> dict[str, float | int | str]:
    if args.optim == "schedule_free_adamw":
        return {}
    arguments = dict(args.lr_scheduler_kwargs)
    if args.lr_scheduler_type == "cosine_with_min_lr" and "min_lr" not in arguments:
        arguments.setdefault("min_lr_rate", 0.1)
    if args.lr_scheduler_type == "warmup_stable_decay":
        arguments.setdefault("num_decay_steps", max(1, derived.steps // 10))
    return arguments
