"""The contract of a task: what a sample is, how samples become a batch, and what the loss is.

A task knows nothing of ranks, accumulation or precision. It gives the *sum* of the loss over a
batch and the *count* that sum is over (tokens, images); the engine divides by the global count, so
the loss is the same for every number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from paceline.config.schema import Config
from paceline.config.schema.train_args import TrainArgs
from paceline.data.counts import DataCounts

if TYPE_CHECKING:
    import torch
    from torch import nn

Notice = tuple[str, str]

#: Settings that mean something for language models alone.
_LANGUAGE_KEYS = ("tokenizer", "format", "system", "chat_template")
_LANGUAGE_ARGS = (
    "max_length",
    "truncation_strategy",
    "packing",
    "train_on_inputs",
    "train_on_turns",
)
_LANGUAGE_SOURCE_KEYS = ("columns", "name", "ignore_columns", "roles")


class ModelStateReader(Protocol):
    """Where the parts of a trained model are read from: a checkpoint."""

    def tensors(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """dtype and shape of each whole tensor, by name."""

    def read(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """A box of a tensor, on the CPU."""


@dataclass
class Prepared:
    """What :meth:`Task.prepare` found, before any rank exists. Small and picklable: it is sent to
    every rank.

    Args:
        num_train: number of training samples.
        num_eval: number of validation samples (0: no evaluation).
        counts: the data accounting of the training data (and of the split held out from it).
        train_tokens: tokens of one epoch, or None where samples have no tokens.
        label_tokens: tokens that carry loss in one epoch, or None.
        notices: lines for the person, as (level, text), level "info" or "warning".
        fingerprint: changes when the data does; a resumed run is refused where it differs. None:
            not known.
        handle: whatever the task's ``build_datasets`` needs to find the prepared data again (a
            cache folder, say).
    """

    num_train: int
    num_eval: int = 0
    counts: DataCounts = field(default_factory=DataCounts)
    train_tokens: int | None = None
    label_tokens: int | None = None
    notices: list[Notice] = field(default_factory=list)
    fingerprint: str | None = None
    handle: Any = None


class Task:
    """Base class of all tasks. Your own needs ``build_model``, ``build_datasets`` and ``loss``; the
    rest has defaults.

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

    The config is ``self.config``; free settings stand in ``self.config.task_args``.
    """

    #: what ``count`` counts, for the report
    unit = "samples"
    #: peak learning rate where the config gives none
    default_learning_rate = 1e-3
    #: False: the loss compares samples of a micro-batch with each other (a contrastive loss), so
    #: that its value on a batch is not the sum of its values on the parts. The result of training
    #: then depends on the micro-batch size.
    additive = True
    #: whether the model generates text from the samples of :class:`LanguageTask`
    is_language_model = False

    def __init__(self, config: Config) -> None:
        self.config = config

    # -- before any rank exists
    def check(self) -> None:
        """Raise :class:`~paceline.core.errors.ConfigError` for what can be seen to be wrong without
        reading the data."""

    def prepare(self) -> Prepared:
        """Read, tokenise and cache the data; called before the process group exists, once a node at
        a time.

        The default builds the datasets and counts their rows.
        """
        train, evaluation = self.build_datasets()
        counts = DataCounts(read=len(train), kept=len(train))
        return Prepared(
            num_train=len(train),
            num_eval=0 if evaluation is None else len(evaluation),
            counts=counts,
        )

    # -- on every rank
    prepared: Prepared | None = (
        None  #: set by the engine before ``build_datasets`` is called on a rank
    )

    def build_datasets(self) -> tuple[Any, Any | None]:
        """(training dataset, validation dataset or None): map-style, with ``__len__`` and
        ``__getitem__(int)``.

        A dataset may have an attribute ``lengths``, an int array [num_samples] of tokens a sample:
        ranks then get shares of the global batch that are equal in tokens. Where an attribute
        ``deterministic`` is true, the random state is not set before each look at a sample (it else
        is, by seed, epoch and index: augmentation is then the same in every run).
        """
        raise NotImplementedError(f"{type(self).__name__} needs build_datasets(self)")

    def build_model(self) -> nn.Module:
        """The module to train, on the CPU, in float32, initialised from torch's global random state
        (already seeded)."""
        raise NotImplementedError(f"{type(self).__name__} needs build_model(self)")

    def setup(self, model: nn.Module) -> list[Notice]:
        """Called once on every rank with the model on its device, before any batch is made. Returns
        (level, text) notices."""
        return []

    def collate(self, samples: Sequence[Any]) -> Any:
        """Samples to a batch (tensors in tuples, lists or dicts). Default: torch's
        ``default_collate``."""
        from torch.utils.data import default_collate

        return default_collate(list(samples))

    def count(self, batch: Any) -> int:
        """What the loss of this batch is a sum over. Default: the first dimension of the batch's
        first tensor."""
        return int(_first_tensor(batch).shape[0])

    def num_tokens(self, batch: Any) -> int | None:
        """Tokens of the batch, for the throughput; None where samples have no tokens."""
        return None

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """The SUM of the loss over the batch: a scalar tensor with gradient."""
        raise NotImplementedError(f"{type(self).__name__} needs loss(self, model, batch)")

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        """Sums over the batch, by name; the engine divides them by the global count. Must hold
        "loss". Those named in :attr:`gathers` are values a sample instead."""
        return {"loss": self.loss(model, batch)}

    #: names of results of :meth:`evaluate` that are no sums but values a sample, [num_samples]: for
    #: :meth:`metrics`
    gathers: tuple[str, ...] = ()

    def metrics(self, gathered: dict[str, torch.Tensor]) -> dict[str, float]:
        """Metrics that follow from no sum, such as an AUC: ``gathered`` has the :attr:`gathers` of
        the whole validation set, from all ranks, in any order but the same for each name."""
        return {}

    # -- at the end
    def save_model(self, model: nn.Module, folder: Path) -> None:
        """Write the trained model into ``folder`` (there, empty). Default: ``model.safetensors`` of
        its state dict."""
        from safetensors.torch import save_model

        save_model(model, str(folder / "model.safetensors"))

    def save_from(self, source: ModelStateReader, folder: Path) -> bool:
        """The same out of a checkpoint's parts, for a model that no single process need hold.
        False: this task cannot, and :meth:`save_model` gets the whole model."""
        return False


def language_settings_notices(config: Config) -> list[Notice]:
    """A warning for each setting that was changed and means nothing to a task without text."""
    defaults = TrainArgs()
    names = [
        key for key in _LANGUAGE_KEYS if getattr(config, key) != Config.model_fields[key].default
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
    return [("warning", f"`{key}` has no effect on `task: {config.task}`") for key in names]


def dropped_notice(name: str, dropped: dict[str, int], noun: str) -> Notice:
    """A warning with the number of files or rows that were left out, by reason."""
    reasons = "; ".join(f"{reason}: {number:,}" for reason, number in sorted(dropped.items()))
    return "warning", f"{name}: {sum(dropped.values()):,} {noun} left out ({reasons})"


def _first_tensor(batch: Any) -> torch.Tensor:
    import torch

    if isinstance(batch, torch.Tensor):
        return batch
    items = batch.values() if isinstance(batch, dict) else batch
    for item in items:
        if isinstance(item, torch.Tensor | dict | list | tuple):
            return _first_tensor(item)
    raise TypeError(
        f"no tensor in a batch of type {type(batch).__name__}; give your task a count(self, batch)"
    )


def num_positions(batch: Any) -> int:
    """Return the tokens of a batch, padding included; of a batch without tokens, the rows."""
    import torch

    ids = batch.get("input_ids") if isinstance(batch, dict) else None
    return int(ids.numel()) if isinstance(ids, torch.Tensor) else int(_first_tensor(batch).shape[0])
