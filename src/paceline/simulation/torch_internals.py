"""The private names of torch that the simulation of ranks uses: fake tensors, the fake process
group, dispatched operations, and how DTensor computes shapes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import _meta_registrations
from torch._subclasses.fake_tensor import (
    DataDependentOutputException as DataDependentOutputException,
)
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException as DynamicOutputShapeException,
)
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.distributed._tools.fake_collectives import CollectiveOp, collective_ops, sync_ops
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore as FakeStore
from torch.utils._python_dispatch import (
    is_traceable_wrapper_subclass as is_traceable_wrapper_subclass,
)
from torch.utils.flop_counter import flop_registry

#: Operations that neither read nor write the elements of a tensor.
WITHOUT_WORK = frozenset(
    {
        "view", "t", "transpose", "detach", "_unsafe_view", "expand", "as_strided", "select",
        "slice", "split", "unbind", "permute", "squeeze", "unsqueeze", "alias", "split_with_sizes",
        "empty", "empty_like", "empty_strided", "chunk", "device", "new_empty",
        "lift_fresh", "new_empty_strided", "unflatten",
    }
)  # fmt: skip
#: Operation of torch → the name of its collective.
COLLECTIVES = {
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "send": "send",
    "recv_": "receive",
}
COPIES = ("copy_", "_to_copy")


def is_wait(op: Any) -> bool:
    """Return whether an operation waits for a functional collective."""
    return op is torch.ops._c10d_functional.wait_tensor.default


def is_collective(op: Any) -> bool:
    return op in collective_ops


def sends_message(op: Any) -> bool:
    """Return whether a collective sends data, unlike a barrier or a wait."""
    return op not in sync_ops


def operation_name(op: Any) -> str:
    """Return the name of an operation without its overload: ``mm`` for ``aten.mm.default``."""
    return str(op._overloadpacket.__name__)


def flop_formula(op: Any) -> Callable[..., int] | None:
    """Return the formula for the FLOPs of an operation; None if there is none."""
    if op is torch.ops.aten._grouped_mm.default:  # torch has none
        return _grouped_mm_flops
    return flop_registry.get(op._overloadpacket)


def _grouped_mm_flops(left: torch.Tensor, right: torch.Tensor, *_: Any, **__: Any) -> int:
    """Return the FLOPs of the products of groups of rows, columns or inner elements, which together
    have the shapes of the operands."""
    products = len(left) if left.dim() == right.dim() == 3 else 1
    return 2 * products * left.shape[-2] * left.shape[-1] * right.shape[-1]


def collective_size(op: Any, args: Any) -> int:
    """Return the number of ranks of a collective."""
    return int(CollectiveOp.get_process_group(op, args).size())


def wrap_shape_propagation(wrap: Callable[[Any], Any]) -> Callable[[], None]:
    """Replace the function with which DTensor computes the shapes of results by ``wrap`` of it.
    Return a function that restores it."""
    plain = ShardingPropagator._propagate_tensor_meta_non_cached
    ShardingPropagator._propagate_tensor_meta_non_cached = wrap(plain)  # type: ignore[method-assign]

    def restore() -> None:
        ShardingPropagator._propagate_tensor_meta_non_cached = plain  # type: ignore[method-assign]

    return restore


def allow_grouped_mm_of_all_dtypes() -> Callable[[], None]:
    """Let grouped products of fake tensors be in float32 and float16, as on devices; torch computes
    the shapes of those in bfloat16 only. Return a function that restores it."""
    plain = _meta_registrations._meta_grouped_mm_common

    def grouped_mm(left: torch.Tensor, right: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        dtype = left.dtype
        if dtype != right.dtype or dtype not in (torch.float32, torch.float16):
            return plain(left, right, *args, **kwargs)
        return plain(left.bfloat16(), right.bfloat16(), *args, **kwargs).to(dtype)

    def restore() -> None:
        _meta_registrations._meta_grouped_mm_common = plain

    _meta_registrations._meta_grouped_mm_common = grouped_mm  # type: ignore[assignment]
    return restore


#: Operations of backward that a GPU computes in one kernel. A build of torch without kernels for
#: CUDA computes them by several operations, whose results take memory.
_SINGLE_KERNELS = ("silu_backward", "mish_backward")


def keep_single_kernels() -> Callable[[], None]:
    """Keep operations whole that a GPU computes in one kernel. Return a function that restores what
    was."""
    library = torch.library.Library("aten", "IMPL")
    for name in _SINGLE_KERNELS:
        # Never called: fake tensors compute shapes by the kernels for meta tensors.
        library.impl(name, _without_values, "CUDA")
    return library._destroy


def _without_values(*_: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError("simulated tensors have no values")


def adds_to_zeros(op: Any, args: Any) -> bool:
    """Return whether an operation adds rows to a tensor, as the backward of an index does to zeros:
    in place, but out of place for tensors of a subclass, as all fake ones are."""
    return op is torch.ops.aten.index_put.default and len(args) > 3 and bool(args[3])


def changes_arguments(func: Any) -> list[bool]:
    """Return for each argument of an operation whether the operation writes to it."""
    aliases = [argument.alias_info for argument in func._schema.arguments]
    return [alias is not None and alias.is_write for alias in aliases]
