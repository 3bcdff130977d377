"""`task: classify`: images into classes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config.schema import Config
from paceline.config.schema.train_args import TrainArgs
from paceline.core.errors import ConfigError
from paceline.data.counts import DataCounts
from paceline.models import vision
from paceline.models.blocks import BATCH_NORMS
from paceline.tasks.base import Prepared, Task

if TYPE_CHECKING:
    import torch
    from torch import nn

    from paceline.data.images import ImageForm, ImageIndex

#: Settings that mean something for language models alone.
_LANGUAGE_KEYS = ("tokenizer", "format", "system", "chat_template")
_LANGUAGE_ARGS = ("max_length", "overlong", "packing", "train_on_inputs", "train_on_turns")


@dataclass(frozen=True)
class ClassifyData:
    """The images found, and the form that the model takes them in."""

    train: ImageIndex
    evaluation: ImageIndex | None
    form: ImageForm


class ClassifyTask(Task):
    """An image classifier, built-in or Hugging Face's, on scikit-learn's digits or on a folder with
    a subfolder a class.

    The loss is cross entropy in nats, summed over images; validation gives the accuracy too.
    """

    unit = "images"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.default_learning_rate = 1e-3 if vision.is_builtin(config.model) else 2e-5

    def check(self) -> None:
        if self.config.lora.enable:
            raise ConfigError(
                "`lora.enable: true` does not go with `task: classify`",
                fix="take it out: image models are trained in full",
            )
        for key in ("dataset", "val_dataset"):
            if len(self.config.sources(validation=key == "val_dataset")) > 1:
                raise ConfigError(
                    f"`{key}` names several sources, and `task: classify` takes one",
                    fix="put the images below one folder, in one subfolder a class",
                )
        vision.check_image_model(self.config)

    def prepare(self) -> Prepared:
        """Find the images and read their headers.

        Raises:
            ConfigError: no usable data, one class only, or validation classes that training does
                not have.
        """
        from paceline.data.cache import key_of
        from paceline.data.images import DIGITS, open_images
        from paceline.data.text.prepare import split_indices, split_notice

        seed, notices = self.config.train_args.seed, _ignored(self.config)
        found = open_images(self.config.sources()[0].path, seed)
        notices += found.notices
        if len(found.classes) < 2:
            raise ConfigError(
                f"`dataset: {self.config.sources()[0].path}` has one class only"
                f" ({found.classes[0]}): there is nothing to tell apart",
                allowed="two or more subfolders with images, one a class",
            )
        form, about = vision.find_form(self.config, digits=found.source == DIGITS)
        notices += about
        counts = DataCounts(
            read=len(found) + sum(found.dropped.values()),
            kept=len(found),
            dropped=dict(found.dropped),
        )
        notices += _about(self.config.sources()[0].path, found)
        train, evaluation = found, None
        if self.config.val_dataset is not None:
            evaluation = self._validation(found, seed, notices)
        elif self.config.split_dataset_ratio > 0:
            keep, held_out = split_indices(len(found), self.config.split_dataset_ratio, seed)
            train, evaluation = found.take(keep), found.take(held_out) if len(held_out) else None
            notices.append(
                split_notice(len(held_out), len(found), self.config.split_dataset_ratio, "image")
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

    def _validation(
        self, train: ImageIndex, seed: int, notices: list[tuple[str, str]]
    ) -> ImageIndex:
        from dataclasses import replace

        import numpy as np

        from paceline.data.images import DIGITS, open_images

        name = self.config.sources(validation=True)[0].path
        found = open_images(name, seed)
        if (found.source == DIGITS) != (train.source == DIGITS):
            raise ConfigError(
                f"`val_dataset: {name}` and `dataset` are not of one kind",
                fix="take both from folders",
            )
        unknown = [one for one in found.classes if one not in train.classes]
        if unknown:
            raise ConfigError(
                f"`val_dataset: {name}` has classes that training has not:"
                f" {', '.join(unknown[:5])}",
                allowed=f"the classes of `dataset`: {', '.join(train.classes[:20])}",
                fix="give the subfolders the same names",
            )
        missing = [one for one in train.classes if one not in found.classes]
        if missing:
            notices.append(
                (
                    "warning",
                    (
                        f"validation: {name} has no image of {len(missing)} class(es):"
                        f" {', '.join(missing[:5])}"
                    ),
                )
            )
        notices += found.notices + _about(name, found)
        number = np.array([train.classes.index(one) for one in found.classes], dtype=np.int64)
        return replace(found, labels=number[found.labels], classes=train.classes)

    def build_datasets(self) -> tuple[Any, Any | None]:
        from paceline.data.images import ImageDataset

        handle = self._handle()
        train = ImageDataset(handle.train, handle.form, augment=self.config.classify.augment)
        return train, (
            None if handle.evaluation is None else ImageDataset(handle.evaluation, handle.form)
        )

    def build_model(self) -> nn.Module:
        handle = self._handle()
        return vision.load_image_model(self.config, handle.form, handle.train.classes)

    def setup(self, model: nn.Module) -> list[tuple[str, str]]:
        norms = sum(
            isinstance(one, BATCH_NORMS) and one.track_running_stats for one in model.modules()
        )
        if not norms:
            return []
        text = (
            f"the model has {norms} batch normalisations: their statistics are over a micro-batch"
            " of one rank, so the result depends on the number of ranks and on accumulation"
        )
        return [("warning", text)]

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Cross entropy in nats, summed over the images. ``batch``: images [N, C, H, W] and classes
        int64 [N]."""
        from torch.nn import functional

        images, labels = batch
        return functional.cross_entropy(
            vision.logits_of(model(images)).float(), labels, reduction="sum"
        )

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        """Sums over the images: ``loss`` (cross entropy in nats) and ``accuracy`` (images whose
        likeliest class is right)."""
        from torch.nn import functional

        images, labels = batch
        logits = vision.logits_of(model(images)).float()
        right = (logits.argmax(dim=-1) == labels).sum()
        return {
            "loss": functional.cross_entropy(logits, labels, reduction="sum"),
            "accuracy": right,
        }

    def save_model(self, model: nn.Module, folder: Path) -> None:
        """Weights, form and class names; :func:`paceline.models.vision.load_classifier` reads them
        back."""
        handle = self._handle()
        vision.save_image_model(model, self.config, handle.form, handle.train.classes, folder)

    def _handle(self) -> ClassifyData:
        assert self.prepared is not None, "the engine sets `prepared` before the datasets are built"
        handle: ClassifyData = self.prepared.handle
        return handle


def _about(name: str, found: ImageIndex) -> list[tuple[str, str]]:
    notices = [("info", f"{name}: {len(found):,} images of {len(found.classes)} classes")]
    if found.dropped:
        each = "; ".join(
            f"{reason}: {number:,}" for reason, number in sorted(found.dropped.items())
        )
        notices.append(
            ("warning", f"{name}: {sum(found.dropped.values()):,} files left out ({each})")
        )
    return notices


def _ignored(config: Config) -> list[tuple[str, str]]:
    """A notice for each setting that was changed and means nothing here."""
    defaults = TrainArgs()
    named = [
        key for key in _LANGUAGE_KEYS if getattr(config, key) != Config.model_fields[key].default
    ]
    named += [
        f"train_args.{key}"
        for key in _LANGUAGE_ARGS
        if getattr(config.train_args, key) != getattr(defaults, key)
    ]
    for source in config.sources() + config.sources(validation=True):
        named += [
            f"dataset.{key}"
            for key in ("columns", "name", "ignore_columns", "roles")
            if getattr(source, key)
        ]
    return [("warning", f"`{key}` has no effect on `task: classify`") for key in named]
