"""Wrappers for the private names of torch that Paceline uses.

No other module uses private names of torch, except the schedules of pipeline parallelism, whose
stage implements the interface of torch's schedules, and :mod:`paceline.simulation.cuda`, which
replaces functions of ``torch.cuda``. If the installed torch lacks a name, the wrapper raises a
ConfigError with the supported range, or loops over public functions that compute the same numbers.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paceline.core.errors import ConfigError

SUPPORTED = "torch>=2.11,<2.16"
_MISSING = object()


def _find(owner: Any, path: str, default: Any = _MISSING) -> Any:
    """Return the attribute at a dotted path below ``owner``.

    Raises:
        ConfigError: if this torch lacks the attribute and no ``default`` was passed.
    """
    try:
        return attrgetter(path)(owner)
    except AttributeError as error:
        if default is not _MISSING:
            return default
        raise _missing_name(f"{getattr(owner, '__name__', owner)}.{path}") from error


def _import(name: str) -> Any:
    """Return a module of torch.

    Raises:
        ConfigError: if this torch lacks it.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise _missing_name(name) from error


def _missing_name(name: str) -> ConfigError:
    return ConfigError(
        "torch {version} has no `{name}`, which Paceline requires",
        code="missing-in-torch",
        allowed=SUPPORTED,
        fix="run `pip install '{supported}'`",
        version=torch.__version__,
        name=name,
        supported=SUPPORTED,
    )


if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
    from torch.utils._pytree import tree_leaves as tree_leaves
else:
    TorchDispatchMode = _find(_import("torch.utils._python_dispatch"), "TorchDispatchMode")
    tree_leaves = _find(_import("torch.utils._pytree"), "tree_leaves")


# -- hooks around communication
_is_hooked = False


def hook_collectives(
    functions: Iterable[str],
    wrap_function: Callable[[str, Callable[..., Any]], Callable[..., Any]],
    wrap_wait: Callable[[Callable[..., Any], bool], Callable[..., Any]],
) -> None:
    """Wrap functions of ``torch.distributed``, and the ``wait`` of its works and futures.

    Only the first call in a process has an effect.

    Args:
        functions: names of functions in ``torch.distributed``. Names that this torch lacks are
            skipped.
        wrap_function: called with a name and the function; returns its replacement.
        wrap_wait: called with a ``wait`` method and whether it belongs to a work (else to a
            future); returns its replacement.
    """
    global _is_hooked
    if _is_hooked:
        return
    future = _find(torch, "_C.Future")
    work_wait, future_wait = _find(dist, "Work.wait"), _find(future, "wait")
    for name in functions:
        function = _find(dist, name, None)
        if function is not None:
            setattr(dist, name, wrap_function(name, function))
    dist.Work.wait = wrap_wait(work_wait, True)  # type: ignore[method-assign]
    future.wait = wrap_wait(future_wait, False)
    _is_hooked = True


def in_backward() -> bool:
    """Return whether this thread runs a backward pass. On an accelerator, that is a thread of
    torch's autograd, for which the thread that called ``backward`` waits."""
    return bool(_find(torch, "_C._current_graph_task_id")() != -1)


# -- the process group
def default_store() -> dist.Store:
    """Return the rendezvous store of the default process group."""
    return _find(dist, "distributed_c10d._get_default_store")()  # type: ignore[no-any-return]


def _find_flight_recorder() -> tuple[str, Callable[[], bytes] | None]:
    """Return the environment variable for the size of torch's flight recorder, and the function
    that returns its contents as JSON."""
    c10d = _find(torch, "_C._distributed_c10d")
    dump = _find(c10d, "_dump_fr_trace_json", None)
    if dump is not None:
        return "TORCH_FR_BUFFER_SIZE", dump
    return "TORCH_NCCL_TRACE_BUFFER_SIZE", _find(c10d, "_dump_nccl_trace_json", None)


def flight_recorder_variable() -> str:
    """Return the environment variable for the number of collectives in torch's flight recorder."""
    return _find_flight_recorder()[0]


def dump_flight_recorder() -> bytes:
    """Return the contents of torch's flight recorder as JSON, or b"" if this torch has none."""
    dump = _find_flight_recorder()[1]
    return b"" if dump is None else dump()


def tcp_rpc_options(num_threads: int, timeout_s: float) -> Any:
    """Return options with which ``torch.distributed.rpc`` sends over TCP only."""
    from torch.distributed import rpc

    try:
        return rpc.TensorPipeRpcBackendOptions(
            num_worker_threads=num_threads,
            rpc_timeout=timeout_s,
            _transports=["uv"],
            _channels=["basic"],
        )
    except TypeError as error:
        raise _missing_name("TensorPipeRpcBackendOptions(_transports, _channels)") from error


# -- FSDP
def reduce_unused_parameters(root: torch.nn.Module) -> None:
    """Let FSDP reduce a gradient of zero for each parameter that a backward pass did not use.

    Otherwise ranks that use different parameters would issue different collectives, and hang. Torch
    2.13 and newer have a setting for this. For older ones, the gradient is set before FSDP reads
    the gradients of a module.

    Args:
        root: module with all modules to which FSDP was applied.
    """
    setting = _find(root, "set_reduce_scatter_unused_params", None)
    if setting is not None:
        setting(True)
        return
    states = [_find(each, "_get_fsdp_state", None) for each in root.modules()]
    groups = [_find(state(), "_fsdp_param_group") for state in states if state is not None]
    for group in dict.fromkeys(groups):  # modules of one unit share a group
        if group is not None:
            group.post_backward = _ReduceUnused(group)


class _ReduceUnused:
    """Replaces ``post_backward`` of an ``FSDPParamGroup``: sets missing gradients to zero before.
    FSDP may call it again in the same backward pass, when there is nothing left to reduce."""

    def __init__(self, group: Any) -> None:
        self.group, self.post_backward = group, _find(group, "post_backward")
        self.last_pass = -1

    def __call__(self, *args: Any) -> None:
        current_pass = _find(torch, "_C._current_graph_task_id")()
        if _find(self.group, "reduce_grads") and current_pass != self.last_pass:
            self.last_pass = current_pass
            for each in _find(self.group, "fsdp_params"):
                # There is none before the first use of the group.
                parameter = _find(each, "_unsharded_param", None)
                if (
                    parameter is not None
                    and parameter.requires_grad
                    and parameter.grad is None
                    and _find(each, "unsharded_accumulated_grad") is None
                ):
                    parameter.grad = torch.zeros_like(parameter)
        self.post_backward(*args)


# -- one kernel for many tensors
def _foreach(
    kernel_name: str,
    operation: Callable[..., Any],
    *tensors: Sequence[torch.Tensor],
    args: tuple[Any, ...] = (),
    **options: Any,
) -> list[Any]:
    """Run torch's kernel for many tensors, or ``operation`` on each if this torch lacks it.

    Both are called with the tensors, then ``args``, and ``options`` as keyword arguments.
    """
    with torch.no_grad():
        kernel = _find(torch, kernel_name, None)
        if kernel is not None:
            return list(kernel(*tensors, *args, **options) or ())
        return [operation(*each, *args, **options) for each in zip(*tensors, strict=True)]


def foreach_zero_(tensors: Sequence[torch.Tensor]) -> None:
    """Set each tensor to zero."""
    _foreach("_foreach_zero_", torch.Tensor.zero_, tensors)


def foreach_copy_(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target."""
    _foreach("_foreach_copy_", torch.Tensor.copy_, targets, sources)


def foreach_add_(
    tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor], alpha: float = 1.0
) -> None:
    """Add ``alpha`` times the corresponding tensor of ``others`` to each tensor."""
    _foreach("_foreach_add_", torch.Tensor.add_, tensors, others, alpha=alpha)


def foreach_mul_(tensors: Sequence[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply each tensor by a number, or by a tensor with one element."""
    _foreach("_foreach_mul_", torch.Tensor.mul_, tensors, args=(factor,))


def foreach_norm(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the 2-norm of each tensor, computed in ``dtype``."""
    norm = torch.linalg.vector_norm
    return _foreach("_foreach_norm", norm, tensors, args=(2,), dtype=dtype)


# -- memory
def set_allocator_settings(settings: str, newer: str = "") -> None:
    """Change settings of the accelerator's caching allocator, in the form of PYTORCH_ALLOC_CONF.

    Args:
        settings: settings that every supported torch knows.
        newer: further settings, which are left out if this torch does not know all of them.

    Raises:
        RuntimeError or ValueError: if this torch does not know ``settings``. Which one depends on
            the release.
    """
    change = _find(torch, "_C._accelerator_setAllocatorSettings")
    try:
        change(",".join(filter(None, (settings, newer))))
    except (RuntimeError, ValueError):
        change(settings)


def can_record_memory_history() -> bool:
    """Return whether this build of torch records allocations: not the CPU build, whose CUDA devices
    are simulated."""
    return hasattr(torch._C, "_cuda_record_memory_history")


def record_memory_history() -> None:
    """Record the allocations of CUDA devices from now on, with stack traces."""
    _find(torch, "cuda.memory._record_memory_history")(max_entries=100_000)


def dump_memory_history(path: str) -> None:
    """Write the recorded allocations to a file, and stop recording."""
    _find(torch, "cuda.memory._dump_snapshot")(path)
    _find(torch, "cuda.memory._record_memory_history")(enabled=None)


# -- compilation
def on_compilations(start: Callable[[object], None], end: Callable[[object], None]) -> None:
    """Call ``start`` before and ``end`` after torch.compile compiles a graph in this process."""
    handler = _find(_import("torch._dynamo.callback"), "callback_handler")
    handler.register_start_callback(start)
    handler.register_end_callback(end)


# -- tensors, operations, optimizers
def tensor_version(tensor: torch.Tensor) -> int:
    """Return the version counter of a tensor, which increases with each in-place change."""
    return _find(tensor, "_version")  # type: ignore[no-any-return]


def storage_id(tensor: torch.Tensor) -> int:
    """Return a number that identifies the tensor's storage, even on the meta device, which has no
    addresses. The number may be reused once the storage has been freed."""
    return _find(tensor.untyped_storage(), "_cdata")  # type: ignore[no-any-return]


@cache
def has_mixed_addmm() -> bool:
    """Return whether this build of torch can add a product of 16-bit matrices to a float32 matrix
    on CUDA. Simulated devices have only the kernels of a CPU."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return bool(has_kernel("aten::addmm.dtype_out", "CUDA"))


def has_values(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has values: not if it is on the meta device or a fake tensor."""
    fake = _find(_import("torch._subclasses.fake_tensor"), "FakeTensor")
    return not tensor.is_meta and not isinstance(tensor, fake)


def without_fake_tensors() -> AbstractContextManager[None]:
    """Return a context in which tensors are created as usual, also within ``FakeTensorMode``."""
    fake = _import("torch._subclasses.fake_tensor")
    return _find(fake, "unset_fake_temporarily")()  # type: ignore[no-any-return]


@contextmanager
def runs_on_meta() -> Iterator[None]:
    """Let operations run on the meta device within the block that torch refuses there: ``nonzero``
    finds all elements, and autocast does nothing."""
    settings = _find(_import("torch.fx.experimental"), "_config")
    autocast = torch.autocast

    def autocast_or_nothing(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return nullcontext() if device_type == "meta" else autocast(device_type, *args, **kwargs)

    torch.autocast = autocast_or_nothing  # type: ignore[assignment, misc]
    try:
        with settings.patch(meta_nonzero_assume_all_nonzero=True):
            yield
    finally:
        torch.autocast = autocast  # type: ignore[misc]


def is_mutable_op(op: Any) -> bool:
    """Return whether an operation in ``__torch_dispatch__`` modifies the values of one of its
    arguments. ``Tensor.set_``, with which a parametrization gives a parameter back its own storage,
    does not."""
    is_set = _find(op, "overloadpacket") is torch.ops.aten.set_
    return _find(op, "_schema.is_mutable") and not is_set


def is_item_op(op: Any) -> bool:
    """Return whether an operation reads a number from a tensor, as ``Tensor.item`` does."""
    return op is _find(torch.ops.aten, "_local_scalar_dense.default")


def takes_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer skips its step if the attribute ``found_inf`` is set, as torch's
    fused optimizers do for GradScaler."""
    return bool(_find(optimizer, "_step_supports_amp_scaling", False))


# -- attention whose results can be merged
def flash_for_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    is_causal: bool,
    mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention of queries on the CPU, and the logarithm of the sum of the exponentials
    of their scores.

    An empty block would end the process, and a query whose keys are all masked would have a
    logarithm of 0.

    Args:
        query, key, value: [1, heads, tokens, head_size], all of the same head size; there may be
            fewer key heads.
        mask: what is added to the scores.

    Returns:
        ([1, heads, queries, head_size], [1, heads, queries]).
    """
    compute = _find(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")
    output, lse = compute(query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale)
    return output, lse


def flash_for_cpu_backward(
    grad: torch.Tensor,
    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    output: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    is_causal: bool,
    mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of the queries, keys and values of :func:`flash_for_cpu`.

    Args:
        grad: gradient of the output.
        states: the queries, keys and values.
        output, lse: results over all keys of the queries; these keys may be a part of them.
    """
    compute = _find(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward")
    query_grad, key_grad, value_grad = compute(
        grad, *states, output, lse, 0.0, is_causal, attn_mask=mask, scale=scale
    )
    return query_grad, key_grad, value_grad


def varlen_backward(
    grad: torch.Tensor,
    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    output: torch.Tensor,
    lse: torch.Tensor,
    cu_seqlens: tuple[torch.Tensor, torch.Tensor],
    max_seqlens: tuple[int, int],
    scale: float,
    window: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of the queries, keys and values of ``varlen_attn``.

    Args:
        grad: gradient of the output.
        states: the queries, keys and values [tokens, heads, head_size].
        output: result over all keys of the queries; these keys may be a part of them.
        lse: logarithm of the sum of the exponentials of all their scores, float32 [heads, queries].
        cu_seqlens, max_seqlens: as the kernel's, of the queries and of the keys.
    """
    _import("torch.nn.attention.varlen")  # registers the operator
    compute = _find(torch.ops, "torch_attn._varlen_attn_backward")
    random_state = grad.new_zeros(2, dtype=torch.uint64)  # there is no dropout
    query_grad, key_grad, value_grad = compute(
        grad, *states, output, lse, *cu_seqlens, *max_seqlens,
        window == (-1, 0), random_state, scale, list(window),
    )  # fmt: skip
    return query_grad, key_grad, value_grad
