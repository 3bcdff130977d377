"""The shape of a model, from which cost models estimate memory and traffic. Imports no torch."""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class TensorShape:
    """A parameter or buffer of the model that the task built: its name, its shape, its bytes per
    element, and whether it is trained."""

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
    """The tensors of a model. A weight with several names is listed once, under the first.

    Args:
        parameters: the parameters, in the model's order.
        buffers: the buffers, persistent or not.
        optimizer_bytes_per_element: bytes of optimizer state per trained element, e.g. 8 for the
            two float32 moments of Adam.
        low_bytes: bytes per element of the low-precision dtype (2), or 0 without mixed precision.
        blocks: dotted names of the repeated blocks in the order in which they run
            ("model.layers.0", …).
        tensor_plan: dotted module name → its tensor-parallel style ("colwise", "rowwise", …).
        aliases: other name → first name, for weights with several names.
        block_output_elements: number of elements that each block passes to the next per token (or
            sample); empty if unknown.
        phases: parameter outside the blocks → when a forward pass uses it ("before" or "after" the
            blocks); None if the model was not traced.
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
    def _results(self) -> dict[Hashable, Any]:
        return {}

    def memoize(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Return the result of ``compute``, which is called only once per key.

        The planner needs the same results for every mode. A copy made by ``dataclasses.replace``
        starts without results.
        """
        if key not in self._results:
            self._results[key] = compute()
        result: T = self._results[key]
        return result

    @property
    def trained(self) -> list[TensorShape]:
        return [tensor for tensor in self.parameters if tensor.trainable]

    @property
    def trained_elements(self) -> int:
        return sum(tensor.numel for tensor in self.trained)

    @property
    def parameter_bytes(self) -> int:
        return total_bytes(self.parameters)

    @property
    def buffer_bytes(self) -> int:
        return total_bytes(self.buffers)


@lru_cache(maxsize=1 << 16)
def modules_around(name: str) -> tuple[str, ...]:
    """Return the dotted names of the modules that contain ``name``, the outermost first:
    ``a.b.weight`` → a, a.b."""
    return tuple(name[:at] for at, letter in enumerate(name) if letter == ".")


def total_bytes(shapes: Iterable[TensorShape]) -> int:
    return sum(tensor.size_bytes for tensor in shapes)
