"""Count the kernels that an operation launches on a GPU, and the bytes that it reads and writes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from paceline.distributed.torch_compat import tree_leaves
from paceline.simulation.torch_internals import changes_arguments, operation_name

#: Operations that write their first argument without reading it.
_OVERWRITES = frozenset({"copy_", "fill_", "zero_", "bernoulli_", "normal_", "uniform_"})
#: Operations that read only the elements of their first tensor that they return.
_READS_RESULT = frozenset({"gather", "embedding", "index", "index_select", "select_copy"})
#: Operations in place that read and write only the elements that another argument covers.
_WRITES_SOURCE = frozenset({"scatter_", "scatter_add_", "index_add_", "index_put_", "index_copy_"})
#: Operations that allocate a tensor in the shape of another one and fill it.
_FILLS_NEW = frozenset(
    {"new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like"}
)
#: An operation on lists of tensors launches a kernel for as many tensors as fit into the arguments
#: of a kernel, by the number of lists, and for at most as many blocks of elements
#: (``ATen/native/cuda/MultiTensorApply.cuh`` of torch).
_MAX_TENSORS = (110, 64, 48, 36, 30)
_MAX_BLOCKS = 320
_BLOCK_ELEMENTS = 1 << 16


def count_launches(func: Any, args: Sequence[Any]) -> int:
    """Return the number of kernels that an operation launches: one, or several for operations on
    lists of tensors (``_foreach_add_``, ``_fused_adamw_``)."""
    name = operation_name(func)
    if not name.startswith(("_foreach_", "_fused_")):
        return 1
    lists: list[Sequence[torch.Tensor]] = [
        each
        for each in args
        if isinstance(each, list | tuple) and each and isinstance(each[0], torch.Tensor)
    ]
    if not lists:
        return 1
    limit = _MAX_TENSORS[min(len(lists), len(_MAX_TENSORS)) - 1]
    blocks = sum(math.ceil(tensor.numel() / _BLOCK_ELEMENTS) for tensor in lists[0])
    return max(math.ceil(len(lists[0]) / limit), math.ceil(blocks / _MAX_BLOCKS))


def written_tensors(func: Any, args: Sequence[Any], out: Any) -> list[torch.Tensor]:
    """Return the tensors that an operation writes: its results, or the arguments that it changes if
    it returns none, as operations on lists of tensors do."""
    results = list(_tensors(out))
    if results:
        return results
    changed = [
        arg for arg, is_changed in zip(args, changes_arguments(func), strict=False) if is_changed
    ]
    return list(_tensors(changed))


def count_bytes(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], written: Sequence[torch.Tensor]
) -> int:
    """Return the number of bytes that an operation reads and writes."""
    name = operation_name(func)
    inputs = list(_tensors((args, {key: kwargs[key] for key in kwargs if key != "out"})))
    others = sum(tensor.nbytes for tensor in inputs[1:])
    size = sum(tensor.nbytes for tensor in written)
    if name == "all_gather_copy_in":  # of FSDP: copies a rank's part into the buffer for all
        return 2 * sum(tensor.nbytes for tensor in _tensors(args[0]))
    if name in _FILLS_NEW:
        return size
    if name in _OVERWRITES:
        return others + size
    if name in _READS_RESULT:
        return others + 2 * size
    if name in _WRITES_SOURCE:
        return others + 2 * max((tensor.nbytes for tensor in inputs[1:]), default=0)
    return others + size + (inputs[0].nbytes if inputs else 0)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
