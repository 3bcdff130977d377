"""The shapes of the learning rate schedules, without the import of transformers that training
uses."""

import math
from collections.abc import Mapping

from pydantic import JsonValue

from paceline.config.schema.schedules import LENGTH


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
    if set(arguments) - known:
        return None
    length = arguments.get(LENGTH)
    end = int(length) if isinstance(length, int | float) else steps
    if kind == "constant":
        return 1.0
    if step < warmup_steps:
        return step / max(1, warmup_steps)
    progress = min(1.0, (step - warmup_steps) / max(1, end - warmup_steps))
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    if kind == "cosine_with_min_lr":
        lowest = arguments.get("min_lr")
        share = arguments.get("min_lr_rate", 0.1)
        if isinstance(lowest, int | float):
            share = lowest / learning_rate
        return cosine * (1 - float(str(share))) + float(str(share))
    shapes = {"constant_with_warmup": 1.0, "linear": 1.0 - progress, "cosine": cosine}
    return shapes.get(kind)
