"""Find out in which layers of a model the samples of a row mix."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline.core.errors import first_line
from paceline.core.texts import UserText
from paceline.data.collate import find_tensors

#: What the forward pass of a model may raise on a row that it does not support.
ROW_ERRORS = (
    TypeError,
    ValueError,
    RuntimeError,
    AssertionError,
    LookupError,
    AttributeError,
)
#: Largest difference of equal values in float32, relative to the largest value.
TOLERANCE = 1e-4
#: The same in 16 bits.
_LOW_TOLERANCE = 2e-2


def not_computed(error: Exception) -> UserText:
    """Return that a model raised an error on a row."""
    return UserText(
        "it cannot compute such a row ({error})", code="row-not-computed", error=first_line(error)
    )


@dataclass(frozen=True)
class _Call:
    """A call of a module.

    Args:
        kind: class of the module.
        values: for each tensor with one row of tokens, the first input and the output.
    """

    kind: str
    values: tuple[torch.Tensor, torch.Tensor]


def explain_mixing(model: Any, samples: Sequence[Any], row: Any) -> UserText:
    """Return why a model computes samples in one row differently from separate samples.

    Args:
        samples: arguments of the model for each sample in a row of its own.
        row: arguments of the model for all samples in one row.
    """
    try:
        packed = _calls(model, row)
    except ROW_ERRORS as error:
        return not_computed(error)
    separate = [_calls(model, sample) for sample in samples]
    if any(len(calls) != len(packed) for calls in separate):
        packed = []
    # A module is listed after the modules inside it.
    for number, call in enumerate(packed):
        of_samples = [calls[number].values for calls in separate]
        before, after = (
            rows_agree(values[0], values[1:])
            for values in zip(call.values, *of_samples, strict=True)
        )
        if before and not after:
            return UserText(
                "in its layers {layer}, a token depends on the samples before its own",
                code="layer-mixes-samples",
                layer=call.kind,
            )
    return UserText("a token depends on the samples before its own", code="model-mixes-samples")


def _calls(model: Any, inputs: Any) -> list[_Call]:
    """Return the calls of modules with rows of tokens during a forward pass, in the order in which
    they ended. Vision towers are left out: they run only for samples with images."""
    tokens = inputs["input_ids"].shape[1]
    calls: list[_Call] = []
    with _recorded(model.get_decoder(), tokens, calls):
        model(**inputs)
    return calls


@contextmanager
def _recorded(model: nn.Module, tokens: int, calls: list[_Call]) -> Iterator[None]:
    def record(module: nn.Module, args: tuple[Any, ...], inputs: Any, result: Any) -> None:
        values = tuple(_first_row(part, tokens) for part in ((args, inputs), result))
        if values[0] is not None and values[1] is not None:
            calls.append(_Call(type(module).__name__, (values[0], values[1])))

    hooks = [
        module.register_forward_hook(partial(record), with_kwargs=True)
        for module in model.modules()
        if module is not model and any(True for _ in module.parameters())
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _first_row(values: Any, tokens: int) -> torch.Tensor | None:
    """Return the first tensor [1, tokens, …] in nested values."""
    for tensor in find_tensors(values):
        if tensor.shape[:2] == (1, tokens):
            return tensor.detach()
    return None


def rows_agree(row: torch.Tensor, samples: Sequence[torch.Tensor]) -> bool:
    """Return whether a row [1, tokens, …] equals the separate rows of its samples up to rounding,
    relative to its largest value."""
    separate = torch.cat(list(samples), dim=1)
    if separate.shape != row.shape:
        return False
    tolerance = TOLERANCE if row.dtype == torch.float32 else _LOW_TOLERANCE
    difference = (row.float() - separate.float()).abs().max()
    return bool(difference <= tolerance * separate.float().abs().max())
