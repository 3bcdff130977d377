"""The interface of a task: what a sample is, how samples become a batch, and how the loss is
computed.

A task is independent of ranks, accumulation and precision. It returns the *sum* of the loss over a
batch and the *count* that the sum covers (tokens, images); the trainer divides by the global count,
so the loss is the same for every number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from paceline.config.schema import Config
from paceline.config.schema.train_args import TrainArgs
from paceline.core.report import SourceFigures
from paceline.core.texts import UserText
from paceline.data.counts import DataCounts
from paceline.data.order.build import SourceSize, rows_per_epoch, tokens_per_row

if TYPE_CHECKING:
    import torch
    from torch import nn

    from paceline.models.context.place import ContextPlace

Notice = tuple[str, str]

#: Settings that affect only language models.
_LANGUAGE_KEYS = (
    "tokenizer",
    "new_special_tokens",
    "new_tokens",
    "eos_token",
    "bos_token",
    "format",
    "system",
    "chat_template",
)
_LANGUAGE_ARGS = (
    "max_length",
    "truncation_strategy",
    "packing",
    "packing_strategy",
    "attn_implementation",
    "use_liger_kernel",
    "train_on_inputs",
    "train_on_turns",
    "neftune_noise_alpha",
)
_LANGUAGE_SOURCE_KEYS = ("columns", "name", "ignore_columns", "roles")


class ModelStateReader(Protocol):
    """A checkpoint from which a task reads parts of a trained model."""

    def tensors(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return the dtype and the full shape of each tensor, by name."""

    def read(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Return a box of a tensor, on the CPU."""


@dataclass
class Prepared:
    """The result of :meth:`Task.prepare`, before any rank exists. Small and picklable, because it
    is sent to every rank.

    Args:
        num_train: number of training samples; None if it is unknown.
        num_eval: number of validation samples (0: no evaluation).
        counts: how many rows of the training data (and of the split held out from it) were used or
            dropped.
        train_tokens: number of tokens in one epoch, or None if samples have no tokens or the number
            is unknown.
        label_tokens: number of tokens with loss in one epoch, or None.
        notices: messages as (level, text), with level "info" or "warning".
        sources: sizes of the sources, for an order that mixes them or packs rows; empty if samples
            have no tokens.
        source_figures: the samples and shares of the sources, if there are several and their losses
            are recorded.
        fingerprint: hash of the data, or None if unknown. A run cannot be resumed with a different
            one.
        handle: the object by which ``build_datasets`` finds the prepared data, such as a cache
            folder.
        image_backend: the library that processes the images of a vision-language model, or None. A
            run cannot be resumed with a different one.
        mean_tokens: mean number of tokens of a sample; None if samples have no tokens. Default:
            the mean of ``train_tokens``.
    """

    num_train: int | None
    num_eval: int = 0
    counts: DataCounts = field(default_factory=DataCounts)
    train_tokens: int | None = None
    label_tokens: int | None = None
    notices: list[Notice] = field(default_factory=list)
    sources: tuple[SourceSize, ...] = ()
    source_figures: tuple[SourceFigures, ...] = ()
    fingerprint: str | None = None
    handle: Any = None
    image_backend: str | None = None
    mean_tokens: float | None = None

    def __post_init__(self) -> None:
        if self.mean_tokens is None and self.train_tokens is not None and self.num_train:
            self.mean_tokens = self.train_tokens / self.num_train

    def rows_per_epoch(self, config: Config, batch_size: int) -> int | None:
        """Return the number of rows that the batch size counts per epoch; None if unknown."""
        if not self.sources:
            return self.num_train
        return rows_per_epoch(config, self.sources, batch_size)

    def tokens_per_row(self, config: Config) -> float | None:
        """Return the mean number of tokens of a row, or None if samples have no tokens."""
        return tokens_per_row(config, self.sources) if self.sources else self.mean_tokens


class Task:
    """Base class of all tasks. A subclass needs ``build_model``, ``build_datasets`` and ``loss``;
    the other methods have defaults.

    Example::

        class Regression(paceline.Task):
            def build_datasets(self):
                x = torch.linspace(-3, 3, 1000).unsqueeze(1)
                return TensorDataset(x, x.sin()), None

            def build_model(self):
                return nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))

            def loss(self, model, batch):
                x, y = batch
                # the SUM over the batch, never the mean
                return F.mse_loss(model(x), y, reduction="sum")

    The config is ``self.config``; settings for the task itself are in ``self.config.task_args``.
    """

    #: Name of the items that ``count`` counts, for the report.
    unit = "samples"
    #: Peak learning rate if the config does not set one.
    default_learning_rate = 1e-3
    #: Whether the loss on a batch is the sum of the losses on its parts. Set it to False if the
    #: loss compares samples of a micro-batch with each other (a contrastive loss). The result of
    #: training then depends on the micro-batch size.
    additive = True
    #: Whether the model generates text from the samples of :class:`LanguageTask`.
    is_language_model = False
    #: Whether :meth:`prepare` tokenizes texts, with :attr:`num_prepare_workers` processes.
    tokenizes = False

    def __init__(self, config: Config) -> None:
        self.config = config

    # -- before any rank exists
    def check(self) -> None:
        """Raise :class:`~paceline.core.errors.ConfigError` for errors that can be found without
        reading the data."""

    #: Number of processes that tokenize the data in ``prepare``, or None to choose it by the amount
    #: of text.
    num_prepare_workers: int | None = None

    def prepare(self) -> Prepared:
        """Read, tokenize and cache the data. Called once per host, before the process group
        exists. The default builds the datasets and counts their rows."""
        train, evaluation = self.build_datasets()
        return Prepared(
            num_train=len(train),
            num_eval=0 if evaluation is None else len(evaluation),
            counts=DataCounts(read=len(train), kept=len(train)),
        )

    def check_batch(self, global_batch_size: int) -> None:
        """Check the number of samples of a global batch. Called before any rank exists.

        Raises:
            ConfigError: the loss cannot be computed with so few samples.
        """

    def check_steps(self, steps: int) -> None:
        """Check the number of steps of the run. Called before any rank exists.

        Raises:
            ConfigError: the data does not suffice for them.
        """

    # -- on every rank
    #: Type of device that the run trains on. Set before ``setup`` is called, when the model may
    #: still be on the CPU.
    device_type = "cpu"
    #: This rank's place among the ranks that divide each row of tokens, or None if rows are whole.
    #: Set before ``setup`` is called.
    place: ContextPlace | None = None
    #: Number of ranks that split each layer. Set before ``setup`` is called.
    tensor_ranks = 1
    #: Set before ``build_datasets`` is called on a rank.
    prepared: Prepared | None = None
    #: Number of samples of a global batch. Set before ``build_datasets`` is called on a rank.
    global_batch_size = 0

    @property
    def _handle(self) -> Any:
        """:attr:`Prepared.handle`."""
        assert self.prepared is not None, "`prepared` is set before the datasets are built"
        return self.prepared.handle

    def build_datasets(self) -> tuple[Any, Any | None]:
        """Return (training dataset, validation dataset or None): map-style, with ``__len__`` and
        ``__getitem__(int)``.

        A dataset may have an attribute ``lengths``, an int array [num_samples] of tokens per
        sample, so that the ranks get shares of the global batch with similar numbers of tokens.
        Before each sample is read, the random state is set from the seed, the epoch and the index,
        so that augmentation is the same in every run. A dataset without random numbers can set the
        attribute ``deterministic`` to True to skip that.
        """
        raise NotImplementedError(f"{type(self).__name__} needs build_datasets(self)")

    def build_model(self) -> nn.Module:
        """Return the module to train, on the CPU, in float32, initialized from torch's global
        random state, which is already seeded."""
        raise NotImplementedError(f"{type(self).__name__} needs build_model(self)")

    def setup(self, model: nn.Module) -> list[Notice]:
        """Prepare for training. Called once on every rank with the model on its device, before the
        first batch. Return (level, text) notices."""
        return []

    def collate(self, samples: Sequence[Any]) -> Any:
        """Return the samples as a batch (tensors in tuples, lists or dicts). Default: torch's
        ``default_collate``."""
        from torch.utils.data import default_collate

        return default_collate(list(samples))

    def count(self, batch: Any) -> float:
        """Return the number of items over which the loss of this batch is a sum, or the sum of
        their weights. Default: the size of the first dimension of the first tensor."""
        return int(_first_tensor(batch).shape[0])

    def num_tokens(self, batch: Any) -> int | None:
        """Return the number of tokens in the batch, for the throughput, or None if samples have no
        tokens."""
        return None

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return the SUM of the loss over the batch, as a scalar tensor with gradient."""
        raise NotImplementedError(f"{type(self).__name__} needs loss(self, model, batch)")

    def prepare_trial(self, model: nn.Module) -> None:
        """Choose what :meth:`setup` chooses and batches depend on, for a model without values."""
        return

    def trial_loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return the loss of a batch with a model on the meta device, where nothing is computed.
        A plan counts its operations and what it stores for backward.

        Args:
            batch: a batch with values.
        """
        from paceline.data.collate import map_tensors

        return self.loss(model, map_tensors(batch, lambda tensor: tensor.to("meta")))

    #: Names of sums over the global batch on which the loss depends in other ways than through its
    #: count. The batch that :meth:`loss` gets has them as ``batch["totals"]``, by name.
    total_names: tuple[str, ...] = ()

    #: Whether :meth:`loss` computes these sums itself for a batch that is the whole global batch.
    #: It then has no totals.
    sums_own_totals: bool = False

    def totals(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        """Return the terms of this batch in the sums that :attr:`total_names` names. Called without
        gradients."""
        return {}

    #: Names of the metrics that :meth:`loss` records in ``batch["metric_sums"]``, a
    #: :class:`~paceline.data.collate.MetricSums`, for the ``step`` events.
    step_metrics: tuple[str, ...] = ()

    def finish_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """Add the metrics of a step that are computed from the means of others."""
        return metrics

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        """Return sums over the batch by name, including "loss". They are divided by the global
        count. Results named in :attr:`gathers` are values per sample instead."""
        return {"loss": self.loss(model, batch)}

    #: Names of the results of :meth:`evaluate` that are values per sample [num_samples] instead of
    #: sums. :meth:`metrics` receives them.
    gathers: tuple[str, ...] = ()

    def metrics(self, gathered: dict[str, torch.Tensor]) -> dict[str, float]:
        """Return metrics that are not sums, such as an AUC; "loss" may be one of them.
        ``gathered`` has the values of :attr:`gathers` for the full validation set, from all ranks,
        in the same order for each name."""
        return {}

    def metric_names(self, prepared: Prepared) -> list[str] | None:
        """Return the names of the results of an evaluation, ``loss`` first; None if they are not
        known before one. Called before any rank exists."""
        return None

    # -- a reference: a loss that depends on what the model computes before it is trained
    @property
    def num_reference_values(self) -> int:
        """Number of values per sample that are computed once with the initial model and stored; 0
        if the loss does not need them."""
        return 0

    def reference_key(self, dataset: Any) -> str | None:
        """Return the key of the reference values of a dataset in the cache, or None if it is
        unknown whether the model has changed since they were stored."""
        return None

    def reference_values(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        """Return the reference values of the samples of a batch, "values" float32 [samples,
        values], and their indices in the dataset, "index" int64 [samples]."""
        raise NotImplementedError(
            f"{type(self).__name__} needs reference_values(self, model, batch)"
        )

    # -- at the end
    def save_model(self, model: nn.Module, folder: Path) -> None:
        """Write the trained model to the empty ``folder``. Default: its state dict as
        ``model.safetensors``."""
        from safetensors.torch import save_model

        save_model(model, str(folder / "model.safetensors"))

    def save_from(self, source: ModelStateReader, folder: Path) -> bool:
        """Write the model from parts of a checkpoint, so that no process needs memory for the full
        model. Return False if the task does not support this; :meth:`save_model` then receives the
        full model."""
        return False


def language_settings_notices(config: Config) -> list[Notice]:
    """Return a warning for each setting that was changed and has no effect on a task without
    text."""
    defaults = TrainArgs()
    names = [
        key
        for key in _LANGUAGE_KEYS
        if getattr(config, key) != Config.model_fields[key].get_default(call_default_factory=True)
    ]
    names += [
        f"train_args.{key}"
        for key in _LANGUAGE_ARGS
        if getattr(config.train_args, key) != getattr(defaults, key)
    ]
    names += [
        f"dataset.{key}"
        for source in config.sources() + config.sources(validation=True)
        for key in _LANGUAGE_SOURCE_KEYS
        if getattr(source, key)
    ]
    return [
        (
            "warning",
            UserText(
                "`{key}` has no effect on `task: {task}`",
                code="key-without-effect-on-task",
                key=key,
                task=config.task,
            ),
        )
        for key in names
    ]


def dropped_notice(name: str, dropped: dict[str, int], noun: str) -> Notice:
    """Return a warning with the number of files or rows that were dropped, by reason."""
    reasons = "; ".join(f"{reason}: {number:,}" for reason, number in sorted(dropped.items()))
    return "warning", UserText(
        "{name}: {rows} {noun} dropped ({reasons})",
        code="rows-dropped",
        name=name,
        rows=f"{sum(dropped.values()):,}",
        noun=noun,
        reasons=reasons,
    )


def _first_tensor(batch: Any) -> torch.Tensor:
    import torch

    if isinstance(batch, torch.Tensor):
        return batch
    items = batch.values() if isinstance(batch, dict) else batch
    for item in items:
        if isinstance(item, torch.Tensor | dict | list | tuple):
            return _first_tensor(item)
    raise TypeError(
        f"a batch of type {type(batch).__name__} has no tensor; define count(self, batch) in your"
        " task"
    )


def num_positions(batch: Any) -> int:
    """Return the number of tokens in a batch, including padding, or the number of rows if the batch
    has no tokens."""
    import torch

    ids = batch.get("input_ids") if isinstance(batch, dict) else None
    return int(ids.numel()) if isinstance(ids, torch.Tensor) else int(_first_tensor(batch).shape[0])


def num_targets(batch: Any) -> int:
    """Return the number of tokens of a language model's batch whose logits are computed: all tokens
    if the batch does not tell."""
    import torch

    targets = batch.get("targets") if isinstance(batch, dict) else None
    return int(targets.numel()) if isinstance(targets, torch.Tensor) else num_positions(batch)
