"""A model as numbers: what its cost follows from. No torch here."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any


@dataclass(frozen=True)
class TensorShape:
    """A parameter or buffer: ``name`` in the model, ``shape``, bytes an element as the task built
    it, whether it is trained."""

    name: str
    shape: tuple[int, ...]
    element_bytes: int
    trainable: bool = False

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.numel * self.element_bytes


@dataclass(frozen=True)
class ModelShape:
    """What training state a model makes. A weight that is used under several names stands once,
    under the first.

    Args:
        parameters: in the model's order.
        buffers: persistent or not.
        optimizer_bytes_per_element: of float32 state for each trained element, e.g. 8 for Adam's
            two moments.
        low_bytes: bytes an element of the mixed precision's type (2), or 0 without mixed precision.
        blocks: dotted names of the repeated blocks in the order in which they run
            ("model.layers.0", …).
        tensor_plan: dotted module name → how tensor parallelism cuts it ("colwise", "rowwise", …).
        aliases: further name → first name, of weights used under several names.
        block_output_elements: elements that each block hands to the next, for each token (or
            sample); empty where not known.
        phases: parameter outside the blocks → when a traced forward uses it ("before" or "after"
            the blocks); None without one.
    """

    parameters: tuple[TensorShape, ...]
    buffers: tuple[TensorShape, ...] = ()
    optimizer_bytes_per_element: int = 8
    low_bytes: int = 0
    blocks: tuple[str, ...] = ()
    tensor_plan: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    block_output_elements: tuple[float, ...] = ()
    phases: Mapping[str, tuple[str, ...]] | None = None

    @cached_property
    def memo(self) -> dict[object, Any]:
        """Results derived from this shape, by key. A plan for many ranks asks for the same ones in
        every mode. A copy made by ``dataclasses.replace`` starts empty."""
        return {}

    @property
    def trained(self) -> list[TensorShape]:
        return [tensor for tensor in self.parameters if tensor.trainable]

    @property
    def parameter_bytes(self) -> int:
        return total_bytes(self.parameters)

    @property
    def buffer_bytes(self) -> int:
        return total_bytes(self.buffers)


@lru_cache(maxsize=1 << 16)
def modules_around(name: str) -> tuple[str, ...]:
    """The dotted names of the modules that hold what is called ``name``, the outermost first:
    ``a.b.weight`` → a, a.b."""
    return tuple(name[:at] for at, letter in enumerate(name) if letter == ".")


def total_bytes(shapes: Iterable[TensorShape]) -> int:
    return sum(tensor.size_bytes for tensor in shapes)
