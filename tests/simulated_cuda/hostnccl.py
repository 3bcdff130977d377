"""A backend of torch.distributed for CUDA tensors with the rules of NCCL, over Gloo: for simulated
devices, and for several ranks on one GPU.

- A collective is asynchronous: a thread of its communicator runs it after a random delay, in the
  order of issue, once the work that the current stream had at the issue is done. It reads its
  inputs then. Its results appear only when a stream waits for it, or for a later collective of the
  communicator; until then its outputs are NaN. So values are wrong if a wait is missing, and a wait
  fails if a tensor was modified or freed before. Unlike with NCCL, the host waits as well.
- It refuses the tensors and operations that NCCL refuses.
- Creating a group of an initialized communicator splits it, a collective of all its ranks.
- A collective that takes longer than the timeout ends the process, as NCCL's watchdog does.
- Ranks must issue their collectives on all communicators in one order; see :mod:`nccl_orders`.
"""

import ctypes
import itertools
import os
import queue
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from nccl_operations import DTYPES, FLOAT8, OPERATIONS, Operation, synchronize
from nccl_orders import LOG, check_orders
from stream_order.clocks import Clock
from stream_order.tracing import hidden, issue_collective, wait_for_collective
from torch._C._distributed_c10d import PythonCallbackWork

NAME = "hostnccl"
#: Environment variable: the seed of the delays.
SEED = "PACELINE_TEST_NCCL_SEED"
MAX_DELAY_S = 0.008
_CUDA = torch.device("cuda")
_CUSTOM = dist.ProcessGroup.BackendType.CUSTOM
_GLOO_TIMEOUT = timedelta(days=1)  # the watchdog ends the process earlier


class Call:
    """An issued collective, or a batch of operations that run together."""

    def __init__(self, number: int, operations: list[Operation], timeout_s: float) -> None:
        self.number, self.operations, self.timeout_s = number, operations, timeout_s
        self.issued_at = time.monotonic()
        self.ready: torch.Event | None = None
        self.is_done = threading.Event()
        self.error: BaseException | None = None
        #: For the checker of streams: what is done when the call is done.
        self.end: Clock | None = None
        self.versions = [
            (tensor, tensor._version)
            for operation in operations
            for tensor in operation.tensors
            if not tensor.is_inference()
        ]

    def __str__(self) -> str:
        names = [f"{name}({numel}, {dtype})" for name, numel, dtype, _ in self.summaries]
        return f"SeqNum={self.number}, " + ", ".join(names)

    @property
    def summaries(self) -> list[tuple[str, int | None, str | None, int | None]]:
        return [operation.summary for operation in self.operations]

    def writes_inputs_of(self, later: "Call") -> bool:
        written = [_extent(each) for operation in self.operations for each in operation.outputs]
        read = [_extent(each) for operation in later.operations for each in operation.inputs]
        return any(a < d and c < b for (a, b), (c, d) in itertools.product(written, read))

    def check_memory(self) -> None:
        """Raise if memory that the call uses has been freed."""
        for tensor in (each for operation in self.operations for each in operation.tensors):
            required = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
            if tensor.numel() and required > tensor.untyped_storage().nbytes():
                raise RuntimeError(f"memory of a collective was freed before it ended: {self}")

    def release(self) -> None:
        """Release the tensors."""
        self.versions = []
        for operation in self.operations:
            operation.inputs = operation.outputs = operation.sources = operation.targets = []

    def check_unmodified(self) -> None:
        """Raise if a tensor was modified since the issue, other than by this backend."""
        if any(tensor._version != version for tensor, version in self.versions):
            raise RuntimeError(
                f"a tensor of a collective was modified between its issue and the wait: {self}"
            )


class HostNccl(dist.ProcessGroupGloo):
    """The communicator of a group. The base class runs the operations in host memory."""

    supports_splitting = supports_coalescing = True
    options = None

    def __init__(self, settings: Any) -> None:
        super().__init__(settings.store, settings.group_rank, settings.group_size, settings.timeout)
        self._set_default_timeout(_GLOO_TIMEOUT)
        self.store, self.timeout = settings.store, settings.timeout
        self.label = str(settings.group_id)
        self.ranks = list(settings.global_ranks_in_group) or list(range(self.size()))
        self.has_all_ranks = dist.group.WORLD is None
        self.device: torch.device | None = None
        self._stream: torch.Stream | None = None
        self._published: torch.Event | None = None
        self._batch: list[Operation] | None = None
        self._numbers = itertools.count()
        self._lock = threading.RLock()
        self._queue: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        #: Calls whose results no stream has waited for.
        self.pending: deque[Call] = deque()
        #: Calls whose results were written. As in torch, their tensors are freed after the wait.
        self._stash: deque[Call] = deque()
        self._random = random.Random(f"{os.environ.get(SEED, 0)} {self.label} {self.rank()}")
        # The destructor joins threads while it holds the GIL.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
        LOG.start(self.ranks[self.rank()])
        threading.Thread(target=self._run, name=f"nccl-{self.label}", daemon=True).start()
        _watch(self)

    # -- groups
    def eager_connect_single_device(self, device: torch.device) -> None:
        self.device = device
        parent = None if dist.group.WORLD is None else host_nccl_of(dist.group.WORLD)
        if parent is not None:
            parent.split()

    def perform_nocolor_split(self, device: torch.device) -> None:
        self.split()

    def split(self) -> None:
        """Take part in splitting this communicator. The host waits for all ranks."""
        self._wait(self._enqueue([Operation("split", [], [], lambda *_: synchronize(self))], None))

    def split_group(
        self, ranks: list[int], timeout: Any = None, opts: Any = None, group_name: str = "",
        group_desc: str = "", device_types: Any = None,
    ) -> dist.ProcessGroup | None:  # fmt: skip
        """Split as torch.distributed.split_group does."""
        self.split()
        if self.rank() not in ranks:
            return None
        store = dist.PrefixStore(f"{group_name}/", self.store)
        rank, size = ranks.index(self.rank()), len(ranks)
        child = HostNccl(
            SimpleNamespace(
                store=store, group_rank=rank, group_size=size, timeout=timeout or self.timeout,
                group_id=group_name, global_ranks_in_group=[self.ranks[each] for each in ranks],
            )
        )  # fmt: skip
        child.device = self.device
        group = dist.ProcessGroup(store, rank, size)
        group._set_default_backend(_CUSTOM)
        group._register_backend(_CUDA, _CUSTOM, child)
        group._set_group_name(group_name)
        group._set_group_desc(group_desc or "undefined")
        return group

    def close(self) -> None:
        """Raise if a stream has not waited for a collective or, for the group of all ranks, if
        ranks issued their collectives in different orders."""
        self._queue.put(None)
        if self.has_all_ranks:  # torch closes it after the other groups
            check_orders(self)
        for call in self.pending:
            if call.error is None:
                raise RuntimeError(f"{self._place}: no stream waited for {call}")

    @property
    def _place(self) -> str:
        return f"rank {self.ranks[self.rank()]}, communicator {self.label} of ranks {self.ranks}"

    # -- issue
    def issue(self, operations: list[Operation], timeout_ms: int = -1) -> PythonCallbackWork:
        """Issue operations that run together, or add them to the open batch."""
        for operation in operations:
            for tensor in operation.tensors:
                self._check(tensor)
        if self._batch is not None:
            self._batch += operations
            return PythonCallbackWork(lambda timeout: True)
        call = self._enqueue(operations, timeout_ms / 1000 if timeout_ms > 0 else None)
        return PythonCallbackWork(lambda timeout: self._wait(call))

    def start_coalescing(self, device: torch.device) -> None:
        self._batch = []

    def end_coalescing(self, device: torch.device) -> PythonCallbackWork:
        operations, self._batch = self._batch or [], None
        return self.issue(operations)

    def _check(self, tensor: torch.Tensor) -> None:
        if not tensor.is_cuda or tensor.layout != torch.strided:
            raise ValueError("Tensors must be CUDA and dense")
        is_contiguous = tensor.is_contiguous() or any(
            tensor.dim() == dim and tensor.is_contiguous(memory_format=layout)
            for dim, layout in ((4, torch.channels_last), (5, torch.channels_last_3d))
        )
        if not is_contiguous:  # NCCL sends the wrong memory in a message, without an error
            raise ValueError("Tensors must be contiguous")
        if tensor.dtype not in DTYPES:
            raise TypeError(
                "Input tensor data type is not supported for NCCL process group:"
                f" {str(tensor.dtype).removeprefix('torch.')}"
            )
        if self.device is not None and tensor.device != self.device:
            raise RuntimeError(
                "Attempt to perform collective on tensor not on device passed to"
                f" init_process_group: {tensor.device}, {self.device}"
            )

    def _enqueue(self, operations: list[Operation], timeout_s: float | None) -> Call:
        devices = [each.device for operation in operations for each in operation.tensors]
        current = torch.device("cuda", torch.accelerator.current_device_index())
        self.device = self.device or (devices or [current])[0]
        with self._lock:
            timeout_s = timeout_s or self.timeout.total_seconds()
            call = Call(next(self._numbers), operations, timeout_s)
            with hidden():
                call.ready = torch.accelerator.current_stream(self.device).record_event()
            self._announce(call)
            LOG.add({"group": self.label, "ranks": self.ranks, "operations": call.summaries})
            self.pending.append(call)
            self._queue.put(call)
        return call

    def _announce(self, call: Call) -> None:
        """Tell the checker of streams, if there is one, that a call is issued."""
        assert self.device is not None
        for operation in call.operations:
            call.end = issue_collective(
                operation.name, self.label, operation.inputs, operation.outputs, self.device
            )

    # -- run
    def _run(self) -> None:
        with hidden():
            self._run_calls()

    def _run_calls(self) -> None:
        error: BaseException | None = None
        while (call := self._queue.get()) is not None:
            try:
                if error is None:
                    self._execute(call)
            except BaseException as caught:
                error = caught
            call.error = error
            call.is_done.set()

    def _execute(self, call: Call) -> None:
        time.sleep(MAX_DELAY_S * self._random.random() ** 3)
        assert self.device is not None
        if self._stream is None:
            torch.accelerator.set_device_index(self.device.index or 0)
            self._stream = torch.Stream(self.device)
        with self._lock:
            before = [each for each in self.pending if each.number < call.number]
            needed = [each.number for each in before if each.writes_inputs_of(call)]
            self._publish(max(needed, default=-1))
        call.check_memory()
        self._stream.wait_event(call.ready)
        with self._stream:
            for operation in call.operations:
                operation.sources = [_to_host(tensor) for tensor in operation.inputs]
                operation.targets = [_empty_on_host(tensor) for tensor in operation.outputs]
            for tensor in (each for operation in call.operations for each in operation.outputs):
                if tensor.is_floating_point() and tensor.dtype not in FLOAT8:
                    _write(tensor, None)
        self._stream.synchronize()
        works: list[dist.Work] = []
        for operation in call.operations:
            if not operation.tensors or any(tensor.numel() for tensor in operation.tensors):
                works += operation.run(operation.sources, operation.targets) or []
        for work in works:
            work.wait()

    def _wait(self, call: Call) -> bool:
        """Let the current stream wait for a call."""
        call.is_done.wait()
        if call.error is not None:
            raise RuntimeError(f"{self._place}: {call.error}") from call.error
        assert self.device is not None
        wait_for_collective(call.end, self.device)
        with self._lock, hidden():
            self._publish(call.number)
            if self._published is not None:
                torch.accelerator.current_stream(self.device).wait_event(self._published)
            while self._stash and self._stash[0].number <= call.number:
                self._stash.popleft().release()
        return True

    def _publish(self, last: int) -> None:
        """Write the results of the calls up to a number."""
        while self.pending and self.pending[0].number <= last:
            call = self.pending.popleft()
            call.check_memory()
            call.check_unmodified()
            assert self._stream is not None
            with self._stream:
                for operation in call.operations:
                    for output, target in zip(operation.outputs, operation.targets, strict=True):
                        _write(output, target)
            self._published = self._stream.record_event()
            self._stash.append(call)


def host_nccl_of(group: dist.ProcessGroup) -> HostNccl | None:
    """Return the communicator of a group, or None if the group has another backend."""
    try:
        backend = group._get_backend(_CUDA)
    except RuntimeError:
        return None
    return backend if isinstance(backend, HostNccl) else None


# -- memory
def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _empty_on_host(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.numel(), dtype=tensor.dtype, pin_memory=True)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    return _empty_on_host(tensor).copy_(_flat(tensor), non_blocking=True)


def _write(output: torch.Tensor, values: torch.Tensor | None) -> None:
    """Copy values into an output, or fill it with NaN. Its version stays, as NCCL does not change
    it either."""
    keep = torch.autograd._unsafe_preserve_version_counter
    with torch.inference_mode() if output.is_inference() else keep(output), torch.no_grad():
        if values is None:
            _flat(output).fill_(torch.nan)
        else:
            _flat(output).copy_(values, non_blocking=True)


def _kernel(name: str) -> Callable[..., Any]:
    """Return the kernel of an operator of c10d for CUDA tensors."""
    schema = getattr(torch.ops.c10d, name).default._schema
    names = [argument.name for argument in schema.arguments]

    def run(*args: Any, **options: Any) -> Any:
        call = dict(zip(names, args, strict=False)) | options
        comm = host_nccl_of(dist.ProcessGroup.unbox(call["process_group"]))
        if comm is None:
            raise RuntimeError(f"c10d::{name} on CUDA tensors needs a group of {NAME}")
        work = comm.issue(OPERATIONS[name](comm, call), call.get("timeout", -1)).boxed()
        return (args[0], work) if len(schema.returns) == 2 else work

    return run


# -- the watchdog
_watched: list[HostNccl] = []


def _watch(comm: HostNccl) -> None:
    _watched.append(comm)
    if len(_watched) == 1:
        threading.Thread(target=_abort_when_late, name="nccl-watchdog", daemon=True).start()


def _abort_when_late() -> None:
    while True:
        time.sleep(0.1)
        now = time.monotonic()
        for comm in tuple(_watched):
            for call in tuple(comm.pending):
                if not call.is_done.is_set() and now - call.issued_at > call.timeout_s:
                    _abort(comm, call, now - call.issued_at)


def _abort(comm: HostNccl, call: Call, age_s: float) -> None:
    sys.stderr.write(
        f"[{comm._place}] Watchdog caught collective operation timeout: {call},"
        f" Timeout(ms)={call.timeout_s * 1000:.0f}, ran for {age_s * 1000:.0f} milliseconds before"
        " timing out. To avoid data inconsistency, the process is aborted.\n"
    )
    sys.stderr.flush()
    os.abort()


# -- registration
_library: torch.library.Library | None = None


def create(settings: Any, options: Any) -> HostNccl:
    """Create the communicator of a new group; called by torch.distributed."""
    global _library
    if _library is None:
        _library = torch.library.Library("c10d", "IMPL")
        for name in OPERATIONS:
            _library.impl(name, _kernel(name), "CUDA")
        for name, replacement in (
            ("_start_coalescing", HostNccl.start_coalescing),
            ("_end_coalescing", HostNccl.end_coalescing),
            ("split_group", HostNccl.split_group),
            ("shutdown", HostNccl.close),
        ):
            _replace(name, replacement)
        if "wait" in vars(PythonCallbackWork):  # let replacements of Work.wait apply
            del PythonCallbackWork.wait
    return HostNccl(settings)


def _replace(name: str, replacement: Callable[..., Any]) -> None:
    original = getattr(dist.ProcessGroup, name)

    def method(group: dist.ProcessGroup, *args: Any, **options: Any) -> Any:
        comm = host_nccl_of(group)
        target = partial(original, group) if comm is None else partial(replacement, comm)
        return target(*args, **options)

    setattr(dist.ProcessGroup, name, method)


def register() -> None:
    """Make the backend available as :data:`NAME`."""
    dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cuda"])
