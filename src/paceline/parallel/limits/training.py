"""Declare with which strategies the selection of parameters and the average of weights are not
supported. Imports no torch."""

from paceline.config.schema import Config
from paceline.distributed.mesh import ParallelDims
from paceline.parallel.capabilities import Limit, Subject, with_setting

_SELECTION = ("freeze", "trainable", "trainable_layers")
_AVERAGE = "train_args.ema_decay"


def _selection(
    reason: str, fix: str, *keys: str, subject: Subject | None = None
) -> tuple[Limit, ...]:
    """Return the limits of a strategy that does not support these keys of ``train_args``."""
    return tuple(
        Limit(
            f"train_args.{key}",
            reason,
            f"leave `train_args.{key}` out, or {fix}",
            supported=(None if key == "trainable_layers" else [],),
            subject=subject,
        )
        for key in keys
    )


def _pipeline(config: Config, dims: ParallelDims) -> str | None:
    return f"pipeline {dims.pipeline}" if dims.pipeline > 1 else None


def _no_average(reason: str, fix: str, subject: Subject | None = None) -> Limit:
    return Limit(
        _AVERAGE,
        reason,
        fix,
        supported=(None,),
        allowed="`parallel.mode: single`, `dp`, `ddp`, `zero1`, `zero2`, `zero3`, `tensor`,"
        " `pipeline`, `hybrid`",
        subject=subject,
    )


#: For every strategy: with which optimizers the weights are not averaged.
AVERAGE = (
    Limit(
        _AVERAGE,
        "this optimizer averages the weights itself",
        f"leave `{_AVERAGE}` out, or set `train_args.optim: adamw`",
        supported=(None,),
        subject=with_setting("train_args.optim", "schedule_free_adamw"),
    ),
    Limit(
        _AVERAGE,
        "a checkpoint contains only the moments of this optimizer",
        "set `train_args.optim: adamw`",
        supported=(None,),
        subject=with_setting(
            "train_args.optim", "adamw_8bit", "paged_adamw_8bit", "adamw_torchao_8bit"
        ),
    ),
)
NO_AVERAGE = _no_average(
    "it averages or partitions the weights itself, and a second average would have to follow",
    "set `parallel.mode: ddp` or `zero3`",
)
SERVED_PARAMETERS = (
    *_selection(
        "the servers update all rows of their tables",
        "set `parallel.mode: ddp`",
        *_SELECTION,
        "parameter_groups",
    ),
    NO_AVERAGE,
)
STAGE_WITHOUT_PARAMETERS = _selection(
    "a stage could have no parameters to train",
    "set `parallel.mode: zero3`, or use LoRA",
    *_SELECTION,
    subject=_pipeline,
)
