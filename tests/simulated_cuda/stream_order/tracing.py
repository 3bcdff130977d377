"""Observe the streams of this process, and write what :mod:`stream_order.checker` finds to a file.

A process with simulated devices is checked if :data:`VARIABLE` names a folder, from its first
process group on. Its ranks should use the backend ``hostnccl``: collectives over Gloo count as work
of the current stream.
"""

import atexit
import contextlib
import ctypes
import json
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from call_sites import find_sites
from stream_order.checker import Finding, StreamOrderChecker, Use
from stream_order.clocks import Clock, Stream

from paceline.simulation.cuda import load_library, observe_order

#: Environment variable: the folder of the findings.
VARIABLE = "PACELINE_TEST_STREAM_ORDER"
OBSERVER = Path(__file__).with_name("observe.cpp")
_EXCLUDED = (
    os.path.dirname(__file__) + os.sep,
    *(
        str(Path(__file__).parents[1] / name)
        for name in ("hostnccl.py", "nccl_operations.py", "synchronizations.py")
    ),
)
#: The checker of this process; None: it is not checked.
CHECKER: StreamOrderChecker | None = None
_thread = threading.local()
_kept_alive: list[object] = []


class _Access(ctypes.Structure):
    """As in observe.cpp."""

    _fields_ = (
        ("memory", ctypes.c_void_p),
        ("begin", ctypes.c_int64),
        ("end", ctypes.c_int64),
        ("stream", ctypes.c_int64),
        ("device", ctypes.c_int32),
        ("writes", ctypes.c_int32),
    )

    def as_use(self) -> Use:
        stream = None if self.device < 0 else (self.device, self.stream)
        return Use(self.memory, self.begin, self.end, stream, bool(self.writes))


_OBSERVER = ctypes.CFUNCTYPE(
    None, ctypes.c_char_p, ctypes.POINTER(_Access), ctypes.c_int, ctypes.c_bool, ctypes.c_bool
)


# -- this process
def check_if_requested() -> None:
    """Check this process from now on, if the environment names a folder."""
    folder = os.environ.get(VARIABLE)
    if folder is not None and CHECKER is None:
        path = Path(folder) / f"{os.getpid()}.jsonl"
        path.touch()  # shows that the process is checked
        check_streams(StreamOrderChecker(partial(_write, path, set()), find_site))


def check_streams(checker: StreamOrderChecker) -> None:
    """Check this process from now on. Nothing may be observed when the interpreter ends, because
    Python cannot be called any more then."""
    global CHECKER
    CHECKER = checker
    library = load_library(OBSERVER)
    handlers = {
        "event.record": lambda stream, event: checker.record(event, stream),
        "event.wait": lambda stream, event: checker.wait(stream, event),
        "event.synchronize": lambda stream, event: checker.synchronize_event(event),
        "event.destroy": lambda stream, event: checker.destroy(event),
        "stream.synchronize": lambda stream, _: checker.synchronize_stream(stream),
        "device.synchronize": lambda stream, _: checker.synchronize_device(stream[0]),
        "memory.allocate": lambda stream, address: checker.allocate(address, stream),
        "memory.record_stream": lambda stream, address: checker.record_stream(address, stream),
        "memory.free": lambda stream, address: checker.free(address),
    }

    def observe(what: str, device: int, stream: int, address: int | None) -> None:
        if what.startswith("memory.") or not _is_hidden():
            handlers[what]((device, stream), address or 0)

    def observe_operation(
        name: bytes, accesses: Any, count: int, host_waits: bool, by_host: bool
    ) -> None:
        if not _is_hidden():
            uses = [accesses[index].as_use() for index in range(count)]
            if by_host:
                checker.host_access(name.decode(), uses)
            else:
                checker.launch(name.decode(), uses, host_waits=host_waits)

    observer = _OBSERVER(observe_operation)
    _kept_alive.append(observer)
    observe_order(observe)
    library.stream_order_observe(observer)
    atexit.register(lambda: (observe_order(None), library.stream_order_observe(None)))
    _observe_reads()


def _observe_reads() -> None:
    """Observe the methods that read host memory without an operation of torch."""
    for name in ("numpy", "tolist", "__array__"):
        setattr(torch.Tensor, name, _observed(name, getattr(torch.Tensor, name)))


def _observed(name: str, method: Any) -> Any:
    def call(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        if CHECKER is not None and tensor.device.type == "cpu" and not _is_hidden():
            CHECKER.host_access(f"Tensor.{name}", [_use(tensor, None, writes=False)])
        return method(tensor, *args, **options)

    return call


def find_site() -> str:
    """Return the lines that run now: of Paceline and, in parentheses, the innermost of all."""
    site, library = find_sites(sys._getframe(1), _EXCLUDED)
    if not site:
        return library or "backward"
    return f"{site} ({library})" if library else site


def _write(path: Path, known: set[tuple[str, str, str]], finding: Finding) -> None:
    key = (finding.kind, finding.first, finding.second)
    if key not in known:
        known.add(key)
        with path.open("a") as file:
            file.write(json.dumps(asdict(finding)) + "\n")


def read_findings(folder: Path) -> list[Finding]:
    """Return the findings of all processes."""
    return [
        Finding(**json.loads(line))
        for path in sorted(folder.glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]


# -- what takes the place of NCCL
def _is_hidden() -> bool:
    return getattr(_thread, "is_hidden", False)


@contextlib.contextmanager
def hidden() -> Iterator[None]:
    """Do not check this thread meanwhile: what it does takes the place of NCCL's own work. Memory
    that it allocates or frees counts nonetheless."""
    before, _thread.is_hidden = _is_hidden(), True
    try:
        yield
    finally:
        _thread.is_hidden = before


def issue_collective(
    operation: str,
    communicator: str,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    device: torch.device,
) -> Clock | None:
    """A collective is issued. Return what :func:`wait_for_collective` needs."""
    if CHECKER is None:
        return None
    uses = [
        *(_use(tensor, communicator, writes=False) for tensor in inputs),
        *(_use(tensor, communicator, writes=True) for tensor in outputs),
    ]
    current = _current_stream(device)
    used = [use for use in uses if use.begin < use.end]
    return CHECKER.collective(operation, communicator, current, used)


def wait_for_collective(end: Clock | None, device: torch.device) -> None:
    """The current stream waits for a collective."""
    if CHECKER is not None and end is not None:
        CHECKER.wait_for_collective(_current_stream(device), end)


def _current_stream(device: torch.device) -> Stream:
    stream = torch.accelerator.current_stream(device)
    return stream.device_index, stream.stream_id


def _use(tensor: torch.Tensor, stream: Stream | None, writes: bool) -> Use:
    """Return the use of a whole tensor that is contiguous."""
    begin = tensor.storage_offset() * tensor.element_size()
    address = tensor.untyped_storage().data_ptr()
    return Use(address, begin, begin + tensor.nbytes, stream, writes)
