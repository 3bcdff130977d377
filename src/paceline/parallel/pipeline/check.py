"""Can a model run as a pipeline? Checked before anything is cut: from its modules, and from a
traced forward over a few made-up tokens, one made-up image, or a sample of the task."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline.core.errors import ConfigError
from paceline.models.shape.trace import BETWEEN, INSIDE, Trace, trace_model

_FIX = (
    "use a mode that keeps the layers' order as it is, such as `parallel.mode: zero3` or `tensor`"
)
_ALLOWED = (
    "a model whose blocks stand in one ModuleList or Sequential and run one after another, each"
    " once"
)


def check_blocks(
    model: nn.Module,
    blocks: list[tuple[str, nn.Module]],
    run: Callable[[nn.Module], object] | None = None,
) -> tuple[list[Callable[[torch.Tensor], Any]], Trace | None]:
    """For each block, how it returns its hidden states (a tensor, or a tuple that begins with one),
    and the trace that shows it; no trace if the model's inputs are not known.

    Args:
        run: a forward of the task, for models whose inputs are not known here.

    Raises:
        ConfigError: the model cannot be cut into stages; says why.
    """
    _check_list(model, blocks)
    result = trace_model(model, run)
    if result is None:
        return [partial(_shaped, 0)] * len(blocks), None
    _check_order(result, len(blocks))
    return [partial(_shaped, result.outputs[number]) for number in range(len(blocks))], result


def check_trace(model: nn.Module, blocks: list[tuple[str, nn.Module]], trace: Trace | None) -> None:
    """The checks of :func:`check_blocks` for a model that was traced before.

    Raises:
        ConfigError: the model cannot be cut into stages; says why.
    """
    _check_list(model, blocks)
    if trace is not None:
        _check_order(trace, len(blocks))


def _check_list(model: nn.Module, blocks: list[tuple[str, nn.Module]]) -> None:
    if not blocks:
        raise _unfit("it has no ModuleList or Sequential of blocks")
    container = model.get_submodule(blocks[0][0].rpartition(".")[0])
    if len(container) != len(blocks):  # type: ignore[arg-type]
        raise _unfit("a block stands at several places of its list")
    if any(hasattr(module, "layers_are_rescaled") for module in model.modules()):
        # RWKV, only when it changes between training and evaluation: one forward need not show it.
        raise _unfit("its forward changes its own weights")


def _check_order(found: Trace, num_blocks: int) -> None:
    if found.error is not None:
        raise _unfit(f"a forward that would show the order of its modules failed ({found.error})")
    if found.order != list(range(num_blocks)):
        raise _unfit(f"its {num_blocks} blocks run in the order {found.order[:12]}")
    if found.altered:
        raise _unfit(
            f"block {found.altered[0]} takes something else than what the block before it gives"
        )
    if found.written:
        raise _unfit(f"its forward changes its own weights (`{found.written[0]}`)")
    for phase, where in ((INSIDE, "inside its blocks"), (BETWEEN, "between two blocks")):
        names = [name for name, phases in found.phases.items() if phase in phases]
        if names:
            raise _unfit(f"`{names[0]}` lies outside the blocks and is used {where}")


def _unfit(why: str) -> ConfigError:
    return ConfigError(
        f"`parallel.pipeline`: this model cannot be cut into stages: {why}",
        allowed=_ALLOWED,
        fix=_FIX,
    )


def _shaped(size: int, hidden: torch.Tensor) -> Any:
    """``hidden`` as the output of a block: a tuple with ``size`` entries, or itself where 0."""
    return (hidden, *[None] * (size - 1)) if size else hidden
