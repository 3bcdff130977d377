"""Recurrent and convolution layers for packed rows: each sample is computed by itself.

Such a layer (a state-space model, a gated delta rule, a short convolution) passes a state from each
token to the next, so in a packed row the state of one sample would reach the next sample. Kernels
of other packages reset the state at each sample if they get the positions at which samples begin
(``cu_seq_lens_q``, ``seq_idx``). transformers' own code cannot, and raises an error. Then a layer
is called with the samples as separate rows.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from paceline.data.collate import SegmentInputs, map_tensors
from paceline.models import packed_row
from paceline.models.blocks import wrap_forward

#: Names of the cache among the arguments of such a layer.
_CACHES = ("cache_params", "past_key_values")
#: Number of tokens that layers compute at once, if they do not say so.
_DEFAULT_CHUNK = 64
#: Samples whose lengths round up to the same multiple of this number are computed in one call.
_LENGTH_STEP = 64
#: Attribute of a model with wrapped layers: the functions that restore it.
_RESTORE = "_paceline_mixers_restore"
#: Packages with kernels of these layers.
_PACKAGES = ("causal-conv1d", "flash-linear-attention", "fla-core", "mamba-ssm")
#: Arguments by which kernels learn where the samples of a row begin.
_BEGINNINGS = {"cu_seqlens", "seq_idx"}
#: Parts of the names of functions for a single token, which training does not call.
_FOR_ONE_TOKEN = ("update", "recurrent")


# -- the layers of a model


def find_mixers(model: nn.Module) -> list[nn.Module]:
    """Return the recurrent and convolution layers of a transformers model that compute a row from
    hidden states alone: those with a causal convolution and a cache."""
    return [module for module in model.modules() if _is_mixer(module)]


def _is_mixer(module: nn.Module) -> bool:
    if not isinstance(getattr(module, "conv_kernel_size", None), int):
        return False
    names = inspect.signature(type(module).forward).parameters
    return {"hidden_states", "attention_mask"} <= names.keys() and any(
        cache in names for cache in _CACHES
    )


def check_lengths(mixers: Sequence[nn.Module]) -> tuple[int, ...]:
    """Return lengths of samples with which a mixture of samples shows: shorter than the
    convolution, and longer than what a layer computes at once."""
    width = max(_number(mixer, "conv_kernel_size", 1) for mixer in mixers)
    chunk = max(_number(mixer, "chunk_size", _DEFAULT_CHUNK) for mixer in mixers)
    return (max(width - 1, 1), chunk + 5, 1)


def _number(mixer: nn.Module, name: str, default: int) -> int:
    value = getattr(mixer, name, default)
    return value if isinstance(value, int) else default


# -- kernels of other packages


def installed_versions() -> dict[str, str]:
    """Return the versions of the installed packages with kernels of these layers."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def have_kernels(mixers: Sequence[nn.Module]) -> bool:
    """Return whether each function that these layers call for a row is a kernel of another package
    that takes the beginnings of samples.

    transformers decides this when it is imported. It drops an argument that a kernel does not take,
    so each function is asked for its arguments.
    """
    functions = [each for kind in {type(mixer) for mixer in mixers} for each in _functions(kind)]
    return bool(functions) and all(functions)


def _functions(kind: type[nn.Module]) -> Iterator[bool]:
    """For each replaceable function that a layer calls for a row, yield whether it is a kernel that
    takes the beginnings of samples."""
    forward: Any = inspect.unwrap(kind.forward)
    for name in forward.__code__.co_names:
        function = forward.__globals__.get(name)
        if not inspect.isfunction(function) or any(part in name for part in _FOR_ONE_TOKEN):
            continue
        chosen = inspect.getclosurevars(function).nonlocals
        if "applicable_params" in chosen:  # of transformers' use_kernel_func_from_hub_with_fallback
            is_kernel = bool(chosen.get("is_new_implementation"))
            yield is_kernel and bool(_BEGINNINGS & set(chosen["applicable_params"]))


# -- packed rows


def install(
    model: nn.Module,
    outside: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function,
    in_kernels: bool = False,
) -> list[nn.Module]:
    """Let the recurrent and convolution layers of a transformers model keep the samples of packed
    rows apart. Rows that are not packed are computed as before.

    Args:
        outside: function that excludes another one from compiled graphs.
        in_kernels: whether a row is computed in one call of the kernels that are installed.

    Returns:
        The layers; none if the model has none.
    """
    mixers = find_mixers(model)
    uninstall(model)
    if mixers:
        compute = outside(_in_kernels if in_kernels else _by_sample)
        restore = [wrap_forward(mixer, compute) for mixer in mixers]
        setattr(model, _RESTORE, [packed_row.follow_rows(model), *restore])
    return mixers


def uninstall(model: nn.Module) -> None:
    """Give a model the layers that it had before :func:`install`."""
    for restore in getattr(model, _RESTORE, ()):
        restore()
    if hasattr(model, _RESTORE):
        delattr(model, _RESTORE)


def _in_kernels(forward: Callable[..., Any], hidden_states: torch.Tensor, **inputs: Any) -> Any:
    """Call a layer with a packed row, and tell its kernels where the samples begin."""
    segments = _take_segments(inputs)
    if segments is not None:
        lengths, ends = segments["segment_lengths"], segments["cu_seqlens"]
        numbers = torch.arange(len(lengths), dtype=torch.int32, device=ends.device)
        # The host knows the number of tokens, so it does not wait for the device.
        of_tokens = torch.repeat_interleave(numbers, ends.diff(), output_size=sum(lengths))
        inputs |= {
            "cu_seq_lens_q": ends.long(),
            "cu_seqlens_cpu": torch.tensor([0, *accumulate(lengths)]),  # as fla calls it
            "seq_idx": of_tokens.unsqueeze(0),
        }
    return forward(hidden_states, **inputs)


def _by_sample(forward: Callable[..., Any], hidden_states: torch.Tensor, **inputs: Any) -> Any:
    """Call a layer with the samples of a packed row as separate rows.

    Samples of similar length are computed in one call, padded at the end: no token of a causal
    layer depends on what follows it. Layers compute many short operations, some of them one after
    another for each token, so fewer calls take less time. The lengths are known to the host, so it
    does not wait for the device.

    Args:
        forward: forward of the layer.
        hidden_states: [1, tokens, width] for a packed row.
    """
    segments = _take_segments(inputs)
    if segments is None:
        return forward(hidden_states, **inputs)
    lengths = segments["segment_lengths"]
    parts = hidden_states.split(lengths, dim=1)
    groups: dict[int, list[int]] = {}
    for number, length in enumerate(lengths):
        groups.setdefault(-(-length // _LENGTH_STEP), []).append(number)
    outputs: dict[int, torch.Tensor] = {}
    for numbers in groups.values():
        longest = max(lengths[number] for number in numbers)
        rows = [
            functional.pad(parts[number], (0, 0, 0, longest - lengths[number]))
            for number in numbers
        ]
        results = forward(torch.cat(rows), **inputs).split(1)
        for number, result in zip(numbers, results, strict=True):
            outputs[number] = result[:, : lengths[number]]
    return torch.cat([outputs[number] for number in range(len(lengths))], dim=1)


def _take_segments(inputs: Any) -> SegmentInputs | None:
    """Return the samples of this thread's row, or None if it is not packed. Remove them from the
    arguments of a layer, which pass them to kernels as something else.

    Raises:
        NotImplementedError: the layer has a mask or a cache.
    """
    for name in SegmentInputs.__annotations__:
        inputs.pop(name, None)
    segments = packed_row.current_segments()
    if segments is not None and any(
        inputs.get(name) is not None for name in (*_CACHES, "attention_mask")
    ):
        raise NotImplementedError("recurrent layers of packed rows support no mask and no cache")
    return segments


@contextmanager
def computed_on(device_type: str, model: nn.Module, low: str | None = None) -> Iterator[None]:
    """Compute the recurrent and convolution layers of a model that is still on the CPU on the
    device that the run trains on within the block: transformers calls their kernels, if they are
    installed, also for a model on the CPU.

    Args:
        low: 16-bit type of autocast on that device, or None.
    """
    parameter = next(model.parameters())
    mixers = find_mixers(model) if installed_versions() else []
    if not mixers or parameter.device.type in (device_type, "meta"):
        yield
        return

    def compute(mixer: nn.Module, forward: Callable[..., Any], *args: Any, **inputs: Any) -> Any:
        tensors = {**dict(mixer.named_parameters()), **dict(mixer.named_buffers())}
        moved = map_tensors((tensors, args, inputs), lambda tensor: tensor.to(device_type))
        wrapped, mixer.forward = mixer.forward, forward
        dtype = None if low is None else getattr(torch, low)
        try:
            with torch.autocast(device_type, dtype=dtype, enabled=low is not None):
                result = torch.func.functional_call(mixer, *moved)
        finally:
            mixer.forward = wrapped
        return map_tensors(result, lambda tensor: tensor.to(parameter.device, parameter.dtype))

    restores = [wrap_forward(mixer, partial(compute, mixer)) for mixer in mixers]
    try:
        yield
    finally:
        for restore in restores:
            restore()
