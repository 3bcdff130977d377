"""The section ``train_args``."""

import math
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from paceline.config.schema.base import Auto, Patterns, Section, Text
from paceline.config.schema.schedules import ScheduleArguments
from paceline.config.schema.train_args_sections import (
    AttentionName,
    EarlyStopping,
    Float8,
    LearningRateSchedule,
    OptimizerName,
    ParameterGroup,
    PrecisionName,
    Profile,
    Recomputation,
    ShareOfSteps,
)


class TrainArgs(Section):
    """Training hyperparameters, named as in transformers' TrainingArguments."""

    learning_rate: float | None = Field(
        None,
        ge=0,
        description="Peak learning rate. Default: 1e-4 with LoRA, 2e-5 for full fine-tuning of a"
        " pretrained model, 1e-3 for a built-in or custom model.",
    )
    per_device_train_batch_size: int = Field(4, ge=1, description="Micro-batch size per rank.")
    global_batch_size: int | None = Field(
        None,
        ge=1,
        description=(
            "Samples per update on all ranks together; `gradient_accumulation_steps` follows from"
            " it. Default: `per_device_train_batch_size` × `gradient_accumulation_steps` ×"
            " replicas."
        ),
    )
    auto_find_batch_size: bool = Field(
        False,
        description=(
            "Choose the micro-batch: `per_device_train_batch_size` and"
            " `gradient_accumulation_steps` only define the global batch, also if they are set."
            " The fastest division that is predicted to fit in memory is used. If neither is set,"
            " smaller micro-batches are chosen without this setting too, if the default does not"
            " fit. `per_device_train_batch_size: auto` sets it."
        ),
    )
    per_device_eval_batch_size: int | None = Field(
        None,
        ge=1,
        description="Evaluation batch size per rank. Default: `per_device_train_batch_size`.",
    )
    gradient_accumulation_steps: int = Field(
        1, ge=1, description="Micro-batches per rank and update."
    )
    num_train_epochs: float = Field(
        3.0, gt=0, description="Passes over the data, unless max_steps is set."
    )
    max_steps: int | None = Field(
        None, ge=1, description="Number of updates; overrides num_train_epochs."
    )
    warmup_ratio: float = Field(
        0.0, ge=0, le=1, description="Fraction of the steps used for learning rate warm-up."
    )
    warmup_steps: int | None = Field(
        None, ge=0, description="Number of warm-up steps; overrides warmup_ratio."
    )
    lr_scheduler_type: LearningRateSchedule = Field(
        "cosine", description="Learning rate schedule (transformers' schedules)."
    )
    lr_scheduler_kwargs: ScheduleArguments = Field(
        default_factory=dict,
        description=(
            "Arguments of the schedule, e.g. `{min_lr: 1e-6}`; `num_training_steps`: its length."
        ),
    )
    optim: OptimizerName = Field(
        "adamw",
        description=(
            "Optimizer: torch's (fused if available), transformers' Adafactor, `lion`, AdamW with"
            " 8-bit state (`adamw_8bit` and `paged_adamw_8bit` from bitsandbytes,"
            " `adamw_torchao_8bit` from torchao), `muon` for hidden matrices with AdamW for all"
            " other parameters, or `schedule_free_adamw` from schedulefree."
        ),
    )
    weight_decay: float = Field(
        0.0,
        ge=0,
        description=(
            "Weight decay, never applied to biases and norms; decoupled with `lion`,"
            " `adafactor`, `muon` and all kinds of `adamw`, else added to the gradient as in"
            " torch."
        ),
    )
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="Beta 1 of Adam and Lion.")
    adam_beta2: float = Field(
        0.999, ge=0, lt=1, description="Beta 2 of Adam and Lion; 0.99 is usual for Lion."
    )
    adam_epsilon: float = Field(1e-8, gt=0, description="Adam's epsilon.")
    momentum: float = Field(0.9, ge=0, lt=1, description="Momentum of `sgd` and `rmsprop`.")
    muon_momentum: float = Field(0.95, ge=0, lt=1, description="Momentum of `muon`.")
    ema_decay: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Decay of an exponential moving average of the weights, e.g. 0.999, updated"
        " after each step. Evaluation uses the average, and it is the trained model.",
    )
    parameter_groups: list[ParameterGroup] = Field(
        default_factory=list,
        description=(
            "Parameters with another `learning_rate` or `weight_decay` (also of biases and norms),"
            " named by regular expressions, e.g. `[{params: [embed_tokens], learning_rate: 1e-5}]`."
            " Of the groups that name a parameter, the first one applies."
        ),
    )
    freeze: Patterns = Field(
        default_factory=list,
        description="Parameters that are not trained, as regular expressions that are searched for"
        " in their names, e.g. `[embed_tokens, 'layers\\.[0-3]\\.']`.",
    )
    trainable: Patterns = Field(
        default_factory=list,
        description="Train only these parameters (regular expressions); not with LoRA.",
    )
    trainable_layers: int | None = Field(
        None,
        description=(
            "Train only the last N layers (the first ones, if N is negative) and the parameters in"
            " `trainable`; not with LoRA."
        ),
    )
    max_grad_norm: float = Field(
        1.0, ge=0, description="Maximum global gradient norm for clipping; 0 disables it."
    )
    precision: PrecisionName = Field(
        "auto",
        description=(
            "`bf16-mixed`, `fp16-mixed`: autocast with float32 trained weights and frozen"
            " weights in half precision; float16 uses dynamic loss scaling. `bf16-true`: trained"
            " weights, gradients and optimizer state in bfloat16, with stochastic rounding (full"
            " fine-tuning of language models). `32`: float32."
            " `auto`: `bf16-mixed` on accelerators that support bfloat16, `fp16-mixed` on"
            " others (V100, T4), `32` on CPU."
        ),
    )
    tf32: bool | None = Field(
        None,
        description=(
            "Compute products and convolutions of float32 values in TensorFloat-32 (10 bits of"
            " mantissa), in training and evaluation: NVIDIA GPUs of compute capability 8.0 and"
            " higher. null: torch's default, which uses it for convolutions only."
        ),
    )
    deterministic: bool = Field(
        False,
        description=(
            "Use only algorithms that give the same bits in every run, and fail where there is"
            " none. On GPUs, backward of fused attention adds in a changing order otherwise."
        ),
    )
    fp8: Float8 = Field(
        "none",
        description=(
            "Multiply the linear layers of the blocks in float8, through torchao (full fine-tuning"
            " of language models on NVIDIA GPUs of compute capability 8.9 and higher):"
            " `tensorwise`, one scale per tensor; `rowwise`, one per row, more exact;"
            " `rowwise_with_gw_hp`, the gradients of weights not in float8. `true` means"
            " `tensorwise`."
        ),
    )
    fp8_emulate: bool = Field(
        False,
        description=(
            "With `fp8`: multiply values rounded to float8 in float32, on any device, to see the"
            " effect on the loss. Slower than no float8."
        ),
    )
    gradient_checkpointing: Recomputation = Field(
        "auto",
        description=(
            "Recompute activations in backward instead of storing them, in each block. `full`:"
            " all. `selective`: all but the results of large matrix products and of attention."
            " N: all, in every N-th block. `true` and `false` mean `full` and `none`. `auto`:"
            " `none` if the run is predicted to fit in memory, otherwise the fastest setting that"
            " fits."
        ),
    )
    torch_compile: bool = Field(
        False,
        description=(
            "Compile each block with torch.compile: faster steps after a slower first step. Needs"
            " a C++ compiler on CPUs and Triton on GPUs. Losses agree up to rounding, and dropout"
            " masks differ."
        ),
    )
    torch_compile_backend: Literal["inductor", "aot_eager", "eager"] = Field(
        "inductor",
        description="Backend of torch.compile; the others generate no code and serve diagnosis.",
    )
    torch_compile_mode: Literal["default", "max-autotune-no-cudagraphs"] = Field(
        "default",
        description=(
            "Mode of torch.compile: `max-autotune-no-cudagraphs` compiles longer to select faster"
            " kernels."
        ),
    )
    max_length: int = Field(1024, ge=8, description="Maximum sample length in tokens.")
    truncation_strategy: Literal["truncate", "drop"] = Field(
        "truncate",
        description="Handling of longer samples; their number is printed and reported.",
    )
    packing: Auto | bool = Field(
        "auto",
        description=(
            "Concatenate the samples of a micro-batch into one row without padding. Samples do not"
            " attend to each other and the batch size still counts samples, so the gradient equals"
            " the gradient of the padded batch. `auto`: if the model passes a check at startup."
        ),
    )
    packing_strategy: Literal["micro_batch", "bfd", "wrapped"] = Field(
        "micro_batch",
        description=(
            "What the batch size counts with packed rows. `micro_batch`: samples; the"
            " samples of a micro-batch share a row. `bfd`: rows of up to `max_length` tokens, into"
            " which whole samples are packed by best-fit decreasing. `wrapped`: rows of exactly"
            " `max_length` tokens, cut from the documents one after the other. Samples do not"
            " attend to each other."
        ),
    )
    attn_implementation: AttentionName = Field(
        "auto",
        description=(
            "Attention of language models, named as in transformers. `auto`: the model's default,"
            " usually `sdpa`; for packed rows on GPUs, a fused kernel in one call: torch's"
            " `varlen_attn`, or flash-attn if it is installed. `flash_attention_N` requires the"
            " package, a GPU and 16-bit precision."
        ),
    )
    use_liger_kernel: bool = Field(
        False,
        description=(
            "Replace norms, gated MLPs and rotary embeddings of language models by the Triton"
            " kernels of liger-kernel (extra `liger`), which store fewer activations. The loss is"
            " not replaced. GPUs only."
        ),
    )
    loss_chunk_size: Auto | Annotated[int, Field(ge=0)] = Field(
        "auto",
        description=(
            "Tokens whose logits are in memory at the same time (language models). `auto`: as"
            " many as take 512 MiB in float32 on accelerators, 832 with a vocabulary of 152,000,"
            " and 256 MiB on CPUs. 0: all of the micro-batch."
        ),
    )
    label_smoothing_factor: float = Field(
        0.0,
        ge=0,
        lt=1,
        description=(
            "Share of the target that is spread evenly over the vocabulary (language models), or"
            " over the classes. Evaluation computes the loss without it."
        ),
    )
    router_aux_loss_coef: Annotated[float, Field(ge=0)] | None = Field(
        None,
        description="Factor of the auxiliary loss that balances a mixture's experts; 0: off."
        " Default: as the model's config.json says (`output_router_logits`).",
    )
    neftune_noise_alpha: float | None = Field(
        None,
        gt=0,
        description=(
            "Add uniform noise to the embeddings in training (NEFTune, language models), of at most"
            " this value divided by the square root of the sample's tokens times the width of an"
            " embedding; 5 is usual."
        ),
    )
    train_on_inputs: bool = Field(
        False, description="Compute the loss on prompts too, not only on answers."
    )
    train_on_turns: Literal["all", "last"] = Field(
        "all",
        description=(
            "Assistant turns that contribute to the loss: all of a conversation, or only the last."
        ),
    )
    logging_steps: Annotated[int, Field(ge=1)] | ShareOfSteps = Field(
        1,
        description=(
            "Steps between `step` events and progress lines; below 1: a fraction of all steps."
        ),
    )
    save_steps: Annotated[int, Field(ge=0)] | ShareOfSteps = Field(
        500,
        description=(
            "Steps between checkpoints; below 1: a fraction of all steps; 0: only the one"
            " at the end, which is always written."
        ),
    )
    async_save: bool = Field(
        True,
        description="Write checkpoints in the background from a copy in host memory.",
    )
    save_total_limit: int | None = Field(
        3, ge=1, description="Number of checkpoints to keep; null keeps all."
    )
    eval_steps: Annotated[int, Field(ge=0)] | ShareOfSteps | Literal["never"] = Field(
        0,
        description=(
            "Steps between evaluations; below 1: a fraction of all steps; 0: each epoch; `never`."
        ),
    )
    metric_for_best_model: Text | None = Field(
        None,
        description=(
            "Metric by which evaluations are compared: `loss` (the default), or the name of an"
            " evaluation metric; the prefix `eval_` may be left out."
        ),
    )
    greater_is_better: bool | None = Field(
        None,
        description=(
            "Whether a higher metric is better. Default: false for `ter` and names that end with"
            " `loss`, `perplexity` or `error`."
        ),
    )
    load_best_model_at_end: bool = Field(
        False,
        description=(
            "Write the weights of the best evaluation to `model/`, instead of the last ones;"
            " includes `save_best`."
        ),
    )
    save_best: bool = Field(
        False,
        description=(
            "Save a checkpoint at each evaluation that is the best so far, and keep the best one"
            " in addition to those that `save_total_limit` keeps."
        ),
    )
    early_stopping: EarlyStopping | None = Field(
        None, description="End the training when evaluations no longer improve."
    )
    seed: int = Field(
        42,
        ge=0,
        description="Seed for weight initialization, data order, dropout and augmentation.",
    )
    shuffle: bool = Field(
        True,
        description=(
            "Shuffle the samples in each epoch, reproducibly from `seed`; false keeps the"
            " order of the dataset."
        ),
    )
    shuffle_buffer_size: int = Field(
        16384,
        ge=1,
        description=(
            "Number of rows that are shuffled among each other, if the data is streamed and its"
            " rows cannot be read in any order."
        ),
    )
    dataloader_num_workers: Auto | Annotated[int, Field(ge=0)] = Field(
        "auto",
        description=(
            "Data loader processes per rank. Each of them prefetches batches. `auto`: 1 on"
            " accelerators, if the data and the task can be copied into a process, and 0 on CPUs."
            " `auto` and 0 for a rank that streams its data: one per core, at most 4."
        ),
    )
    dataloader_prefetch_factor: int = Field(
        2, ge=1, description="Batches that each loader process prefetches."
    )
    dataloader_pin_memory: bool = Field(
        True, description="Use page-locked batches for faster copies to a GPU."
    )
    run_name: Text | None = Field(
        None,
        description="Name of the run in `report_to`. Default: the last part of `output_dir`.",
    )
    project: Text | None = Field(
        None,
        description=(
            "Project of the run in `report_to` (the experiment in MLflow). Default: what the"
            " tracker's own environment variable names, else `paceline`."
        ),
    )
    trackio_space_id: Text | None = Field(
        None, description="Space on the Hugging Face hub to which trackio sends the figures."
    )
    profile: Profile | None = Field(
        None,
        description=(
            "Record these steps with torch's profiler: each rank writes a Chrome trace and, on"
            " CUDA, a memory snapshot into the folder `profile` of the run."
        ),
    )
    push_to_hub: bool = Field(
        False,
        description=(
            "Upload `model/` with a model card to the Hugging Face hub when the run is done. The"
            " token is read from `HF_TOKEN` or from `hf auth login`."
        ),
    )
    hub_model_id: str | None = Field(
        None,
        description="Repository to upload to. Default: the name of `output_dir`, in your account.",
    )
    hub_private_repo: bool | None = Field(
        None,
        description=(
            "Whether a new repository is private. null: as the account or organization is set up."
        ),
    )

    @field_validator("max_steps", mode="before")
    @classmethod
    def _no_step_limit(cls, value: object) -> object:
        return None if value == -1 else value

    @field_validator("save_total_limit", mode="before")
    @classmethod
    def _zero_keeps_all(cls, value: object) -> object:
        return None if value in (0, -1) and not isinstance(value, bool) else value

    @field_validator("neftune_noise_alpha", "trainable_layers", mode="before")
    @classmethod
    def _zero_is_off(cls, value: object) -> object:
        return None if value == 0 and not isinstance(value, bool) else value

    @model_validator(mode="after")
    def _auto_is_open(self) -> Self:
        """A setting that is left to Paceline does not count as set by the user."""
        for name in ("gradient_checkpointing", "dataloader_num_workers"):
            if getattr(self, name) == "auto":
                self.model_fields_set.discard(name)
        return self

    def num_loader_processes(self, device_type: str) -> int:
        """Return the number of loader processes of a rank that does not stream its data."""
        count = self.dataloader_num_workers
        return int(device_type != "cpu") if count == "auto" else count

    @property
    def packs_rows(self) -> bool:
        """Return whether the batch size counts packed rows instead of samples."""
        return self.packing_strategy != "micro_batch"

    @property
    def max_sample_length(self) -> int | None:
        """Return the number of tokens to which samples are limited, or None if rows are cut from
        samples of any length."""
        return None if self.packing_strategy == "wrapped" else self.max_length

    def recomputed_share(self, num_blocks: int) -> float:
        """Return the share of the blocks whose forward runs again in backward, where `selective`
        counts as all: it leaves out operations, not blocks."""
        setting = self.recomputation
        if isinstance(setting, int):
            return math.ceil(num_blocks / setting) / max(1, num_blocks)
        return float(setting != "none")

    @property
    def recomputation(self) -> Literal["none", "selective", "full"] | int:
        """Return the setting of activation checkpointing: ``none`` until `auto` is replaced by a
        setting (:mod:`paceline.planner.search.fit`)."""
        setting = self.gradient_checkpointing
        return "none" if setting == "auto" else setting

    @property
    def weight_dtype(self) -> Literal["bfloat16", "float32"]:
        """Return the data type of trained weights, their gradients and optimizer state."""
        return "bfloat16" if self.precision == "bf16-true" else "float32"

    @property
    def mixed_dtype(self) -> Literal["bfloat16", "float16"] | None:
        """Return the data type of matrix products under mixed precision, or None for float32.

        ``auto`` counts as float32 here: it is replaced once the devices are known
        (:mod:`paceline.distributed.devices`).
        """
        if self.precision == "bf16-mixed":
            return "bfloat16"
        return "float16" if self.precision == "fp16-mixed" else None

    @property
    def compute_format(self) -> Literal["bfloat16", "float16", "tf32"] | None:
        """Return the number format of most matrix products, on which their rate depends, or None
        for float32. ``auto`` counts as float32."""
        if self.weight_dtype == "bfloat16":
            return "bfloat16"
        return self.mixed_dtype or ("tf32" if self.tf32 else None)
