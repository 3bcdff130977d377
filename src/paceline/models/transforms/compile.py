"""Compile the blocks of a model with torch.compile, one graph for all blocks of a kind."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline.config.schema.train_args import TrainArgs
from paceline.distributed import torch_compat
from paceline.distributed.timing.progress import PROGRESS
from paceline.models.blocks import base_model, find_blocks, wrap_forward

#: Inputs of blocks whose values change in each micro-batch. A graph would be compiled for each.
_HIDDEN_INPUTS = ("segment_lengths", "max_seqlen")
#: Attribute of a model whose blocks are compiled.
_COMPILED = "_paceline_is_compiled"


@dataclass
class CompileTimes:
    """The compilations of this process.

    Args:
        count: number of graphs compiled, forward and backward separately.
        seconds: time that they took.
        num_expected: number of graphs compiled in the first two steps; later ones are
            recompilations.
    """

    count: int = 0
    num_expected: int = 0
    seconds: float = 0.0
    _started_at: float = 0.0
    _phase: str = ""

    @property
    def recompilations(self) -> int:
        return self.count - self.num_expected

    def start(self, _: object) -> None:
        self._started_at, self._phase = time.perf_counter(), PROGRESS.phase
        PROGRESS.enter("compilation")  # for which the watchdog allows more time than for a step

    def end(self, _: object) -> None:
        self.count += 1
        self.seconds += time.perf_counter() - self._started_at
        PROGRESS.enter(self._phase)


#: None until :func:`compile_blocks` has compiled a model.
_times: CompileTimes | None = None


def compile_times() -> CompileTimes | None:
    """Return the compilations of this process, or None if it compiles nothing."""
    return _times


@dataclass(frozen=True)
class _Hidden:
    """A value that graphs pass on without depending on it."""

    value: Any


def compile_blocks(model: nn.Module, args: TrainArgs) -> None:
    """Compile the forward of each block at its first call that computes gradients. Evaluation and
    generation run without compilation.

    The names of parameters do not change. Shapes are dynamic, so rows of other lengths do not
    compile again. Call it before activation checkpointing, which then repeats compiled code:
    attention for packed rows is outside of the graphs, and a checkpoint inside a graph could not
    contain it. Hooks of a strategy run outside of both.
    """
    global _times
    if not args.torch_compile:
        return
    if _times is None:
        _times = CompileTimes()
        torch_compat.on_compilations(_times.start, _times.end)
    base = base_model(model)
    setattr(base, _COMPILED, True)
    for _, block in find_blocks(base):
        wrap_forward(block, partial(_run, _compiled(block.forward, args)))


def outside_graphs(model: nn.Module, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that the graphs of a compiled model call without tracing it; for other
    models, the function itself."""
    if not getattr(model, _COMPILED, False):
        return function

    def call(*args: Any, **inputs: Any) -> Any:
        visible = {
            name: value.value if isinstance(value, _Hidden) else value
            for name, value in inputs.items()
        }
        return function(*args, **visible)

    excluded: Callable[..., Any] = torch.compiler.disable(call)
    return excluded


def _compiled(forward: Callable[..., Any], args: TrainArgs) -> Callable[..., Any]:
    # Blocks share graphs because they share the code of this function.
    def run(*inputs: Any, **named: Any) -> Any:
        return forward(*inputs, **named)

    compiled: Callable[..., Any] = torch.compile(
        run, dynamic=True, backend=args.torch_compile_backend, mode=args.torch_compile_mode
    )
    return compiled


def _run(
    compiled: Callable[..., Any], forward: Callable[..., Any], *args: Any, **inputs: Any
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **inputs)
    for name in _HIDDEN_INPUTS:
        if name in inputs:
            inputs[name] = _Hidden(inputs[name])
    return compiled(*args, **inputs)
