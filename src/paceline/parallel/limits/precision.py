"""Declare what the formats of weights and products do not support, with any strategy. Imports no
torch."""

from paceline.config.schema.tasks import CAUSAL_TASKS
from paceline.parallel.capabilities import Limit, with_setting

_PURE = with_setting("train_args.precision", "bf16-true")
#: For every strategy: what `precision: bf16-true` does not support.
PURE_BFLOAT16 = (
    Limit(
        "lora.enable",
        "the frozen weights are in bfloat16 with `bf16-mixed` too, and the few trained weights of"
        " adapters need float32",
        "set `train_args.precision: bf16-mixed`",
        unsupported=(True,),
        subject=_PURE,
    ),
    Limit(
        "task",
        "only language models are loaded in bfloat16",
        "set `train_args.precision: bf16-mixed`",
        supported=CAUSAL_TASKS,
        allowed=", ".join(CAUSAL_TASKS),
        subject=_PURE,
    ),
    Limit(
        "train_args.optim",
        "its update of an element depends on other elements, and stochastic rounding computes it in"
        " pieces",
        "set `train_args.optim: adamw`",
        supported=("adamw", "adam", "sgd", "rmsprop", "adagrad"),
        allowed="adamw, adam, sgd, rmsprop, adagrad",
        subject=_PURE,
    ),
    Limit(
        "compression.method",
        "what compression leaves out is added to later gradients in float32",
        "leave `compression` out, or set `train_args.precision: bf16-mixed`",
        supported=("none",),
        allowed="none",
        subject=_PURE,
    ),
)
FLOAT8_KEY = "train_args.fp8"
#: For every strategy: what `fp8` does not support.
FLOAT8 = tuple(
    Limit(
        setting,
        reason,
        fix,
        unsupported=unsupported,
        supported=supported,
        subject=lambda config, dims: (
            None if config.train_args.fp8 == "none" else f"`{FLOAT8_KEY}: {config.train_args.fp8}`"
        ),
    )
    for setting, reason, fix, unsupported, supported in (
        (
            "lora.enable",
            "torchao's layers also compute the gradients of frozen weights",
            f"leave `{FLOAT8_KEY}` out",
            (True,),
            None,
        ),
        (
            "task",
            "only the blocks of language models are converted",
            f"leave `{FLOAT8_KEY}` out",
            (),
            CAUSAL_TASKS,
        ),
        (
            "train_args.precision",
            "float8 has scales of its own, and it is untested with loss scaling",
            "set `train_args.precision: bf16-mixed`",
            ("fp16-mixed",),
            None,
        ),
    )
)
