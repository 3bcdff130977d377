"""The shape of a model, from which cost models estimate memory and traffic. Imports no torch."""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

#: Number of elements in a block of 8-bit optimizer state, and the smallest number that bitsandbytes
#: and torchao quantize.
QUANTIZED_BLOCK, QUANTIZED_MINIMUM = 256, 4096
#: With `cpu_offload: optimizer`: the smallest number of elements of a parameter whose state is in
#: host memory, and the number of elements that are updated at once.
OFFLOAD_MINIMUM, OFFLOADED_AT_ONCE = 1024, 1 << 25


@dataclass(frozen=True)
class TensorShape:
    """A parameter or buffer of the model that the task built: its name, its shape, its bytes per
    element, and whether it is trained. Of a 4-bit weight, one element packs several numbers."""

    name: str
    shape: tuple[int, ...]
    element_bytes: int
    trainable: bool = False
    packed: int = 1

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.numel * self.element_bytes

    @property
    def is_fused(self) -> bool:
        """Whether this is a matrix for each of several experts. A filter of a convolution over each
        channel by itself is not."""
        return len(self.shape) == 3 and self.shape[1] > 1


@dataclass(frozen=True)
class OptimizerMemory:
    """The size of an optimizer's state.

    Args:
        element_bytes: bytes per trained element in 32 bit, e.g. 8 for the two float32 moments of
            Adam.
        scalar_bytes: bytes per tensor, e.g. for Adam's step count.
        quantizes: whether moments are 8-bit codes with a float32 scale per block of 256 elements.
            Parts of a tensor with fewer than 4096 elements stay in 32 bit.
        quantizes_whole_blocks: whether only multiples of 256 elements are quantized.
        table_bytes: bytes per quantized tensor for its tables of the 8-bit values.
        average_bytes: bytes per trained element of the average of the weights.
        matrices: parameters that Muon updates, with one moment; the others have Adam's moments.
    """

    element_bytes: int = 8
    scalar_bytes: int = 0
    quantizes: bool = False
    quantizes_whole_blocks: bool = False
    table_bytes: int = 0
    average_bytes: int = 0
    matrices: frozenset[str] = frozenset()

    def moment_bytes(self, name: str, numel: int) -> int:
        """Return the bytes of the moments, and of the average of the weights, for a part of a
        parameter with ``numel`` elements."""
        if name in self.matrices:
            return (4 + self.average_bytes) * numel
        if not self.is_quantized(numel):
            return (self.element_bytes + self.average_bytes) * numel
        moments = self.element_bytes // 4
        return moments * (numel + 4 * math.ceil(numel / QUANTIZED_BLOCK)) + self.table_bytes

    def bytes_of(self, name: str, numel: int) -> int:
        """Return :meth:`moment_bytes` and the bytes of scalars."""
        return self.moment_bytes(name, numel) + (0 if name in self.matrices else self.scalar_bytes)

    def is_quantized(self, numel: int) -> bool:
        """Return whether the moments of a part with ``numel`` elements are 8-bit codes."""
        if not self.quantizes or numel < QUANTIZED_MINIMUM:
            return False
        return not self.quantizes_whole_blocks or numel % QUANTIZED_BLOCK == 0


class LayerUse(NamedTuple):
    """A use of a layer in a forward pass.

    Args:
        needs_gradient: whether backward computes the gradient of the layer's input; of a projection
            to latent features, of its output.
        shares_input: whether the column layer before has the same input.
        is_repeated: whether a recomputation of the block needs the layer's output.
    """

    needs_gradient: bool = True
    shares_input: bool = False
    is_repeated: bool = True


@dataclass(frozen=True)
class ModelShape:
    """The tensors of a model. A weight with several names is listed once, under the first.

    Args:
        parameters: the parameters, in the model's order.
        buffers: the buffers, persistent or not.
        optimizer: the size of the optimizer's state.
        low_bytes: bytes per element of the low-precision dtype (2), or 0 without mixed precision.
        blocks: dotted names of the repeated blocks in the order in which they run
            ("model.layers.0", …).
        embedding, head: dotted names of the layers before and after the blocks of a language model
            (:func:`~paceline.models.blocks.find_ends`).
        tensor_plan: dotted module name → its tensor-parallel style ("colwise", "rowwise", …).
        aliases: other name → first name, for weights with several names.
        block_output_elements: number of elements that each block passes to the next per token (or
            sample); empty if unknown.
        phases: parameter outside the blocks → when a forward pass uses it ("before" or "after" the
            blocks); None if the model was not traced.
        layer_uses: module of ``tensor_plan``, or matrix of an adapter of it → its uses in a forward
            pass; None if the model was not traced.
        splits_tokens: whether sequence parallelism is on by default.
    """

    parameters: tuple[TensorShape, ...]
    buffers: tuple[TensorShape, ...] = ()
    optimizer: OptimizerMemory = OptimizerMemory()
    low_bytes: int = 0
    blocks: tuple[str, ...] = ()
    embedding: str = ""
    head: tuple[str, ...] = ()
    tensor_plan: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    block_output_elements: tuple[float, ...] = ()
    phases: Mapping[str, tuple[str, ...]] | None = None
    layer_uses: Mapping[str, tuple[LayerUse, ...]] | None = None
    splits_tokens: bool = False

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

    @cached_property
    def trained(self) -> tuple[TensorShape, ...]:
        return tuple(tensor for tensor in self.parameters if tensor.trainable)

    @cached_property
    def num_parameters(self) -> int:
        """Number of parameters, also of those that are packed."""
        return sum(tensor.numel * tensor.packed for tensor in self.parameters)

    @cached_property
    def trained_elements(self) -> int:
        return sum(tensor.numel for tensor in self.trained)

    def offloaded_moments(self, parts: Iterable[tuple[str, int]]) -> tuple[int, int]:
        """Return the bytes of the moments that are in host memory with `cpu_offload: optimizer`,
        and how many of these bytes are on the device at once during a step.

        Args:
            parts: name and number of elements of the parts of parameters that a rank updates.
        """
        moved = [(name, numel) for name, numel in parts if numel >= OFFLOAD_MINIMUM]
        sizes = [self.optimizer.moment_bytes(name, numel) for name, numel in moved]
        on_host, elements = sum(sizes), sum(numel for _, numel in moved)
        group = on_host * OFFLOADED_AT_ONCE // max(1, elements)
        return on_host, min(on_host, max(group, *sizes, 0) + group)

    @cached_property
    def moment_bytes(self) -> int:
        """Bytes of the optimizer's moments for all trained parameters in full."""
        return sum(self.optimizer.moment_bytes(each.name, each.numel) for each in self.trained)

    @cached_property
    def parameter_bytes(self) -> int:
        return total_bytes(self.parameters)

    @cached_property
    def buffer_bytes(self) -> int:
        return total_bytes(self.buffers)


@lru_cache(maxsize=1 << 16)
def modules_around(name: str) -> tuple[str, ...]:
    """Return the dotted names of the modules that contain ``name``, the outermost first:
    ``a.b.weight`` → a, a.b."""
    return tuple(name[:at] for at, letter in enumerate(name) if letter == ".")


def total_bytes(shapes: Iterable[TensorShape]) -> int:
    return sum(tensor.size_bytes for tensor in shapes)
