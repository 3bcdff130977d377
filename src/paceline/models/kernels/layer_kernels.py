"""Tell which package computes the recurrent and convolution layers of a model.

Such a layer of transformers calls functions that a package computes if it is installed, and that
transformers itself computes with torch operations otherwise. Kernels from the hub are used only if
a model is loaded with ``use_kernels=True``, which Paceline does not do, so nothing is downloaded.
Imports no torch.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from paceline.core.texts import UserText

#: Packages by the name of their module, as pip names them.
_PACKAGES = {
    "fla": "flash-linear-attention",
    "causal_conv1d": "causal-conv1d",
    "mamba_ssm": "mamba-ssm",
}
#: Functions that compute a single token after a cached state, which training does not call.
_OF_CACHED_STATES = re.compile(r"_update$|recurrent")
#: Kinds of layers by a part of the name of their class, the first match counts.
_KINDS = {
    "GatedDeltaNet": "gated delta net",
    "DeltaAttention": "delta attention",
    "ShortConv": "short convolution",
    "Mamba": "mamba",
    "Mixer": "mamba",
}
_MAMBA_2_SCAN = "mamba_chunk_scan_combined"


class LayerFunction(NamedTuple):
    """A function that a layer calls: its name, its package, and whether the package computes it."""

    name: str
    package: str
    is_installed: bool


@dataclass(frozen=True)
class LayerKernels:
    """What computes the layers of one kind.

    Args:
        kind: kind of the layers, such as ``gated delta net``.
        packages: packages whose kernels compute the layers.
        missing: packages with kernels for the layers that are not installed.
    """

    kind: str
    packages: tuple[str, ...]
    missing: tuple[str, ...]

    @property
    def kernel(self) -> str:
        """The names of what computes the layers: packages, or torch."""
        return " and ".join([*self.packages, *(["torch"] if self.missing else [])])

    def notice(self, device_type: str) -> UserText:
        """Return what a user must know about the layers.

        Args:
            device_type: type of the devices that train the model.
        """
        missing = " and ".join(self.missing)
        if not self.missing:
            return UserText(
                "layers: {kind}, computed by {kernel}",
                code="layer-kernels",
                kind=self.kind,
                kernel=self.kernel,
            )
        if device_type == "cpu":
            return UserText(
                "layers: {kind}, computed by {kernel}; the kernels of {missing} need a GPU",
                code="layer-kernels-need-gpu",
                missing=missing,
                kind=self.kind,
                kernel=self.kernel,
            )
        return UserText(
            "layers: {kind}, computed by {kernel}; not installed, with kernels for these layers:"
            " {missing}",
            code="layer-kernels-missing",
            missing=missing,
            kind=self.kind,
            kernel=self.kernel,
        )


def layer_kernels(model: Any) -> list[LayerKernels]:
    """Return what computes the recurrent and convolution layers of a transformers model, by kind.
    The model may have adapters or be on the meta device."""
    functions: dict[str, set[LayerFunction]] = {}
    for layer in {type(module): None for module in model.modules()}:
        if found := layer_functions(layer):  # type: ignore[arg-type]
            functions.setdefault(_kind_of(layer.__name__, found), set()).update(found)
    return [
        LayerKernels(
            kind,
            _names(each.package for each in found if each.is_installed),
            _names(each.package for each in found if not each.is_installed),
        )
        for kind, found in functions.items()
    ]


def has_attention(model: Any) -> bool:
    """Return whether a model has attention layers, which a pure state-space model does not."""
    return any(
        "Attention" in type(module).__name__ and not layer_functions(type(module))  # type: ignore[arg-type]
        for module in model.modules()
    )


@cache
def layer_functions(kind: type) -> frozenset[LayerFunction]:
    """Return the functions with a kernel in another package that the forward pass of a class of
    layers calls in training. Empty for other classes."""
    forward: Any = getattr(kind, "forward", None)
    if not kind.__module__.startswith("transformers.models.") or forward is None:
        return frozenset()
    forward = inspect.unwrap(forward)
    called = (forward.__globals__.get(name) for name in forward.__code__.co_names)
    functions = {_as_layer_function(each) for each in called if callable(each)}
    return frozenset(each for each in functions if each is not None)


def _as_layer_function(function: Callable[..., Any]) -> LayerFunction | None:
    """Return what transformers has recorded about a function with a kernel in another package, or
    None for other functions and for those that training does not call."""
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    if code is None or not cells:
        return None
    try:
        values = {
            name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)
        }
    except ValueError:  # a variable without a value
        return None
    name, package = values.get("func_name"), values.get("package")
    if not isinstance(name, str) or not isinstance(package, str):
        return None
    if _OF_CACHED_STATES.search(name):
        return None
    return LayerFunction(name, package, bool(values.get("is_new_implementation")))


def _kind_of(class_name: str, functions: frozenset[LayerFunction]) -> str:
    kind = next((kind for part, kind in _KINDS.items() if part in class_name), class_name)
    is_second = any(function.name == _MAMBA_2_SCAN for function in functions)
    return "mamba 2" if kind == "mamba" and is_second else kind


def _names(packages: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({_PACKAGES.get(package, package) for package in packages}))
