"""Can a model run as a pipeline? Seen before anything is cut: from its modules, and from a forward over a few made-up tokens
or one made-up image where the model is of a kind that takes them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline.core.errors import ConfigError
from paceline.models import attention

_FIX = "use a mode that keeps the layers' order as it is, such as `parallel.mode: zero3` or `tensor`"
_ALLOWED = "a model whose blocks stand in one ModuleList or Sequential and run one after another, each once"


def output_forms(model: nn.Module, blocks: list[tuple[str, nn.Module]]) -> list[Callable[[torch.Tensor], Any]]:
    """For each block, how it hands out its hidden states (a tensor, or a tuple that begins with one).

    Raises:
        ConfigError: the model cannot be cut into stages; says why.
    """
    if not blocks:
        raise _unfit("it has no ModuleList or Sequential of blocks")
    container = model.get_submodule(blocks[0][0].rpartition(".")[0])
    if len(container) != len(blocks):  # type: ignore[arg-type]
        raise _unfit("a block stands at several places of its list")
    inputs = _made_up_inputs(model)
    if inputs is None:
        return [_as_tensor] * len(blocks)
    return _watch(model, [block for _, block in blocks], inputs)


def _unfit(why: str) -> ConfigError:
    return ConfigError(f"`parallel.pipeline`: this model cannot be cut into stages: {why}", allowed=_ALLOWED, fix=_FIX)


def _as_tensor(hidden: torch.Tensor) -> Any:
    return hidden


def _as_tuple(rest: int, hidden: torch.Tensor) -> Any:
    return (hidden, *[None] * rest)


def _made_up_inputs(model: nn.Module) -> dict[str, Any] | None:
    """Inputs for a Hugging Face model; None for others: what a user's model takes is not known here."""
    config = getattr(model, "config", None)
    first = next(model.parameters(), None)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if config is None or first is None or first.device.type == "meta":
        return None
    taken = inspect.signature(base.forward).parameters
    if "input_ids" in taken and "decoder_input_ids" not in taken:
        inputs: dict[str, Any] = {"input_ids": torch.zeros((1, 2), dtype=torch.int64, device=first.device)}
        if getattr(config, "_attn_implementation", None) == attention.NAME:  # it wants to know the samples
            inputs |= {"position_ids": torch.arange(2, device=first.device).unsqueeze(0), "segment_lengths": (2,)}
        return inputs | ({"use_cache": False} if "use_cache" in taken else {})
    size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", 3)
    if "pixel_values" in taken and isinstance(size, int):
        return {"pixel_values": torch.zeros((1, channels, size, size), device=first.device, dtype=first.dtype)}
    return None


class _Watch:
    """The order in which blocks ran, and what went in and out."""

    def __init__(self) -> None:
        self.ran: list[int] = []
        self.forms: dict[int, Callable[[torch.Tensor], Any]] = {}
        self.last: object = None
        self.between: list[int] = []

    def before(self, number: int, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = next((one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)), None)
        if self.ran and hidden is not self.last:
            self.between.append(number)
        self.ran.append(number)

    def after(self, number: int, block: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        is_tuple = isinstance(out, tuple | list)
        self.last = out[0] if is_tuple else out
        self.forms[number] = partial(_as_tuple, len(out) - 1) if is_tuple else _as_tensor


def _watch(model: nn.Module, blocks: list[nn.Module], inputs: dict[str, Any]) -> list[Callable[[torch.Tensor], Any]]:
    watch = _Watch()
    handles: list[Any] = []
    for number, block in enumerate(blocks):
        handles.append(block.register_forward_pre_hook(partial(watch.before, number), with_kwargs=True))
        handles.append(block.register_forward_hook(partial(watch.after, number)))
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            model(**inputs)
    except (TypeError, ValueError, RuntimeError, KeyError, IndexError, AttributeError):
        if not watch.ran:
            return [_as_tensor] * len(blocks)  # the inputs were no good guess: the first step checks the same
    finally:
        for handle in handles:
            handle.remove()
        for module, training in modes:
            module.training = training
    if watch.ran != list(range(len(blocks))):
        raise _unfit(f"its {len(blocks)} blocks run in the order {watch.ran[:12]}")
    if watch.between:
        raise _unfit(f"block {watch.between[0]} takes something else than what the block before it gives")
    return [watch.forms[number] for number in range(len(blocks))]
