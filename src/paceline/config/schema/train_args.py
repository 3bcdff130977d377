"""The sections ``train_args`` and ``evaluation``."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from paceline.config.schema.base import Auto, Section

#: a share of all steps of a run, as transformers takes it for `save_steps`, `eval_steps` and
#: `logging_steps`
ShareOfSteps = Annotated[float, Field(gt=0, lt=1)]


class TrainArgs(Section):
    """The training itself, under the names of transformers' TrainingArguments."""

    learning_rate: float | None = Field(
        None,
        ge=0,
        description=(
            "Peak learning rate. Default: 1e-4 with LoRA, 2e-5 for full fine-tuning of a pretrained"
            " model, 1e-3 for a built-in or the user's own model."
        ),
    )
    per_device_train_batch_size: int = Field(
        4, ge=1, description="Samples in a micro-batch on one rank."
    )
    per_device_eval_batch_size: int | None = Field(
        None,
        ge=1,
        description="Samples in an evaluation batch on one rank. Default: that of training.",
    )
    gradient_accumulation_steps: int = Field(
        1, ge=1, description="Micro-batches a rank adds up before one update."
    )
    num_train_epochs: float = Field(
        3.0, gt=0, description="Passes over the data, where max_steps is not given."
    )
    max_steps: int | None = Field(
        None, ge=1, description="Number of updates; overrides num_train_epochs."
    )
    warmup_ratio: float = Field(
        0.0, ge=0, le=1, description="Share of the steps in which the learning rate rises."
    )
    warmup_steps: int | None = Field(
        None, ge=0, description="Number of those steps; overrides warmup_ratio."
    )
    lr_scheduler_type: Literal[
        "linear",
        "cosine",
        "cosine_with_restarts",
        "cosine_with_min_lr",
        "polynomial",
        "constant",
        "constant_with_warmup",
        "inverse_sqrt",
        "warmup_stable_decay",
    ] = Field(
        "cosine", description="Shape of the learning rate over the run (transformers' schedules)."
    )
    lr_scheduler_kwargs: dict[str, float | int | str] = Field(
        default_factory=dict, description="More arguments of the schedule, e.g. `{min_lr: 1e-6}`."
    )
    optim: Literal["adamw", "adam", "sgd", "rmsprop", "adagrad", "adafactor"] = Field(
        "adamw",
        description="Optimizer; torch's, fused where it can be, and transformers' Adafactor.",
    )
    weight_decay: float = Field(
        0.0,
        ge=0,
        description=(
            "Weight decay, never on biases and norms: decoupled with `adamw` and `adafactor`, else"
            " added to the gradient, as torch's optimizers do."
        ),
    )
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="Adam's beta 1.")
    adam_beta2: float = Field(0.999, ge=0, lt=1, description="Adam's beta 2.")
    adam_epsilon: float = Field(1e-8, gt=0, description="Adam's epsilon.")
    momentum: float = Field(0.9, ge=0, lt=1, description="Momentum of `sgd` and `rmsprop`.")
    max_grad_norm: float = Field(
        1.0, ge=0, description="Gradients are clipped to this global norm; 0 turns it off."
    )
    precision: Literal["auto", "bf16-mixed", "fp16-mixed", "32"] = Field(
        "auto",
        description=(
            "`bf16-mixed`, `fp16-mixed`: autocast over float32 trained weights, with frozen weights"
            " held in that type; float16 with dynamic loss scaling. `32`: float32. `auto`:"
            " `bf16-mixed` on accelerators that support bfloat16, `fp16-mixed` on those that do not"
            " (V100, T4), `32` on a CPU."
        ),
    )
    gradient_checkpointing: bool = Field(
        False, description="Recompute activations in backward instead of keeping them."
    )
    max_length: int = Field(1024, ge=8, description="Most tokens of a sample.")
    overlong: Literal["truncate", "drop"] = Field(
        "truncate",
        description="What is done with a longer sample; how many is printed and reported.",
    )
    packing: Auto | bool = Field(
        "auto",
        description=(
            "Put a micro-batch's samples in one row without padding; samples never see each other"
            " and the batch size still counts samples, so the gradient is that of the padded batch."
            " `auto`: where the model passes a check of it at the start."
        ),
    )
    train_on_inputs: bool = Field(
        False, description="Loss on the prompt too, not on the answers alone."
    )
    train_on_turns: Literal["all", "last"] = Field(
        "all",
        description=(
            "Turns of the assistant that carry the loss: all of a conversation, or the last one"
            " alone."
        ),
    )
    logging_steps: Annotated[int, Field(ge=1)] | ShareOfSteps = Field(
        1,
        description=(
            "Steps between two `step` events and progress lines; below 1: a share of all steps."
        ),
    )
    save_steps: Annotated[int, Field(ge=0)] | ShareOfSteps = Field(
        500,
        description=(
            "Steps between two checkpoints; below 1: a share of all steps; 0: none. One is always"
            " written at the end."
        ),
    )
    async_save: bool = Field(
        True,
        description=(
            "Write checkpoints in the background, from a copy in the host's memory, while training"
            " goes on."
        ),
    )
    save_total_limit: int | None = Field(
        3, ge=1, description="How many checkpoints are kept; null keeps all."
    )
    eval_steps: Annotated[int, Field(ge=0)] | ShareOfSteps = Field(
        0,
        description=(
            "Steps between two evaluations; below 1: a share of all steps; 0: at the end of each"
            " epoch."
        ),
    )
    seed: int = Field(
        42,
        ge=0,
        description="Fixes the weights' start, the order of samples, dropout and augmentation.",
    )
    shuffle: bool = Field(
        True,
        description=(
            "Shuffle the samples in each epoch, in an order fixed by `seed`; false keeps the order"
            " of the dataset."
        ),
    )
    dataloader_num_workers: int = Field(
        0, ge=0, description="Loader processes a rank; each prefetches batches."
    )
    dataloader_prefetch_factor: int = Field(
        2, ge=1, description="Batches each loader process keeps ready."
    )
    dataloader_pin_memory: bool = Field(
        True, description="Page-locked batches, for faster copies to a GPU."
    )

    @field_validator("max_steps", mode="before")
    @classmethod
    def _minus_one_is_none(cls, value: object) -> object:
        return None if value == -1 else value

    @field_validator("save_total_limit", mode="before")
    @classmethod
    def _zero_keeps_all(cls, value: object) -> object:
        return None if value in (0, -1) and not isinstance(value, bool) else value

    @field_validator("precision", mode="before")
    @classmethod
    def _number_is_text(cls, value: object) -> object:
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else value

    @property
    def mixed_dtype(self) -> Literal["bfloat16", "float16"] | None:
        """The type that matrix products are computed in under mixed precision; None in float32.

        ``auto`` counts as float32: it is replaced as soon as the devices are known
        (:mod:`paceline.distributed.devices`).
        """
        names: dict[str, Literal["bfloat16", "float16"]] = {
            "bf16-mixed": "bfloat16",
            "fp16-mixed": "float16",
        }
        return names.get(self.precision)


class Evaluation(Section):
    """How the validation data is run."""

    where: Literal["all", "rank0"] = Field(
        "all",
        description=(
            "`all`: every rank takes a share, exact to the last row. `rank0`: one does all, for"
            " comparison."
        ),
    )
    samples: int = Field(
        3,
        ge=0,
        le=100,
        description=(
            "With `sft` and `pretrain`: answers that the model gives to so many held-out prompts at"
            " each evaluation, kept in the run's events beside the references. They change nothing"
            " of the training. 0: none."
        ),
    )
    max_new_tokens: int = Field(64, ge=1, description="Most tokens of such an answer.")
