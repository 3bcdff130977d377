"""What the tasks have in common that train a model with a classification head on texts."""

import inspect
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch
from torch import nn

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.data.collate import pad_tokens
from paceline.data.encoding.prepare import PreparedTokens
from paceline.data.sources.resolve import check_hub_sources
from paceline.models import attention
from paceline.models.adapters.check import check_adapters
from paceline.models.blocks import base_model
from paceline.models.classifiers.texts import load_text_classifier
from paceline.models.files import check_files, check_hub
from paceline.models.kinds import HeadSettings, save_classes
from paceline.models.language import save_language_model
from paceline.models.notices import model_notices
from paceline.tasks.base import Notice, Task


class PaddedTexts(TypedDict):
    """Texts padded on the right: ``input_ids`` and ``attention_mask`` int64 [texts, longest]."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    num_tokens: int


class SequenceClassifierTask(Task):
    """Trains a model of transformers for sequence classification, in full or with LoRA."""

    packed = False
    tokenizes = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._has_types = False

    @property
    @abstractmethod
    def _tokens(self) -> PreparedTokens:
        """The tokenized data."""

    @property
    @abstractmethod
    def _head_settings(self) -> HeadSettings:
        """What the model's config says about its head."""

    def check(self) -> None:
        task = f"`task: {self.config.task}`"
        if self.config.train_args.packing is True:
            raise ConfigError(
                "`train_args.packing: true` is not supported with {task}: rows are padded to the"
                " longest text of a micro-batch",
                code="packing-with-task",
                fix="leave `train_args.packing` out",
                task=task,
            )
        if self.config.train_args.neftune_noise_alpha is not None:
            raise ConfigError(
                "`train_args.neftune_noise_alpha` is not supported with {task}: only causal"
                " language models are trained with noise",
                code="noise-with-task",
                fix="leave `train_args.neftune_noise_alpha` out",
                task=task,
            )
        if self.config.streaming is True:
            raise ConfigError(
                "`streaming: true` is not supported with {task} on texts: the classes are known"
                " once all rows have been read",
                code="streaming-with-task",
                fix="leave `streaming` out",
                task=task,
            )
        check_adapters(self.config)
        check_files(self.config)
        check_hub(self.config)
        check_hub_sources(self.config)

    def build_model(self) -> nn.Module:
        return load_text_classifier(self.config, self._head_settings, self._tokens.pad_token_id)

    def setup(self, model: nn.Module) -> list[Notice]:
        base = base_model(model)
        parameters = inspect.signature(base.forward).parameters
        num_types = int(getattr(base.config, "type_vocab_size", 0) or 0)
        self._has_types = "token_type_ids" in parameters and num_types > 1
        attention.install_requested(base, self.config)
        return model_notices(model, self.config)

    def num_tokens(self, batch: Any) -> int:
        return int(batch["num_tokens"])

    def _padded(self, texts: Sequence[np.ndarray]) -> PaddedTexts:
        return {
            "input_ids": torch.from_numpy(pad_tokens(texts, self._tokens.pad_token_id)),
            "attention_mask": torch.from_numpy(pad_tokens(map(np.ones_like, texts), 0)),
            "num_tokens": sum(map(len, texts)),
        }

    def _logits(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return the logits, float32 [texts, num_labels]."""
        inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
        if self._has_types and "token_type_ids" in batch:
            inputs["token_type_ids"] = batch["token_type_ids"]
        with attention.known_padding(batch["attention_mask"], batch["num_tokens"]):
            logits: torch.Tensor = model(**inputs).logits
        return logits.float()

    def save_model(self, model: nn.Module, folder: Path) -> None:
        """Write the model with the settings of its head, and the tokenizer, as transformers (or,
        with adapters, peft) loads them."""
        tokenizer = None if self.prepared is None else self._tokens.tokenizer_path
        save_language_model(model, tokenizer, folder)
        if self.config.lora.enable and self.prepared is not None:
            save_classes(self._head_settings, folder)
