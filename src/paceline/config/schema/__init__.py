"""The schema of a config file: every key, its type, its default, its range, and what it is for.

``docs/config.md`` and ``docs/config.schema.json`` are generated from here (``python -m
paceline.config.reference``).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from paceline.config.compat.conversion import words
from paceline.config.compat.lora import ALL_LINEAR, is_regex
from paceline.config.schema.base import Auto, Names, Section, Text
from paceline.config.schema.compression import AllReduce, Compression
from paceline.config.schema.local_sgd import LocalSgd
from paceline.config.schema.parameter_server import ParameterServer
from paceline.config.schema.recommend import Recommend
from paceline.config.schema.recovery import Recovery
from paceline.core.hub import modelscope_name

#: a share of all steps of a run, as transformers takes it for `save_steps`, `eval_steps` and
#: `logging_steps`
ShareOfSteps = Annotated[float, Field(gt=0, lt=1)]


#: relative speeds of the ranks or hosts of a run
Weights = Annotated[list[Annotated[float, Field(gt=0, allow_inf_nan=False)]], Field(min_length=1)]


class DatasetSource(Section):
    """One source of samples, where a plain path or hub id does not say enough."""

    path: Text = Field(
        description=(
            "File, folder or hub id; `path#N` takes the first N samples of a seeded shuffle."
        )
    )
    format: Literal["auto", "alpaca", "messages", "sharegpt", "prompt_completion", "text"] = Field(
        "auto", description="Shape of a row; `auto` finds it from the columns."
    )
    split: Text = Field("train", description="Split of a hub dataset.")
    name: Text | None = Field(None, description="Configuration (subset) of a hub dataset.")
    columns: dict[str, str] = Field(
        default_factory=dict,
        description=(
            "Names of the columns where they are not the usual ones, as `{expected: yours}`; e.g."
            " `{prompt: question, completion: answer}`. An empty name means that the column is not"
            " read."
        ),
    )
    ignore_columns: Names = Field(
        default_factory=list,
        description="Columns (and keys of messages) to leave out, beside those of the top level.",
    )
    roles: dict[str, Text | list[Text]] = Field(
        default_factory=dict,
        description=(
            "More names of the roles in chats, as `{role: yours}`; roles are `system`, `user`,"
            " `assistant`, `tool` and `tool_call`."
        ),
    )


class Parallel(Section):
    """How training is spread over devices."""

    mode: Text = Field(
        "auto",
        description=(
            "`auto`, `single`, `dp`, `ddp`, `zero1`, `zero2`, `zero3` (also called `fsdp`),"
            " `deepspeed`, `tensor`, `pipeline`, `hybrid`, `local_sgd`, `diloco`,"
            " `parameter_server`, or a strategy of your own as `package.module:Class`. `auto`: the"
            " fastest that fits in memory, as `paceline plan` says; `hybrid` where sizes of axes"
            " are given."
        ),
    )
    data: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Replicas. Default: what the other axes leave."
    )
    shard: Annotated[int, Field(ge=1)] | None = Field(
        None,
        description=(
            "Parts that weights, gradients and optimizer state are cut into; each has its own part"
            " of the batch."
        ),
    )
    tensor: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Parts that each layer is cut into."
    )
    pipeline: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Stages that the layers are dealt to."
    )
    tensor_plan: dict[str, str] = Field(
        default_factory=dict,
        description=(
            "How tensor parallelism cuts modules that the model's own plan does not name, as"
            " `{pattern: colwise}`; patterns such as `layers.*.mlp.up_proj`, styles such as"
            " `colwise`, `rowwise`, `packed_colwise:3`."
        ),
    )
    sequence_parallel: bool = Field(
        False,
        description=(
            "With `tensor`: keep activations between the cut layers in parts too, cut along the"
            " tokens."
        ),
    )
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"] = Field(
        "1f1b",
        description="Order in which a stage runs its micro-batches (torch.distributed.pipelining).",
    )
    pipeline_chunks: Annotated[int, Field(ge=2)] = Field(
        2, description="Stages that each rank holds under `interleaved_1f1b` and `zero_bubble`."
    )
    deepspeed_stage: Annotated[int, Field(ge=1, le=3)] | None = Field(
        None,
        description=(
            "ZeRO stage of `mode: deepspeed`. Default: the stage in `deepspeed_config`, else 2."
        ),
    )
    deepspeed_config: Text | dict[str, object] | None = Field(
        None,
        description=(
            "A DeepSpeed JSON (path or mapping). Its values set the keys that the config leaves"
            " out; settings that cannot be honored are refused."
        ),
    )
    offload: Literal["none", "optimizer", "all"] = Field(
        "none",
        description=(
            "Keep optimizer state (`optimizer`), or parameters too (`all`), in the host's memory:"
            " `zero2`, `zero3` and `deepspeed` on accelerators."
        ),
    )
    num_gpus: Auto | Annotated[int, Field(ge=1)] = Field(
        "auto",
        description=(
            "Number of devices, one rank each. `auto`: every visible GPU; without one, two CPU"
            " ranks where there are two cores. With `device: cpu` it is the number of CPU ranks."
        ),
    )
    device: Text = Field(
        "auto",
        description=(
            "`auto`, `cpu`, or an accelerator type (`cuda`, `xpu`, `mps`…). Never falls back in"
            " silence."
        ),
    )
    bucket_cap_mb: float = Field(
        25.0,
        gt=0,
        description=(
            "Size in MiB of a gradient bucket; each bucket is all-reduced while backward goes on."
        ),
    )
    all_reduce: AllReduce = "native"
    timeout_s: float = Field(
        600.0,
        ge=10,
        description="Seconds after which a collective that does not end fails the run.",
    )
    balance: Literal["equal", "speed"] | Weights = Field(
        "equal",
        description=(
            "Micro-batches of each rank with `ddp` and `zero1`: `equal`; `speed` measures the ranks"
            " in the first steps and assigns micro-batches in proportion; or a list of weights, one"
            " per rank or one per host, as `[3, 1]`."
        ),
    )
    nnodes: (
        Annotated[int, Field(ge=1)] | Annotated[str, Field(pattern=r"^[1-9][0-9]*:[1-9][0-9]*$")]
    ) = Field(
        1,
        description=(
            "Hosts, each of which gets the same command; `1:4`: at least 1, at most 4, and the run"
            " goes on with those that are there."
        ),
    )
    node_rank: Auto | Annotated[int, Field(ge=0)] = Field(
        "auto",
        description=(
            "This host's number, from 0. `auto`: 0 on the endpoint host, any free number on the"
            " others."
        ),
    )
    rdzv_endpoint: Text | None = Field(
        None,
        description=(
            "Rendezvous endpoint: the address of one of the hosts, as `10.0.0.1` or"
            " `10.0.0.1:29500`; the same on every host."
        ),
    )
    interface: Text | None = Field(
        None,
        description=(
            "Network interface between the hosts, as `eth0`. Default: the one that leads to"
            " `rdzv_endpoint`."
        ),
    )

    @field_validator("nnodes", mode="after")
    @classmethod
    def _low_to_high(cls, value: int | str) -> int | str:
        low, _, high = str(value).partition(":")
        if high and int(low) > int(high):
            raise ValueError(f"nnodes {value}: the first number is the smaller one")
        return value

    @property
    def hosts(self) -> tuple[int, int]:
        """The smallest and the largest number of hosts."""
        low, _, high = str(self.nnodes).partition(":")
        return int(low), int(high or low)


class Lora(Section):
    """Low-rank adaptation (Hu et al., 2021), through peft."""

    enable: bool = Field(
        False, description="Train low-rank adapters and leave the model's own weights frozen."
    )
    rank: int = Field(8, ge=1, description="Rank r of the update.")
    alpha: float = Field(32.0, gt=0, description="The update is scaled by alpha / rank.")
    dropout: float = Field(0.05, ge=0, lt=1, description="Dropout on the adapter's input.")
    target_modules: Text | list[Text] = Field(
        "all-linear",
        description=(
            "Modules that get an adapter: a list of names, a regular expression that matches whole"
            " names, or `all-linear` (all linear layers but the output head)."
        ),
    )
    modules_to_save: list[Text] = Field(
        default_factory=list,
        description="Modules trained in full beside the adapters, e.g. `[lm_head]`.",
    )
    adapter: Text | None = Field(
        None, description="Folder of an adapter to go on from, instead of a fresh one."
    )

    @field_validator("target_modules", mode="after")
    @classmethod
    def _names_as_a_list(cls, value: str | list[str]) -> str | list[str]:
        """Text without the signs of a regular expression is one name, or several with commas."""
        if isinstance(value, list) or value == ALL_LINEAR or is_regex(value):
            return value
        return words(value) or value


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


class Classify(Section):
    """Settings of `task: classify`."""

    image_size: int = Field(
        32, ge=4, description="Images of a folder are resized to this height and width, in pixels."
    )
    hidden: int = Field(64, ge=4, description="Width of the built-in image models.")
    augment: bool = Field(
        False, description="Random shifts and flips of training images, fixed by the seed."
    )


Sources = Text | DatasetSource | list[Text | DatasetSource]


def _from_modelscope(sources: Sources) -> Sources:
    def convert(source: Text | DatasetSource) -> Text | DatasetSource:
        if isinstance(source, str):
            return modelscope_name(source)
        return source.model_copy(update={"path": modelscope_name(source.path)})

    return (
        [convert(source) for source in sources] if isinstance(sources, list) else convert(sources)
    )


class Config(Section):
    """A run of Paceline."""

    model: Text = Field(description="Hub id, local folder, or `builtin:NAME`.")
    tokenizer: Text | None = Field(
        None, description="Hub id or folder of the tokenizer. Default: the model's."
    )
    task: Text = Field(
        "sft",
        description="`sft`, `pretrain`, `classify`, `recommend`, or your own as `./file.py:Class`.",
    )
    dataset: Text | DatasetSource | list[Text | DatasetSource] = Field(
        description=(
            "Path, hub id, well-known name, `builtin:NAME`, any of them as `path#N` for N samples,"
            " or a list."
        )
    )
    format: Literal["auto", "alpaca", "messages", "sharegpt", "prompt_completion", "text"] = Field(
        "auto", description="Shape of the rows of every source that does not say its own."
    )
    ignore_columns: Names = Field(
        default_factory=list,
        description=(
            "Columns (and keys of messages) to leave out, such as `rejected` or `images`, which are"
            " errors otherwise."
        ),
    )
    val_dataset: Text | DatasetSource | list[Text | DatasetSource] | None = Field(
        None, description="Validation data, as `dataset`."
    )
    split_dataset_ratio: Annotated[float, Field(ge=0, lt=1)] | Annotated[int, Field(ge=1)] = Field(
        0.0,
        description=(
            "Share of the dataset held out for validation, from 1 on the number of samples; not"
            " with `val_dataset`."
        ),
    )
    system: Text | None = Field(
        None, description="System message put before samples that have none."
    )
    chat_template: Text | None = Field(
        None,
        description=(
            "Chat template instead of the tokenizer's: a name (`chatml`, `llama3`, …), a file with"
            " a Jinja template, or the template itself. `tokenizer_default_fallback_chatml`: for a"
            " tokenizer without one."
        ),
    )
    use_modelscope: bool = Field(
        False,
        description=(
            "Read hub ids of models, tokenizers and datasets from ModelScope instead of the Hugging"
            " Face hub."
        ),
    )
    trust_remote_code: bool = Field(
        False, description="Run Python code that comes with a hub model."
    )
    output_dir: Text = Field(
        "./output/run",
        description="Folder of this run: config, events, checkpoints, report, model.",
    )
    checkpoint_dir: Text | None = Field(
        None,
        description=(
            "Where checkpoints are kept: `s3://bucket/prefix` or a folder. null: in output_dir."
            " Logs and the report stay in output_dir."
        ),
    )
    resume: Text = Field(
        "auto",
        description=(
            "`auto`: go on where the run in output_dir stopped; `never`; the path or URL of a"
            " checkpoint."
        ),
    )
    parallel: Parallel = Field(
        default_factory=Parallel, description="How training is spread over devices."
    )
    local_sgd: LocalSgd = Field(
        default_factory=LocalSgd,
        description="Synchronisation every so many steps: `local_sgd`, `diloco`.",
    )
    compression: Compression = Field(
        default_factory=Compression, description="What is sent of the gradients."
    )
    lora: Lora = Field(default_factory=Lora, description="Low-rank adapters.")
    train_args: TrainArgs = Field(default_factory=TrainArgs, description="The training itself.")
    evaluation: Evaluation = Field(
        default_factory=Evaluation, description="How the validation data is run."
    )
    classify: Classify = Field(
        default_factory=Classify, description="Settings of `task: classify`."
    )
    recommend: Recommend = Field(
        default_factory=Recommend, description="Settings of `task: recommend`."
    )
    parameter_server: ParameterServer = Field(
        default_factory=ParameterServer,
        description="Settings of `parallel.mode: parameter_server`.",
    )
    recovery: Recovery = Field(
        default_factory=Recovery, description="What a run does about faults."
    )
    task_args: dict[str, object] = Field(
        default_factory=dict,
        description="Free settings for your own task; it reads them as `self.config.task_args`.",
    )
    report_to: list[Literal["tensorboard"]] = Field(
        default_factory=list, description="More places that get the figures."
    )

    @field_validator("report_to", mode="before")
    @classmethod
    def _one_or_none(cls, value: object) -> object:
        if value in (None, "none", "None", ["none"]):
            return []
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _modelscope_names(self) -> Config:
        if self.use_modelscope:
            self.model = modelscope_name(self.model)
            self.tokenizer = None if self.tokenizer is None else modelscope_name(self.tokenizer)
            self.dataset = _from_modelscope(self.dataset)
            self.val_dataset = (
                None if self.val_dataset is None else _from_modelscope(self.val_dataset)
            )
        return self

    @model_validator(mode="after")
    def _turns_and_task(self) -> Config:
        if self.train_args.train_on_turns == "last":
            if self.train_args.train_on_inputs:
                raise ValueError(
                    "train_on_turns: last is not supported with train_on_inputs: true; keep one of"
                    " them"
                )
            if self.task == "pretrain":
                raise ValueError(
                    "train_on_turns: last is not supported with task: pretrain, where every token"
                    " carries loss"
                )
        return self

    @model_validator(mode="after")
    def _some_data(self) -> Config:
        if isinstance(self.dataset, list) and not self.dataset:
            raise ValueError("dataset is an empty list")
        if self.val_dataset is not None and self.split_dataset_ratio > 0:
            raise ValueError("val_dataset and split_dataset_ratio are both given; keep one")
        return self

    def sources(self, validation: bool = False) -> list[DatasetSource]:
        """The data sources as a list of :class:`DatasetSource`, the section's ``format`` filled in
        where a source has none."""
        given = self.val_dataset if validation else self.dataset
        if given is None:
            return []
        out = []
        for one in given if isinstance(given, list) else [given]:
            source = DatasetSource(path=one) if isinstance(one, str) else one
            if source.format == "auto" and self.format != "auto":
                source = source.model_copy(update={"format": self.format})
            if self.ignore_columns:
                names = list(dict.fromkeys([*self.ignore_columns, *source.ignore_columns]))
                source = source.model_copy(update={"ignore_columns": names})
            out.append(source)
        return out
