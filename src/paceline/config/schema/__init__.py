"""The schema of a config file: every key with its type, default, range and description.

``docs/config.md`` and ``docs/config.schema.json`` are generated from here (``python -m
paceline.config.reference``).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue, field_validator, model_validator

from paceline.config.schema.base import Auto, CombinationError, Logger, Names, Section, Text
from paceline.config.schema.compression import Compression
from paceline.config.schema.data import DatasetSource, modelscope_sources
from paceline.config.schema.evaluation import Evaluation
from paceline.config.schema.grpo import Grpo, check_rewards
from paceline.config.schema.lora import Lora
from paceline.config.schema.parallel import LocalSgd, Parallel, ParameterServer
from paceline.config.schema.preference import Preference
from paceline.config.schema.recovery import RecoveryConfig
from paceline.config.schema.rewards import Rewards
from paceline.config.schema.schedules import schedule_problem
from paceline.config.schema.tasks import Classify, Recommend
from paceline.config.schema.train_args import TrainArgs
from paceline.config.schema.vision import Vision
from paceline.core.hub import modelscope_name
from paceline.core.texts import UserText


class Config(Section):
    """The config of a run."""

    model: Text = Field(description="Hub id, local folder, or `builtin:NAME`.")
    tokenizer: Text | None = Field(
        None, description="Hub id or folder of the tokenizer. Default: the model's."
    )
    new_special_tokens: Names = Field(
        default_factory=list,
        description=(
            "Special tokens to add to the vocabulary, e.g. `[<think>, </think>]`; decoding answers"
            " omits them."
        ),
    )
    new_tokens: Names = Field(
        default_factory=list,
        description="Tokens to add to the vocabulary that are text like any other.",
    )
    eos_token: Text | None = Field(
        None,
        description=(
            "Token that ends texts and answers, which is saved in the tokenizer and among the"
            " model's stop tokens. Default: the tokenizer's."
        ),
    )
    bos_token: Text | None = Field(
        None, description="Token that begins texts. Default: the tokenizer's."
    )
    task: Text = Field(
        "sft",
        description=(
            "`sft`, `pretrain`, `dpo`, `orpo`, `kto`, `simpo`, `grpo`, `rloo`, `reward`,"
            " `classify`, `recommend`, or a custom task as `./file.py:Class`."
        ),
    )
    dataset: Text | DatasetSource | list[Text | DatasetSource] = Field(
        description=(
            "Path, hub id, well-known name or `builtin:NAME`, each also as `path#N` for N"
            " samples or `path#P%` for a percentage of them; or a list."
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
    mixing: Literal["concat", "weights", "temperature"] = Field(
        "concat",
        description=(
            "How several sources are mixed. `concat`: each row of all sources once per epoch."
            " `weights`: in proportion to the `weight` of each source. `temperature`: in proportion"
            " to its number of rows to the power 1/`mixing_temperature`."
        ),
    )
    mixing_temperature: float = Field(
        2.0,
        gt=0,
        description=(
            "With `mixing: temperature`: 1 reads each source in proportion to its size; the higher,"
            " the more equally."
        ),
    )
    stopping_strategy: Literal[
        "first_exhausted", "all_exhausted", "all_exhausted_without_replacement"
    ] = Field(
        "first_exhausted",
        description=(
            "End of an epoch of mixed sources: when the first source, or when every source has been"
            " read once. `all_exhausted_without_replacement`: every row once; a source without rows"
            " left is not read again before the end."
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
    streaming: Auto | bool = Field(
        "auto",
        description=(
            "Tokenize rows while training runs, instead of all rows before it; `auto`: if the"
            " training data has more than 1 GiB of text, or is at a URL, and the other settings"
            " support it."
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
    chat_template_kwargs: dict[str, JsonValue] = Field(
        {},
        description=(
            "Variables that the chat template reads, such as `{enable_thinking: false}` or"
            " `{reasoning_effort: low}`. A column `chat_template_kwargs` of the data replaces them"
            " for its row. The saved tokenizer has them as defaults."
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
    preference: Preference = Field(
        default_factory=Preference, description="Settings of preference training."
    )
    grpo: Grpo = Field(
        default_factory=Grpo, description="Settings of reinforcement learning with rewards."
    )
    rewards: Rewards = Field(
        default_factory=list,
        description=(
            "Rewards of `task: grpo` and `rloo`, whose weighted sum counts: functions of your own"
            " as `{function: ./rewards.py:NAME}`, built-in ones as `{name: NAME}` (`math`, `exact`,"
            " `choice`, `format`, `soft_overlong`), and reward models as `{model: FOLDER}`, each"
            " with a `weight`."
        ),
    )
    vision: Vision = Field(
        default_factory=Vision, description="Settings of vision-language models."
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
        description=(
            "Free-form settings of a custom task or callback, available as `self.config.task_args`."
        ),
    )
    callbacks: list[Text] = Field(
        default_factory=list,
        description="Callbacks of your own, as `./file.py:Class` or `package.module:Class`.",
    )
    report_to: list[Logger] = Field(
        default_factory=list,
        description="Loggers that receive the figures of the run; each needs its package.",
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
                raise CombinationError(
                    UserText(
                        "train_on_turns: last is not supported with train_on_inputs: true: both"
                        " choose the tokens that carry the loss; keep one of them",
                        code="last-turn-with-inputs",
                    ),
                    "train_args.train_on_inputs",
                    "train_args.train_on_turns",
                )
            if self.task == "pretrain":
                raise CombinationError(
                    UserText(
                        "train_on_turns: last is not supported with task: pretrain: it computes"
                        " the loss on every token",
                        code="last-turn-with-pretrain",
                    ),
                    "task",
                    "train_args.train_on_turns",
                )
        for key in ("trainable", "trainable_layers"):
            if self.lora.enable and getattr(self.train_args, key):
                raise ValueError(
                    UserText(
                        "train_args.{key} is not supported with lora.enable: true: adapters are"
                        " trained instead of the model's own weights; list modules to train in"
                        " full in lora.modules_to_save",
                        code="trained-parts-with-lora",
                        key=key,
                    )
                )
        if isinstance(self.dataset, list) and not self.dataset:
            raise CombinationError(
                UserText("dataset is an empty list", code="empty-dataset-list"), "dataset"
            )
        self._check_mixing()
        self.preference.check_task(self.task)
        check_rewards(self.task, self.rewards, self.grpo)
        problem = schedule_problem(
            self.train_args.lr_scheduler_type,
            self.train_args.lr_scheduler_kwargs,
            self.train_args.learning_rate,
        )
        if problem is not None:
            raise CombinationError(
                UserText(
                    "lr_scheduler_kwargs: {problem}", code="invalid-schedule", problem=problem
                ),
                "train_args.lr_scheduler_kwargs",
            )
        if self.train_args.packs_rows and self.train_args.packing is False:
            raise CombinationError(
                UserText(
                    "packing_strategy: {packing_strategy} is not supported with packing: false,"
                    " which pads rows; keep one of them",
                    code="packing-strategy-without-packing",
                    packing_strategy=self.train_args.packing_strategy,
                ),
                "train_args.packing",
                "train_args.packing_strategy",
            )
        if self.val_dataset is not None and self.split_dataset_ratio > 0:
            raise CombinationError(
                UserText(
                    "split_dataset_ratio is not supported with val_dataset: both choose the"
                    " validation data; keep one of them",
                    code="split-with-validation-data",
                ),
                "val_dataset",
                "split_dataset_ratio",
            )
        if self.streaming is True and (conflict := self.streaming_conflict()):
            raise _streaming_error(*conflict)
        return self

    def streaming_conflict(self) -> tuple[str, str, str] | None:
        """Return the setting with which the data cannot be streamed, the reason, and what to do;
        None if there is no such setting."""
        # The images of task: classify are always read while training runs; its texts are refused by
        # the task.
        if self.task not in ("sft", "pretrain", "classify"):
            return (
                f"task: {self.task}",
                "only task: sft, task: pretrain and image classification stream their data",
                "set streaming: false",
            )
        if (
            self.parallel.mode == "parameter_server"
            and self.parameter_server.on_worker_failure == "continue"
        ):
            return (
                "parameter_server.on_worker_failure: continue",
                "the counts of the rows that a lost worker has read would be missing",
                "set it to restart",
            )
        if self.train_args.neftune_noise_alpha is not None:
            return (
                f"train_args.neftune_noise_alpha: {self.train_args.neftune_noise_alpha:g}",
                "the noise depends on the number of a sample in the dataset, and dropped rows have"
                " none",
                "set streaming: false, or leave train_args.neftune_noise_alpha out",
            )
        return None

    def _check_mixing(self) -> None:
        sources = self.sources()
        if self.mixing != "concat" and self.task not in ("sft", "pretrain"):
            raise CombinationError(
                UserText(
                    "mixing: {mixing} is not supported with task: {task}: only text sources are"
                    " mixed (sft, pretrain)",
                    code="mixing-with-task",
                    mixing=self.mixing,
                    task=self.task,
                ),
                "task",
                "mixing",
            )
        if self.mixing != "weights":
            if any(source.weight != 1 for source in sources):
                raise CombinationError(
                    UserText(
                        "the weight of a source is not supported with mixing: {mixing}: set"
                        " mixing: weights, or remove it",
                        code="source-weight-with-mixing",
                        mixing=self.mixing,
                    ),
                    "dataset",
                    "mixing",
                )
            return
        by_step = [
            source.weight if isinstance(source.weight, dict) else {0: source.weight}
            for source in sources
        ]
        for step in sorted({step for weights in by_step for step in weights}):
            if all(_weight_at(weights, step) == 0 for weights in by_step):
                raise CombinationError(
                    UserText(
                        "mixing: weights requires a weight above 0 at every step, and at step"
                        " {step} all weights are 0",
                        code="all-weights-zero",
                        step=step,
                    ),
                    "mixing",
                )

    @property
    def adds_tokens(self) -> bool:
        """Whether tokens are added to the vocabulary."""
        return bool(self.new_tokens or self.new_special_tokens)

    @property
    def changes_tokenizer(self) -> bool:
        """Whether tokens are added to the tokenizer, or one of its special tokens is another."""
        return self.adds_tokens or self.eos_token is not None or self.bos_token is not None

    @property
    def extra_forwards(self) -> int:
        """Number of forward passes without gradients per micro-batch of training: one for the
        divergence of KTO, one for the tokens per expert of ``router_aux_loss_coef``."""
        has_divergence = self.task == "kto" and self.preference.losses("kto")[0][0] == "kto"
        return int(has_divergence) + bool(self.train_args.router_aux_loss_coef)

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


def _weight_at(weights: dict[int, float], step: int) -> float:
    """Return the weight at a step of :attr:`DatasetSource.weight`, or a positive number between two
    steps if one of them has a positive weight."""
    before = max((point for point in weights if point <= step), default=min(weights))
    after = min((point for point in weights if point >= step), default=max(weights))
    return weights[step] if step in weights else weights[before] + weights[after]


def _streaming_error(setting: str, reason: str, fix: str) -> CombinationError:
    text = UserText(
        "{setting} is not supported with streaming: true: {reason}; {fix_streaming}",
        code="setting-with-streaming",
        setting=setting,
        reason=reason,
        fix_streaming=fix,
    )
    return CombinationError(text, "streaming", setting.partition(":")[0])
