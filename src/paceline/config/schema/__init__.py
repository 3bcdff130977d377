"""The schema of a config file: every key, its type, its default, its range, and what it is for.

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
    recovery: RecoveryConfig = Field(
        default_factory=RecoveryConfig, description="What a run does about faults."
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
            self.dataset = modelscope_sources(self.dataset)
            self.val_dataset = (
                None if self.val_dataset is None else modelscope_sources(self.val_dataset)
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
