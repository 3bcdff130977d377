"""The sections within ``train_args``."""

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from paceline.config.schema.base import Patterns, Section
from paceline.core.texts import UserText

#: A fraction of all steps of a run, as transformers accepts it for `save_steps`, `eval_steps` and
#: `logging_steps`.
ShareOfSteps = Annotated[float, Field(gt=0, lt=1)]


def _true_is_full(value: object) -> object:
    if isinstance(value, bool):
        return "full" if value else "none"
    return {"true": "full", "false": "none", "1": "full", "0": "none"}.get(str(value), value)


#: Activation checkpointing.
Recomputation = Annotated[
    Literal["auto", "none", "selective", "full"] | bool | Annotated[int, Field(ge=2)],
    BeforeValidator(_true_is_full),
]


def _number_is_text(value: object) -> object:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


PrecisionName = Annotated[
    Literal["auto", "bf16-mixed", "fp16-mixed", "bf16-true", "32"], BeforeValidator(_number_is_text)
]


def _true_is_tensorwise(value: object) -> object:
    return {"true": "tensorwise", "false": "none"}.get(str(value).lower(), value)


#: Matrix products in float8.
Float8 = Annotated[
    Literal["none", "tensorwise", "rowwise", "rowwise_with_gw_hp"],
    BeforeValidator(_true_is_tensorwise),
]

LearningRateSchedule = Literal[
    "linear",
    "cosine",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "warmup_stable_decay",
]

OptimizerName = Literal[
    "adamw",
    "adam",
    "sgd",
    "rmsprop",
    "adagrad",
    "adafactor",
    "lion",
    "adamw_8bit",
    "paged_adamw_8bit",
    "adamw_torchao_8bit",
    "muon",
    "schedule_free_adamw",
]

AttentionName = Literal[
    "auto",
    "sdpa",
    "eager",
    "flex_attention",
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
]


class Profile(Section):
    """Which steps torch's profiler records."""

    start_step: int = Field(
        10, ge=1, description="First step to record; the first steps of a run are not typical."
    )
    num_steps: int = Field(3, ge=1, le=100, description="Number of steps to record.")

    @property
    def last_step(self) -> int:
        return self.start_step + self.num_steps - 1


class EarlyStopping(Section):
    """When training ends before its last step."""

    patience: int = Field(
        3, ge=1, description="Number of evaluations in a row without an improvement."
    )
    min_delta: float = Field(
        0.0,
        ge=0,
        description="Change of the metric above which an evaluation counts as an improvement.",
    )


class ParameterGroup(Section):
    """Parameters with their own learning rate or weight decay."""

    params: Patterns = Field(
        min_length=1,
        description="Regular expressions that are searched for in the names of parameters.",
    )
    learning_rate: float | None = Field(
        None, ge=0, description="Peak learning rate. Default: the value in `train_args`."
    )
    weight_decay: float | None = Field(
        None,
        ge=0,
        description=(
            "Weight decay of all these parameters, also of biases and norms. Default: the value in"
            " `train_args`, for matrices only."
        ),
    )

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        if self.learning_rate is None and self.weight_decay is None:
            raise ValueError(
                UserText(
                    "a parameter group needs a learning_rate or a weight_decay",
                    code="empty-parameter-group",
                )
            )
        return self
