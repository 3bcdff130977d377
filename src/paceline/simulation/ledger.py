"""Record what a simulated step allocates, sends and computes."""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import torch
from torch.distributed.tensor import DTensor

from paceline.distributed.torch_compat import TorchDispatchMode, tree_leaves
from paceline.planner.devices import BFLOAT16, TF32, Device
from paceline.simulation.operations import count_bytes, count_launches, written_tensors
from paceline.simulation.records import (
    ACTIVATIONS,
    ALLOCATION_BYTES,
    COMMUNICATION,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    TEMPORARY,
    MemoryByKind,
)
from paceline.simulation.torch_internals import (
    COLLECTIVES,
    COPIES,
    WITHOUT_WORK,
    adds_to_zeros,
    collective_size,
    flop_formula,
    is_collective,
    is_traceable_wrapper_subclass,
    is_wait,
    operation_name,
    sends_message,
    wrap_shape_propagation,
)

Key = TypeVar("Key")

BUILD, FORWARD, BACKWARD = "build", "forward", "backward"
#: After backward, and after the update of the weights.
UPDATE, SYNCHRONIZE = "update", "synchronize"


@dataclass(frozen=True)
class LedgerWork:
    """Messages, operations and their least time.

    Args:
        messages: collective → number and bytes.
        compute_s: the sum over operations of the time of the arithmetic or of the memory traffic,
            whichever is longer, at the rates of the device.
        link_s: the time of all messages at the rate of the links, if collectives use rings.
        host_s: the time of all copies between device and host, in both directions at once.
        kernels: phase and operation → number of launches, and bytes read and written.
    """

    messages: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    flops: float = 0
    compute_s: float = 0
    link_s: float = 0
    host_s: float = 0
    kernels: Mapping[tuple[str, str], tuple[float, float]] = field(default_factory=dict)

    def plus(self, other: LedgerWork, factor: float = 1) -> LedgerWork:
        """Return this work and ``factor`` times the other."""
        return LedgerWork(
            _add_counts(self.messages, other.messages, factor),
            self.flops + factor * other.flops,
            self.compute_s + factor * other.compute_s,
            self.link_s + factor * other.link_s,
            self.host_s + factor * other.host_s,
            _add_counts(self.kernels, other.kernels, factor),
        )


def _add_counts(
    counts: Mapping[Key, tuple[float, float]],
    others: Mapping[Key, tuple[float, float]],
    factor: float,
) -> Mapping[Key, tuple[float, float]]:
    """Return the sums of numbers and bytes, where the others count ``factor`` times."""
    if not others:
        return counts
    sums = dict(counts)
    for key, (count, size) in others.items():
        before = sums.get(key, (0, 0))
        sums[key] = before[0] + factor * count, before[1] + factor * size
    return sums


class Ledger(TorchDispatchMode):
    """Records allocations, messages and operations on fake tensors of one device type.

    Enter it inside FakeTensorMode, around everything from building the model on. Memory is a log of
    (bytes, storage), so the kinds at the peak are known even of storages that are named only
    later.
    """

    def __init__(self, device: Device, link_bytes_s: float, device_type: str = "cuda") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.link_bytes_s, self.device_type = device, link_bytes_s, device_type
        self.phase = BUILD
        #: The work of each phase since it was last cleared.
        self.work: defaultdict[str, LedgerWork] = defaultdict(LedgerWork)
        # (bytes: + or -; number of the storage; phase)
        self._log: list[tuple[int, int, str]] = []
        self._kinds: list[str] = []  # by number of the storage
        self._numbers: weakref.WeakKeyDictionary[torch.UntypedStorage, int]
        self._numbers = weakref.WeakKeyDictionary()
        self._sizes: dict[int, int] = {}
        self._computes_shapes = 0
        #: Bytes of tensors in host memory, now and at the peak.
        self.host_bytes = self.host_peak_bytes = 0
        self._on_host: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Record what happens within the block as part of ``phase``."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    # -- memory
    def name(self, kind: str, tensors: Iterable[object]) -> None:
        """Set the kind of the tensors' storages, whatever they were taken for."""
        for storage in self._storages(list(tensors)):
            self._kinds[self._see(storage, kind)] = kind

    def peak(self) -> MemoryByKind:
        """Return the bytes of each kind at the peak of the steps."""
        now = peak = at = 0
        for index, (change, _, phase) in enumerate(self._log, 1):
            now += change
            if now > peak and phase != BUILD:
                peak, at = now, index
        kinds: Counter[str] = Counter()
        for change, number, _ in self._log[:at]:
            kinds[self._kinds[number]] += change
        return MemoryByKind(
            parameters=kinds[PARAMETERS],
            gradients=kinds[GRADIENTS],
            optimizer=kinds[OPTIMIZER],
            activations=kinds[ACTIVATIONS],
            temporary=kinds[TEMPORARY],
            communication=kinds[COMMUNICATION],
        )

    def _storages(self, value: object) -> Iterator[torch.UntypedStorage]:
        for leaf in tree_leaves(value):
            if not isinstance(leaf, torch.Tensor) or leaf.device.type != self.device_type:
                continue
            if is_traceable_wrapper_subclass(leaf):  # such as a DTensor: what it contains
                names, _ = leaf.__tensor_flatten__()
                yield from self._storages([getattr(leaf, name) for name in names])
            else:
                yield leaf.untyped_storage()

    def _see(self, storage: torch.UntypedStorage, kind: str) -> int:
        """Record the current size of a storage; return its number."""
        number = self._numbers.get(storage)
        if number is None:
            number = self._numbers[storage] = len(self._kinds)
            self._kinds.append(kind)
            # The Python object of a storage exists as long as the storage.
            weakref.finalize(storage, self._resize, number, 0)
        self._resize(number, -(-storage.size() // ALLOCATION_BYTES) * ALLOCATION_BYTES)
        return number

    def _see_on_host(self, storage: torch.UntypedStorage) -> None:
        if storage not in self._on_host:
            self._on_host.add(storage)
            self._add_host_bytes(storage.size())
            weakref.finalize(storage, self._add_host_bytes, -storage.size())

    def _add_host_bytes(self, change: int) -> None:
        self.host_bytes += change
        self.host_peak_bytes = max(self.host_peak_bytes, self.host_bytes)

    def _resize(self, number: int, size: int) -> None:
        change = size - self._sizes.get(number, 0)
        if change:
            self._log.append((change, number, self.phase))
        self._sizes[number] = size

    # -- the mode
    def __enter__(self) -> Self:
        self._resize_storage = plain_resize = torch.UntypedStorage.resize_

        # FSDP frees and allocates its buffers by resizing them.
        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = plain_resize(storage, size)
            if storage in self._numbers:
                self._see(storage, TEMPORARY)
            return result

        # DTensor computes shapes with fake tensors of the full size in the mode that is active.
        def counted(plain: Callable[..., Any]) -> Callable[..., Any]:
            def propagate(*args: Any, **kwargs: Any) -> Any:
                self._computes_shapes += 1
                try:
                    return plain(*args, **kwargs)
                finally:
                    self._computes_shapes -= 1

            return propagate

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign,assignment]
        self._restore_propagation = wrap_shape_propagation(counted)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *args: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize_storage  # type: ignore[method-assign]
        self._restore_propagation()
        super().__exit__(*args)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # called again with the local tensors
        if is_wait(func):
            out = args[0]  # the kernel for fake tensors would make a copy
        elif self.phase == BACKWARD and not torch.is_grad_enabled() and adds_to_zeros(func, args):
            out = torch.ops.aten.index_put_.default(*args, **kwargs)
        else:
            out = func(*args, **kwargs)
        if self._computes_shapes:
            return out
        name = operation_name(func)
        kind = COMMUNICATION if is_collective(func) else self._kind_now()
        for storage in self._storages(out):
            self._see(storage, kind)
        if is_collective(func):
            if sends_message(func):
                self._count_message(func, args, out)
        elif name == "split_with_sizes_copy" and "out" in kwargs:  # FSDP's gathered weights
            self.name(COMMUNICATION, kwargs["out"])
            self._count_work(func, args, kwargs, kwargs["out"])
        elif name in COPIES:
            if not self._count_copy(args, out):
                self._count_work(func, args, kwargs, out)
        elif name not in WITHOUT_WORK and not func.is_view:
            self._count_work(func, args, kwargs, out)
        return out

    def _kind_now(self) -> str:
        # with gradients, backward recomputes activations
        is_recomputing = self.phase == BACKWARD and torch.is_grad_enabled()
        return ACTIVATIONS if self.phase == FORWARD or is_recomputing else TEMPORARY

    def _count_message(self, func: Any, args: Any, out: Any) -> None:
        name = COLLECTIVES.get(operation_name(func), operation_name(func))
        if name == "receive":
            return
        tensors = [leaf for leaf in tree_leaves((args, out)) if isinstance(leaf, torch.Tensor)]
        buffers = [tensor for tensor in tensors if tensor.device.type == self.device_type]
        size = max((tensor.nbytes for tensor in buffers), default=0)
        if name in ("all_gather", "reduce_scatter"):
            self.name(COMMUNICATION, [max(buffers, key=lambda buffer: buffer.nbytes)])
        ranks = collective_size(func, args)
        sent = size if name == "send" else size * (ranks - 1) / ranks
        rounds = 2 if name == "all_reduce" else 1  # around the ring
        self._add(LedgerWork({name: (1, size)}, link_s=rounds * sent / self.link_bytes_s))

    def _count_copy(self, args: Any, out: torch.Tensor) -> bool:
        """Count a copy between device and host. Return whether it is one."""
        source = next(leaf for leaf in reversed(args) if isinstance(leaf, torch.Tensor))
        devices = source.device.type, out.device.type
        is_small = out.nbytes < ALLOCATION_BYTES  # such as a step count
        is_within = devices[0] == devices[1]
        if is_small or is_within or set(devices) != {self.device_type, "cpu"}:
            return False
        host = out if devices[1] == "cpu" else source
        self._see_on_host(host.untyped_storage())
        name = "copy_to_host" if devices[1] == "cpu" else "copy_to_device"
        seconds = out.nbytes / 2 / self.device.host_link_bytes_s
        self._add(LedgerWork({name: (1, out.nbytes)}, host_s=seconds))
        return True

    def _count_work(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        written = written_tensors(func, args, out)
        results = [each for each in written if each.device.type == self.device_type]
        if not results:
            return
        count = flop_formula(func)
        # The formulas do not take the dtype of the result, which some overloads have.
        operands = [each for each in args if not isinstance(each, torch.dtype)]
        flops = 0 if count is None else count(*operands, **kwargs, out_val=out)
        moved = count_bytes(func, args, kwargs, written)
        rate = self.device.flops_s(_format_of(results[0])) or self.device.float32_flops_s
        seconds = max(flops / rate, moved / self.device.memory_bandwidth_bytes_s)
        kernel = {(self.phase, operation_name(func)): (count_launches(func, args), moved)}
        self._add(LedgerWork(flops=flops, compute_s=seconds, kernels=kernel))

    def _add(self, work: LedgerWork) -> None:
        self.work[self.phase] = self.work[self.phase].plus(work)


def _format_of(result: torch.Tensor) -> str | None:
    """Return the number format in which a GPU computes a matrix product (see
    :meth:`~paceline.planner.devices.Device.flops_s`)."""
    if result.dtype != torch.float32:
        return BFLOAT16
    return TF32 if torch.backends.cuda.matmul.fp32_precision == "tf32" else None
