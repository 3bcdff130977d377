"""The samples of the packed row that a thread's forward pass computes.

Many blocks do not pass the lengths of the samples on to their layers, so the layers find them
here.
"""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline.data.collate import SegmentInputs

#: An argument of a model.
ModelInput = torch.Tensor | tuple[int, ...] | int | None
#: ``segments``: the samples of the row, while the forward pass of a model with packed rows runs.
_forward = threading.local()
#: Attribute of a language model with :func:`pass_segments`.
_PASSES = "_paceline_passes_segments"


def current_segments() -> SegmentInputs | None:
    """Return the samples of the row that this thread computes, or None if the row is not packed."""
    return getattr(_forward, "segments", None)


def follow_rows(model: nn.Module) -> Callable[[], None]:
    """Let the layers of a model find the samples of the row that the model is called with.

    These are hooks, because transformers reads the arguments of the model's ``forward``.

    Returns:
        A function that removes the hooks.
    """
    enter = model.register_forward_pre_hook(_enter, with_kwargs=True)
    leave = model.register_forward_hook(_leave, always_call=True)

    def remove() -> None:
        enter.remove()
        leave.remove()

    return remove


def pass_segments(decoder: nn.Module) -> None:
    """Let the language model of a vision-language model find the samples of the row of
    :func:`with_segments` among its arguments. As arguments of the full model, they would reach the
    vision tower, too, which has arguments of the same names for its images."""
    if not getattr(decoder, _PASSES, False):
        setattr(decoder, _PASSES, True)
        decoder.register_forward_pre_hook(_add_segments, with_kwargs=True)


def _add_segments(
    decoder: nn.Module, args: tuple[object, ...], inputs: dict[str, ModelInput]
) -> tuple[tuple[object, ...], dict[str, ModelInput]] | None:
    segments = current_segments()
    if segments is None:
        return None
    lengths: Any = segments
    return args, {**inputs, **lengths}


def kept_for_backward(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that finds the samples of this thread's row whenever it is called: backward
    may call it again later, in another thread."""
    segments = current_segments()
    return function if segments is None else partial(with_segments, segments, function)


def with_segments(
    segments: SegmentInputs, function: Callable[..., Any], *args: Any, **inputs: Any
) -> Any:
    """Call a function whose layers find the samples of a row."""
    before, _forward.segments = current_segments(), segments
    try:
        return function(*args, **inputs)
    finally:
        _forward.segments = before


def _enter(model: nn.Module, args: tuple[object, ...], inputs: Any) -> None:
    lengths = inputs.get("segment_lengths")
    if lengths is None:  # not packed, or the caller has set the samples
        return
    _forward.segments = SegmentInputs(
        segment_lengths=lengths,
        cu_seqlens=inputs["cu_seqlens"],
        max_seqlen=inputs["max_seqlen"],
    )


def _leave(model: nn.Module, args: tuple[object, ...], result: object) -> None:
    _forward.segments = None
