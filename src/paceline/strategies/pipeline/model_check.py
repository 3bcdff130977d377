"""Checks whether a model can run as a pipeline, before it is partitioned: from its modules, and
from a traced forward over made-up tokens, a made-up image, or a sample of the task."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline.core.errors import ConfigError
from paceline.models.shape.trace import BETWEEN, INSIDE, Trace, trace_model


def check_blocks(
    model: nn.Module,
    blocks: list[tuple[str, nn.Module]],
    run: Callable[[nn.Module], object] | None = None,
) -> tuple[list[Callable[[torch.Tensor], Any]], Trace | None]:
    """Trace a model and check that it can be split into stages.

    Args:
        run: a forward of the task, for models whose inputs are not known here.

    Returns:
        For each block, a function that brings hidden states into the form of the block's output (a
        tensor, or a tuple that begins with one); and the trace, None if the inputs are unknown.

    Raises:
        ConfigError: the model cannot be split into stages.
    """
    trace = trace_model(model, run)
    check_trace(model, blocks, trace)
    sizes = [0 if trace is None else trace.outputs[number] for number in range(len(blocks))]
    return [partial(_as_block_output, size) for size in sizes], trace


def check_trace(model: nn.Module, blocks: list[tuple[str, nn.Module]], trace: Trace | None) -> None:
    """Check that a traced model can be split into stages.

    Raises:
        ConfigError: the model cannot be split into stages.
    """
    if not blocks:
        raise _unsupported("it has no ModuleList or Sequential of blocks")
    container = model.get_submodule(blocks[0][0].rpartition(".")[0])
    if len(container) != len(blocks):  # type: ignore[arg-type]
        raise _unsupported("a block occurs several times in its list")
    if any(hasattr(module, "layers_are_rescaled") for module in model.modules()):
        # RWKV does so only when it changes between training and evaluation, so a trace of one
        # forward need not show it.
        raise _unsupported("its forward changes its own weights")
    if trace is None:
        return
    if trace.error is not None:
        raise _unsupported(f"a forward to find the order of its modules failed ({trace.error})")
    if trace.order != list(range(len(blocks))):
        raise _unsupported(f"its {len(blocks)} blocks run in the order {trace.order[:12]}")
    if trace.altered:
        raise _unsupported(
            f"the input of block {trace.altered[0]} is not the output of the block before it"
        )
    if trace.written:
        raise _unsupported(f"its forward changes its own weights (`{trace.written[0]}`)")
    for phase, place in ((INSIDE, "inside its blocks"), (BETWEEN, "between two blocks")):
        names = [name for name, phases in trace.phases.items() if phase in phases]
        if names:
            raise _unsupported(f"`{names[0]}` lies outside the blocks and is used {place}")


def check_bypasses(trace: Trace | None, num_first_blocks: int) -> None:
    """Check that the stages after the first need only the hidden states of the stage before.

    Args:
        num_first_blocks: number of blocks of the first stage.

    Raises:
        ConfigError: a later stage uses another value that is computed before the blocks.
    """
    later = [number for number in trace.bypassing if number >= num_first_blocks] if trace else []
    if later:
        raise _unsupported(
            f"its embeddings reach block {min(later)} and the blocks after it other than through"
            " the blocks before, and only the output of a block is sent to the next stage"
        )


def _unsupported(reason: str) -> ConfigError:
    return ConfigError(
        "`parallel.pipeline` is not supported with this model: {reason}",
        code="not-a-pipeline",
        allowed="a model with one ModuleList or Sequential of blocks that run in order, each once",
        fix="use a mode that keeps the order of layers, such as `parallel.mode: zero3` or `tensor`",
        reason=reason,
    )


def _as_block_output(size: int, hidden: torch.Tensor) -> Any:
    """Return ``hidden`` as a tuple with ``size`` entries, or as it is if ``size`` is 0."""
    return (hidden, *[None] * (size - 1)) if size else hidden
