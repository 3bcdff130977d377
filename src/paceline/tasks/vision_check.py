"""Check a vision-language model of a type that is not tested, on its first batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from paceline.config.schema import Config
from paceline.core.errors import ConfigError, first_line
from paceline.core.texts import UserText
from paceline.data.collate import TokenBatch, map_tensors
from paceline.data.text.token_dataset import TokenSample
from paceline.distributed import torch_compat
from paceline.models import attention
from paceline.models.blocks import base_model, evaluation_mode
from paceline.models.vision.parts import Part, roots_of
from paceline.tasks.base import Notice

_ERRORS = (TypeError, ValueError, RuntimeError, KeyError, IndexError, AttributeError)
#: Largest relative difference of the losses, with weights in float32 and in 16 bits.
_TOLERANCE, _LOW_TOLERANCE = 1e-4, 2e-2


class _VisionTask(Protocol):
    """What the check needs of a task."""

    config: Config

    def collate(self, samples: Sequence[TokenSample]) -> TokenBatch: ...

    def padded_batch(self, samples: Sequence[TokenSample]) -> TokenBatch: ...

    def count(self, batch: TokenBatch) -> float: ...

    def loss(self, model: Any, batch: TokenBatch) -> Any: ...

    def _inputs(self, batch: TokenBatch) -> Any: ...


def check_untested(
    task: _VisionTask, model: Any, name: str, samples: Sequence[TokenSample]
) -> Notice:
    """Compare the loss of a batch with the model's own loss on padded rows. Its tokens and pixels
    were compared with the processor's tokens and pixels when the chats were tokenized.

    Args:
        name: the type of the model.
        samples: the batch; empty if no sample has images.

    Returns:
        What was compared, and the parts of the model.

    Raises:
        ConfigError: the model cannot compute the batch, or its loss differs.
    """
    roots = roots_of(base_model(model))
    compared = "no row has an image, so nothing was compared with transformers"
    if samples:
        _compare_losses(task, model, name, samples)
        compared = "tokens, pixels and loss of the first rows with images equal transformers'"
    text = UserText(
        "model: `model_type: {type}` is not one of the tested vision-language models; {compared}."
        " Vision tower: {tower}; projector: {projector}; language model: {language}",
        code="vision-language-type-untested",
        type=name,
        compared=compared,
        tower=", ".join(roots[Part.TOWER]) or "none",
        projector=", ".join(roots[Part.PROJECTOR]) or "none",
        language=", ".join(roots[Part.LANGUAGE]),
    )
    return "warning", text


def _compare_losses(
    task: _VisionTask, model: Any, name: str, samples: Sequence[TokenSample]
) -> None:
    first = next(model.parameters())
    batch, padded = (
        map_tensors(collate(samples), lambda tensor: tensor.to(first.device))
        for collate in (task.collate, task.padded_batch)
    )
    labels = torch.full_like(padded["input_ids"], -100)
    labels[:, padded["keep"] + 1] = padded["targets"]
    args = task.config.train_args
    low = args.mixed_dtype
    try:
        with (
            evaluation_mode(model),
            torch.no_grad(),
            torch.autocast(
                first.device.type,
                dtype=getattr(torch, low or "bfloat16"),
                enabled=low is not None,
            ),
        ):
            loss = task.loss(model, batch) / int((batch["targets"] != -100).sum())
            with attention.without_packing(base_model(model)):
                own_loss = model(**task._inputs(padded), labels=labels).loss
    except _ERRORS as error:
        raise _unsupported(
            name, f"it cannot compute the first batch: {first_line(error)}"
        ) from error
    if not torch_compat.has_values(loss):
        return
    is_exact = low is None and first.dtype == torch.float32
    tolerance = _TOLERANCE if is_exact else _LOW_TOLERANCE
    difference = abs(float(loss) - float(own_loss))
    if not difference <= tolerance * max(1.0, abs(float(own_loss))):
        raise _unsupported(
            name,
            f"the loss of the first batch is {float(loss):.6g}, and the model's own loss is"
            f" {float(own_loss):.6g}",
        )


def _unsupported(name: str, reason: str) -> ConfigError:
    return ConfigError(
        "the vision-language model (`model_type: {type}`) cannot be trained: {reason}",
        code="vision-language-type-differs",
        fix="choose another model; or train on rows without images",
        type=name,
        reason=reason,
    )
