"""`task: classify` with texts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.core.texts import UserText
from paceline.data.cache import key_of
from paceline.data.collate import pad_tokens
from paceline.data.encoding.prepare import PreparedTokens, prepare_tokens
from paceline.data.kinds.label import (
    ClassTransform,
    LabeledSample,
    LabelKind,
    class_names,
    read_labels,
)
from paceline.data.text.token_dataset import TokenDataset
from paceline.models.builtin import resolve_model
from paceline.models.classifiers.texts import class_settings, known_classes
from paceline.models.kinds import HeadSettings
from paceline.tasks.base import Notice, Prepared
from paceline.tasks.sequence_classifier import PaddedTexts, SequenceClassifierTask
from paceline.tasks.token_ids import check_token_ids


@dataclass(frozen=True)
class LabeledTexts:
    """The tokenized texts and their classes.

    Args:
        classes: names of the classes, by number.
        is_multi: whether a text may have several classes.
        train_numbers, eval_numbers: the class of each label in the cache entries.
    """

    tokens: PreparedTokens
    classes: list[str]
    is_multi: bool
    train_numbers: list[int]
    eval_numbers: list[int]


class TextBatch(PaddedTexts):
    """Texts with ``token_type_ids``, int64 [texts, longest].

    ``targets`` has the class of each text, int64 [texts], or 1 for each of its classes, float32
    [texts, num_classes].
    """

    token_type_ids: torch.Tensor
    targets: torch.Tensor


class TextClassifyTask(SequenceClassifierTask):
    """Trains a text classifier of Hugging Face, in full or with LoRA.

    The loss is the cross entropy in nats, summed over texts. If a text may have several classes, it
    is the mean binary cross entropy over the classes, summed over texts.
    """

    unit = "texts"
    gathers = ("predictions", "targets")

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.default_learning_rate = 1e-3 if config.model.startswith("builtin:") else 2e-5
        if config.lora.enable:
            self.default_learning_rate = 1e-4

    @property
    def _tokens(self) -> PreparedTokens:
        texts: LabeledTexts = self._handle
        return texts.tokens

    @property
    def _head_settings(self) -> HeadSettings:
        texts: LabeledTexts = self._handle
        return class_settings(texts.classes, texts.is_multi)

    def prepare(self) -> Prepared:
        """Tokenize the texts, or find them in the token cache, and number the classes.

        Raises:
            ConfigError: the data, the tokenizer or the labels are invalid.
        """
        tokens = prepare_tokens(self.config, "classify", resolve_model, self.num_prepare_workers)
        check_token_ids(self.config, tokens)
        stored = read_labels(tokens.train_folder)
        known = self.config.classify.labels or known_classes(self.config.model)
        classes = class_names(stored, known)
        if self.config.classify.labels and classes != self.config.classify.labels:
            stored.numbers(self.config.classify.labels, "dataset")  # raises: a label is missing
        evaluation = read_labels(tokens.eval_folder) if tokens.eval_folder else stored
        if evaluation.is_multi != stored.is_multi:
            raise ConfigError(
                "`val_dataset` and `dataset` differ: only one of them has lists of labels",
                code="different-label-lists",
                fix="give each row a list of labels in both",
            )
        texts = LabeledTexts(
            tokens,
            classes,
            stored.is_multi,
            stored.numbers(classes, "dataset"),
            evaluation.numbers(classes, "val_dataset"),
        )
        return Prepared(
            num_train=tokens.num_train,
            num_eval=tokens.num_eval,
            counts=tokens.counts,
            train_tokens=tokens.train_tokens,
            notices=[*tokens.notices, _class_notice(texts)],
            fingerprint=key_of([tokens.train_folder.name, tokens.num_train, classes]),
            handle=texts,
        )

    def build_datasets(self) -> tuple[Any, Any | None]:
        texts: LabeledTexts = self._handle
        tokens = texts.tokens
        columns = LabelKind.columns
        classes = ClassTransform(texts.train_numbers)
        train = TokenDataset(tokens.train_folder, tokens.train_indices, columns, classes)
        if tokens.eval_folder is None:
            return train, None
        classes = ClassTransform(texts.eval_numbers)
        return train, TokenDataset(tokens.eval_folder, tokens.eval_indices, columns, classes)

    def collate(self, samples: Sequence[LabeledSample]) -> TextBatch:
        texts: LabeledTexts = self._handle
        ids = [sample["input_ids"] for sample in samples]
        targets: np.ndarray
        if texts.is_multi:
            targets = np.zeros((len(samples), len(texts.classes)), dtype=np.float32)
            for row, sample in enumerate(samples):
                targets[row, sample["classes"]] = 1
        else:
            targets = np.array([sample["classes"][0] for sample in samples], dtype=np.int64)
        types = [sample["labels_mask"].astype(np.int64) for sample in samples]
        return {
            **self._padded(ids),
            "token_type_ids": torch.from_numpy(pad_tokens(types, 0)),
            "targets": torch.from_numpy(targets),
        }

    def loss(self, model: nn.Module, batch: TextBatch) -> torch.Tensor:
        smoothing = self.config.train_args.label_smoothing_factor
        return self._loss(self._logits(model, batch), batch["targets"], smoothing)

    def _loss(
        self, logits: torch.Tensor, targets: torch.Tensor, smoothing: float = 0.0
    ) -> torch.Tensor:
        if not targets.is_floating_point():
            return functional.cross_entropy(
                logits, targets, reduction="sum", label_smoothing=smoothing
            )
        targets = targets * (1 - smoothing) + smoothing / 2
        each = functional.binary_cross_entropy_with_logits(logits, targets, reduction="none")
        return each.mean(dim=-1).sum()

    def evaluate(self, model: nn.Module, batch: TextBatch) -> dict[str, torch.Tensor]:
        """Return the sum of the loss and of ``accuracy`` (number of texts whose classes are all
        correct), and the predicted and the correct classes."""
        logits, targets = self._logits(model, batch), batch["targets"]
        is_multi = targets.is_floating_point()
        predictions = (logits > 0).float() if is_multi else logits.argmax(dim=-1)
        correct = predictions == targets
        return {
            "loss": self._loss(logits, targets),
            "accuracy": (correct.all(dim=-1) if is_multi else correct).sum(),
            "predictions": predictions,
            "targets": targets,
        }

    def metric_names(self, prepared: Prepared) -> list[str]:
        names = ["loss", "accuracy", "f1"]
        return [*names, "f1_micro"] if prepared.handle.is_multi else names

    def metrics(self, gathered: dict[str, torch.Tensor]) -> dict[str, float]:
        """Return the F1 scores of the validation set: ``f1``, the mean over the classes that occur
        or are predicted, and with several classes per text ``f1_micro``, over all decisions."""
        texts: LabeledTexts = self._handle
        size = len(texts.classes)
        predictions, targets = gathered["predictions"].long(), gathered["targets"].long()
        if texts.is_multi:
            predictions, targets = predictions.view(-1, size), targets.view(-1, size)
        else:
            predictions = functional.one_hot(predictions, size)
            targets = functional.one_hot(targets, size)
        hits = (predictions * targets).sum(dim=0).double()
        totals = (predictions + targets).sum(dim=0).double()  # 2 · hits + misses + false alarms
        occurs = totals > 0
        scores = {"f1": float((2 * hits[occurs] / totals[occurs]).mean())}
        if texts.is_multi:
            scores["f1_micro"] = float(2 * hits.sum() / totals.sum().clamp(min=1))
        return scores


def _class_notice(texts: LabeledTexts) -> Notice:
    shown = ", ".join(texts.classes[:8]) + (" …" if len(texts.classes) > 8 else "")
    several = "; a text may have several" if texts.is_multi else ""
    return "info", UserText(
        "{num_classes} classes: {shown}{several}",
        code="text-classes",
        num_classes=len(texts.classes),
        shown=shown,
        several=several,
    )
