"""The learning rate schedules of transformers: their arguments, and the shapes of common ones."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import BeforeValidator, JsonValue

ArgumentValue = float | int | str


@dataclass(frozen=True)
class _Argument:
    """An argument of a schedule: a number within bounds, or one of ``names``."""

    minimum: float = 0
    maximum: float | None = None
    is_whole: bool = False
    names: tuple[str, ...] = ()

    def accepts(self, value: ArgumentValue) -> bool:
        if self.names:
            return value in self.names
        if isinstance(value, str) or (self.is_whole and value != int(value)):
            return False
        return value >= self.minimum and (self.maximum is None or value <= self.maximum)

    @property
    def description(self) -> str:
        if self.names:
            return f"one of {', '.join(self.names)}"
        kind = "a whole number" if self.is_whole else "a number"
        limit = "" if self.maximum is None else f" and at most {self.maximum:g}"
        return f"{kind} of at least {self.minimum:g}{limit}"


_RATE, _SHARE, _COUNT = _Argument(), _Argument(maximum=1), _Argument(minimum=1, is_whole=True)
_SHAPE = _Argument(names=("linear", "cosine", "1-sqrt"))
#: The step at which a schedule ends, by default the last one of the run. The learning rate is then
#: constant.
LENGTH = "num_training_steps"
#: ``train_args.lr_scheduler_type`` → its arguments.
ARGUMENTS: dict[str, dict[str, _Argument]] = {
    "linear": {LENGTH: _COUNT},
    "cosine": {"num_cycles": _RATE, LENGTH: _COUNT},
    "cosine_with_restarts": {"num_cycles": _COUNT, LENGTH: _COUNT},
    "cosine_with_min_lr": {
        "num_cycles": _RATE,
        "min_lr": _RATE,
        "min_lr_rate": _SHARE,
        LENGTH: _COUNT,
    },
    "polynomial": {"lr_end": _RATE, "power": _RATE, LENGTH: _COUNT},
    "constant": {},
    "constant_with_warmup": {},
    "inverse_sqrt": {"timescale": _COUNT},
    "warmup_stable_decay": {
        "num_decay_steps": _COUNT,
        "num_stable_steps": _Argument(is_whole=True),
        "warmup_type": _SHAPE,
        "decay_type": _SHAPE,
        "min_lr_ratio": _SHARE,
        "num_cycles": _RATE,
    },
}
#: transformers' default of ``lr_end``.
_LR_END = 1e-7
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


def _without_text(value: object) -> object:
    """Convert numbers that are written as text, and leave out what has no value."""
    if not isinstance(value, Mapping):
        return value
    return {key: _as_number(item) for key, item in value.items() if item is not None}


def _as_number(value: object) -> object:
    if not isinstance(value, str) or not _NUMBER.fullmatch(value.strip()):
        return value
    number = float(value)
    return int(number) if number.is_integer() and "e" not in value.lower() else number


#: The type of ``train_args.lr_scheduler_kwargs``.
ScheduleArguments = Annotated[dict[str, ArgumentValue], BeforeValidator(_without_text)]


def schedule_problem(
    kind: str, arguments: Mapping[str, ArgumentValue], learning_rate: float | None
) -> str | None:
    """Return what is wrong with the arguments of a schedule, or None.

    Args:
        kind: a key of :data:`ARGUMENTS`.
        learning_rate: the peak of the schedule; None if the task determines it.
    """
    known = ARGUMENTS[kind]
    unknown = [key for key in arguments if key not in known]
    if unknown:
        names = ", ".join(known) or "no arguments"
        hint = ""
        if {"min_lr", "min_lr_rate"} & set(unknown):
            hint = "; `cosine_with_min_lr` has a lowest learning rate"
        return f"unknown keys {', '.join(unknown)}: `{kind}` accepts {names}{hint}"
    for key, value in arguments.items():
        if not known[key].accepts(value):
            return f"{key}: {value} is not {known[key].description}"
    if "min_lr" in arguments and "min_lr_rate" in arguments:
        return "min_lr and min_lr_rate both set the lowest learning rate; keep one of them"
    return None if learning_rate is None else _rate_problem(kind, arguments, learning_rate)


def _rate_problem(
    kind: str, arguments: Mapping[str, ArgumentValue], learning_rate: float
) -> str | None:
    lowest = arguments.get("min_lr", 0)
    if not isinstance(lowest, str) and lowest > learning_rate:
        return f"min_lr: {lowest:g} is above the learning rate of {learning_rate:g}"
    end = arguments.get("lr_end", _LR_END)
    if kind == "polynomial" and not isinstance(end, str) and end >= learning_rate:
        return f"lr_end: {end:g} must be below the learning rate of {learning_rate:g}"
    return None


def warmup_length(warmup_steps: float | None, warmup_ratio: float, steps: int) -> int:
    """Return the number of warm-up steps: ``warmup_steps`` if it is set, else the share
    ``warmup_ratio`` of all steps."""
    return math.ceil(warmup_ratio * steps) if warmup_steps is None else int(warmup_steps)


def schedule_share(
    kind: str,
    arguments: Mapping[str, JsonValue],
    step: int,
    steps: int,
    warmup_steps: int,
    learning_rate: float,
) -> float | None:
    """Return the share of the peak learning rate at a step; None for a schedule that is not known
    here, or with arguments that change its shape.

    Args:
        kind: ``train_args.lr_scheduler_type``.
        arguments: ``train_args.lr_scheduler_kwargs``.
        step: counted from 0.
        steps: the number of steps in all.
        warmup_steps: the number of steps before the peak.
        learning_rate: the peak.
    """
    known = {LENGTH, "min_lr", "min_lr_rate"} if kind == "cosine_with_min_lr" else {LENGTH}
    if kind not in _SHAPES or set(arguments) - known:
        return None
    length = arguments.get(LENGTH)
    end = int(length) if isinstance(length, int | float) else steps
    if kind == "constant":
        return 1.0
    if step < warmup_steps:
        return step / max(1, warmup_steps)
    progress = min(1.0, (step - warmup_steps) / max(1, end - warmup_steps))
    lowest_share = 0.0
    if kind == "cosine_with_min_lr":
        lowest, share = arguments.get("min_lr"), arguments.get("min_lr_rate", 0.1)
        if isinstance(lowest, int | float):
            lowest_share = lowest / learning_rate
        elif isinstance(share, int | float):
            lowest_share = share
    return _SHAPES[kind](progress) * (1 - lowest_share) + lowest_share


def _cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


#: The share of the peak by the progress after the warm-up, from 0 to 1.
_SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda _: 1.0,
    "constant_with_warmup": lambda _: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": _cosine,
    "cosine_with_min_lr": _cosine,
}
