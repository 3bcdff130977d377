"""`task: classify`: image classification."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.core.texts import UserText
from paceline.data.cache import key_of
from paceline.data.clicks.log import exact_auc
from paceline.data.counts import DataCounts
from paceline.data.encoding.prepare import split_indices, split_notice
from paceline.data.image_shards import ImageIndex
from paceline.data.images import DIGITS, ImageDataset, ImageForm, open_images
from paceline.models.blocks import BATCH_NORMS
from paceline.models.classifiers import images as image_models
from paceline.tasks.base import Notice, Prepared, Task, dropped_notice, language_settings_notices

#: With more classes, the probabilities of all images would take too much memory.
_MAX_AUC_CLASSES = 100


@dataclass(frozen=True)
class ClassifyData:
    """The images, and the size, channels and normalization that the model expects."""

    train: ImageIndex
    evaluation: ImageIndex | None
    form: ImageForm


class ClassifyTask(Task):
    """Trains an image classifier, built-in or from Hugging Face, on scikit-learn's digits or on a
    folder with one subfolder per class.

    The loss is cross entropy in nats, summed over images; validation adds the accuracy, the F1 and
    the AUC.
    """

    unit = "images"
    gathers = ("predicted", "label", "probabilities")

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.default_learning_rate = 1e-3 if image_models.is_builtin(config.model) else 2e-5

    def check(self) -> None:
        if self.config.lora.enable:
            raise ConfigError(
                "`lora.enable: true` is not supported with `task: {task}`: image models are"
                " trained in full",
                code="lora-with-task",
                fix="remove it",
                task="classify",
            )
        for key in ("dataset", "val_dataset"):
            if len(self.config.sources(validation=key == "val_dataset")) > 1:
                raise ConfigError(
                    "several sources in `{key}` are not supported with `task: classify`",
                    code="several-sources",
                    fix="put the images into one folder, with one subfolder per class",
                    key=key,
                )
        image_models.check_image_model(self.config)

    def prepare(self) -> Prepared:
        """Find the images and read their headers.

        Raises:
            ConfigError: there are no usable images, there is only one class, or the validation data
                have classes that the training data do not have.
        """
        seed, notices = self.config.train_args.seed, language_settings_notices(self.config)
        source = self.config.sources()[0].path
        index = open_images(source, seed)
        notices += index.notices
        if len(index.classes) < 2:
            raise ConfigError(
                "`dataset: {source}` has a single class, {classes}",
                code="single-class",
                allowed="at least two subfolders with images, one per class",
                source=source,
                classes=index.classes[0],
            )
        form, form_notices = image_models.find_form(self.config, digits=index.source == DIGITS)
        notices += form_notices
        counts = DataCounts(
            read=len(index) + sum(index.dropped.values()),
            kept=len(index),
            dropped=dict(index.dropped),
        )
        notices += _summary(source, index)
        train, evaluation = index, None
        if self.config.val_dataset is not None:
            evaluation = self._validation(index, seed, notices)
        elif self.config.split_dataset_ratio > 0:
            keep, held_out = split_indices(len(index), self.config.split_dataset_ratio, seed)
            train, evaluation = index.take(keep), index.take(held_out) if len(held_out) else None
            notices.append(
                split_notice(len(held_out), len(index), self.config.split_dataset_ratio, "image")
            )
        return Prepared(
            num_train=len(train),
            num_eval=0 if evaluation is None else len(evaluation),
            counts=counts,
            notices=notices,
            fingerprint=key_of(
                [train.fingerprint(), [form.channels, form.height, form.width, form.mean, form.std]]
            ),
            handle=ClassifyData(train, evaluation, form),
        )

    def _validation(self, train: ImageIndex, seed: int, notices: list[Notice]) -> ImageIndex:
        source = self.config.sources(validation=True)[0].path
        index = open_images(source, seed, validation=True)
        if (index.source == DIGITS) != (train.source == DIGITS):
            raise ConfigError(
                "`val_dataset: {source}` and `dataset` are not of the same kind",
                code="different-validation-kind",
                fix="give folders for both",
                source=source,
            )
        unknown = [name for name in index.classes if name not in train.classes]
        if unknown:
            raise ConfigError(
                "`val_dataset: {source}` has classes that training does not have: {unknown}",
                code="unknown-validation-class",
                allowed="the classes of `dataset`: {classes}",
                fix="give the subfolders the same names",
                source=source,
                unknown=", ".join(unknown[:5]),
                classes=", ".join(train.classes[:20]),
            )
        missing = [name for name in train.classes if name not in index.classes]
        if missing:
            names = ", ".join(missing[:5])
            text = UserText(
                "validation: {source} has no images of {num_missing} class(es): {names}",
                code="classes-missing-in-validation",
                source=source,
                num_missing=len(missing),
                names=names,
            )
            notices.append(("warning", text))
        notices += index.notices + _summary(source, index)
        number = np.array([train.classes.index(name) for name in index.classes], dtype=np.int64)
        return replace(index, labels=number[index.labels], classes=train.classes)

    def build_datasets(self) -> tuple[Any, Any | None]:
        handle: ClassifyData = self._handle
        train = ImageDataset(handle.train, handle.form, augment=self.config.classify.augment)
        if handle.evaluation is None:
            return train, None
        return train, ImageDataset(handle.evaluation, handle.form)

    def build_model(self) -> nn.Module:
        handle: ClassifyData = self._handle
        return image_models.load_image_model(self.config, handle.form, handle.train.classes)

    def setup(self, model: nn.Module) -> list[Notice]:
        num_norms = sum(
            isinstance(module, BATCH_NORMS) and module.track_running_stats
            for module in model.modules()
        )
        if not num_norms:
            return []
        text = UserText(
            "the model has {num_norms} batch normalizations: their statistics are over a"
            " micro-batch of one rank, so the result depends on the number of ranks and on"
            " accumulation",
            code="batch-normalization",
            num_norms=num_norms,
        )
        return [("warning", text)]

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return the cross entropy in nats, summed over the images. ``batch`` is (images [N, C, H,
        W], classes int64 [N])."""
        images, labels = batch
        logits = image_models.logits_of(model(images)).float()
        smoothing = self.config.train_args.label_smoothing_factor
        return functional.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        """Return sums over the images: ``loss`` (cross entropy in nats) and ``accuracy`` (number of
        images whose most likely class is correct), and of each image the classes ``predicted`` and
        ``label`` and, with up to 100 classes, the ``probabilities`` of all classes."""
        images, labels = batch
        logits = image_models.logits_of(model(images)).float()
        predicted = logits.argmax(dim=-1)
        results = {
            "loss": functional.cross_entropy(logits, labels, reduction="sum"),
            "accuracy": (predicted == labels).sum(),
            "predicted": predicted,
            "label": labels,
        }
        if logits.shape[-1] <= _MAX_AUC_CLASSES:
            results["probabilities"] = logits.softmax(dim=-1)
        return results

    def metric_names(self, prepared: Prepared) -> list[str]:
        names = ["loss", "accuracy", "f1"]
        num_classes = len(prepared.handle.train.classes)
        return [*names, "auc"] if num_classes <= _MAX_AUC_CLASSES else names

    def metrics(self, gathered: dict[str, torch.Tensor]) -> dict[str, float]:
        """Return ``f1``, the mean of the F1 of the classes that occur or are predicted, and with up
        to 100 classes ``auc``: with two, the probability that an image of the second class has a
        higher score for it than one of the first; with more, the mean over the classes that occur
        of this probability for one class and all others."""
        predicted, labels = gathered["predicted"].long(), gathered["label"].long()
        num_classes = len(self._handle.train.classes)
        hits = torch.bincount(labels[predicted == labels], minlength=num_classes)
        totals = torch.bincount(torch.cat([predicted, labels]), minlength=num_classes)
        occurs = totals > 0
        scores = {"f1": float((2 * hits[occurs] / totals[occurs]).mean())}
        if num_classes <= _MAX_AUC_CLASSES:
            scores["auc"] = _mean_auc(labels, gathered["probabilities"].view(-1, num_classes))
        return scores

    def save_model(self, model: nn.Module, folder: Path) -> None:
        """Write the weights, the input format and the class names, so that
        :func:`paceline.models.classifiers.images.load_classifier` can load the model."""
        handle: ClassifyData = self._handle
        image_models.save_image_model(model, self.config, handle.form, handle.train.classes, folder)


def _mean_auc(labels: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Return the area under the ROC curve; the mean over the classes if there are more than two."""
    numbers = [1] if probabilities.shape[1] == 2 else labels.unique().tolist()
    areas = [
        exact_auc((labels == number).numpy(), probabilities[:, number].numpy())
        for number in numbers
    ]
    return float(np.mean(areas))


def _summary(name: str, index: ImageIndex) -> list[Notice]:
    notices: list[Notice] = [
        (
            "info",
            UserText(
                "{name}: {num_index} images of {num_classes} classes",
                code="images-and-classes",
                name=name,
                num_index=f"{len(index):,}",
                num_classes=len(index.classes),
            ),
        )
    ]
    if index.dropped:
        notices.append(dropped_notice(name, index.dropped, "files"))
    return notices
