"""The schema of a config file: every key with its type, default, range and description.

``docs/config.md`` and ``docs/config.schema.json`` are generated from here (``python -m
paceline.config.reference``).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from paceline.config.schema.base import Names, Section, Text
from paceline.config.schema.compression import Compression
from paceline.config.schema.data import DatasetSource, modelscope_sources
from paceline.config.schema.lora import Lora
from paceline.config.schema.parallel import LocalSgd, Parallel, ParameterServer
from paceline.config.schema.recovery import RecoveryConfig
from paceline.config.schema.tasks import Classify, Recommend
from paceline.config.schema.train_args import Evaluation, TrainArgs
from paceline.core.hub import modelscope_name


class Config(Section):
    """The config of a run."""

    model: Text = Field(description="Hub id, local folder, or `builtin:NAME`.")
    tokenizer: Text | None = Field(
        None, description="Hub id or folder of the tokenizer. Default: the model's."
    )
    task: Text = Field(
        "sft",
        description=(
            "`sft`, `pretrain`, `classify`, `recommend`, or a custom task as `./file.py:Class`."
        ),
    )
    dataset: Text | DatasetSource | list[Text | DatasetSource] = Field(
        description=(
            "Path, hub id, well-known name or `builtin:NAME`, each also as `path#N` for N"
            " samples; or a list."
        )
    )
    format: Literal["auto", "alpaca", "messages", "sharegpt", "prompt_completion", "text"] = Field(
        "auto", description="Row format of every source that does not set its own."
    )
    ignore_columns: Names = Field(
        default_factory=list,
        description=(
            "Columns and message keys to ignore that are otherwise errors, such as"
            " `rejected` or `images`."
        ),
    )
    val_dataset: Text | DatasetSource | list[Text | DatasetSource] | None = Field(
        None, description="Validation data, in the same forms as `dataset`."
    )
    split_dataset_ratio: Annotated[float, Field(ge=0, lt=1)] | Annotated[int, Field(ge=1)] = Field(
        0.0,
        description=(
            "Validation split: a fraction of the dataset, or a number of samples from 1"
            " on; not with `val_dataset`."
        ),
    )
    system: Text | None = Field(None, description="System message for samples that have none.")
    chat_template: Text | None = Field(
        None,
        description=(
            "Template to use instead of the tokenizer's: a name (`chatml`, `llama3`, …),"
            " a Jinja file, or the template text. `tokenizer_default_fallback_chatml` uses"
            " `chatml` only if the tokenizer has none."
        ),
    )
    use_modelscope: bool = Field(
        False,
        description=(
            "Download models, tokenizers and datasets from ModelScope instead of the"
            " Hugging Face hub."
        ),
    )
    trust_remote_code: bool = Field(
        False, description="Allow running Python code that comes with a hub model."
    )
    output_dir: Text = Field(
        "./output/run",
        description="Run folder: config, events, checkpoints, report, model.",
    )
    checkpoint_dir: Text | None = Field(
        None,
        description=(
            "Checkpoint location: `s3://bucket/prefix` or a folder. null: inside"
            " output_dir. Logs and the report always stay in output_dir."
        ),
    )
    resume: Text = Field(
        "auto",
        description=(
            "`auto` (resume the run in output_dir, if any), `never`, or the path or URL"
            " of a checkpoint."
        ),
    )
    parallel: Parallel = Field(
        default_factory=Parallel, description="How training is distributed over devices."
    )
    local_sgd: LocalSgd = Field(
        default_factory=LocalSgd,
        description="Periodic synchronization: `local_sgd`, `diloco`.",
    )
    compression: Compression = Field(
        default_factory=Compression, description="Gradient compression."
    )
    lora: Lora = Field(default_factory=Lora, description="Low-rank adapters.")
    train_args: TrainArgs = Field(
        default_factory=TrainArgs, description="Training hyperparameters."
    )
    evaluation: Evaluation = Field(
        default_factory=Evaluation, description="Evaluation on the validation data."
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
    recovery: RecoveryConfig = Field(default_factory=RecoveryConfig, description="Fault handling.")
    task_args: dict[str, object] = Field(
        default_factory=dict,
        description=("Free-form settings of a custom task, available as `self.config.task_args`."),
    )
    report_to: list[Literal["tensorboard"]] = Field(
        default_factory=list, description="Additional metric loggers."
    )

    @field_validator("report_to", mode="before")
    @classmethod
    def _as_list(cls, value: object) -> object:
        if value in (None, "none", "None", ["none"]):
            return []
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _modelscope_names(self) -> Config:
        if self.use_modelscope:
            self.model = modelscope_name(self.model)
            self.tokenizer = None if self.tokenizer is None else modelscope_name(self.tokenizer)
            self.dataset = modelscope_sources(self.dataset)
            self.val_dataset = (
                None if self.val_dataset is None else modelscope_sources(self.val_dataset)
            )
        return self

    @model_validator(mode="after")
    def _check_combinations(self) -> Config:
        if self.train_args.train_on_turns == "last":
            if self.train_args.train_on_inputs:
                raise ValueError(
                    "train_on_turns: last is not supported with train_on_inputs: true: both choose"
                    " the tokens that carry the loss; keep one of them"
                )
            if self.task == "pretrain":
                raise ValueError(
                    "train_on_turns: last is not supported with task: pretrain: it computes the"
                    " loss on every token"
                )
        if isinstance(self.dataset, list) and not self.dataset:
            raise ValueError("dataset is an empty list")
        if self.val_dataset is not None and self.split_dataset_ratio > 0:
            raise ValueError(
                "split_dataset_ratio is not supported with val_dataset: both choose the validation"
                " data; keep one of them"
            )
        return self

    def sources(self, validation: bool = False) -> list[DatasetSource]:
        """Return the sources of the training or validation data as :class:`DatasetSource` objects.

        The top-level ``format`` and ``ignore_columns`` are merged into each source.
        """
        data = self.val_dataset if validation else self.dataset
        if data is None:
            return []
        out = []
        for item in data if isinstance(data, list) else [data]:
            source = DatasetSource(path=item) if isinstance(item, str) else item
            if source.format == "auto" and self.format != "auto":
                source = source.model_copy(update={"format": self.format})
            if self.ignore_columns:
                names = list(dict.fromkeys([*self.ignore_columns, *source.ignore_columns]))
                source = source.model_copy(update={"ignore_columns": names})
            out.append(source)
        return out
