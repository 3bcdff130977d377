"""Let ``torch.cuda`` answer as a chosen device, on a machine without one.

Tensors on the simulated devices have shapes only: everything that computes must run under
``FakeTensorMode``. Nothing is measured; the figures of a device come from
:mod:`paceline.planner.devices`.

Tensors that are not fake, which have kernels only in the tests, count as memory of their device:
``torch.cuda.memory_allocated()`` and its relatives return their bytes, and what exceeds the
device's memory, or its part of ``torch.cuda.set_per_process_memory_fraction``, raises
``torch.OutOfMemoryError``. Only memory of this process counts.

The CPU build of torch lacks the functions of CUDA in its compiled module, and ``torch.cuda`` calls
many of them. So this module uses private names of torch, and only the releases with which it was
tried are accepted.
"""

import contextlib
import ctypes
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from paceline.core.errors import ConfigError
from paceline.planner.devices import Device
from paceline.simulation.native import (
    SUPPORTED,
    SimulationError,
    build_library,
    check_build,
    check_release,
)
from paceline.simulation.records import ALLOCATION_BYTES

SHIM = Path(__file__).with_name("shim.cpp")
_MAX_DEVICES = 64
_BFLOAT16_CAPABILITY = (8, 0)
_swap_tensors: Callable[[torch.Tensor, torch.Tensor], None] = torch.utils.swap_tensors
_shim: ctypes.CDLL | None = None
_OBSERVER = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_double)
_ORDER_OBSERVER = ctypes.CFUNCTYPE(
    None, ctypes.c_char_p, ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
)
# Kept alive, because the shim calls them.
_observer: object = None
_order_observer: object = None


def simulate_cuda(device: Device, count: int) -> None:
    """Make ``count`` simulated devices visible to this process, until it ends.

    Call it before anything uses a device. A further call changes the kind and the number of the
    devices.

    Raises:
        SimulationError: torch is a GPU build or another release, or the shim cannot be compiled
            or loaded.
        ConfigError: the device is not made by NVIDIA, or ``count`` is out of range.
    """
    global _shim
    if device.compute_capability is None:
        raise ConfigError(
            "`{device}` cannot be simulated",
            code="device-not-simulated",
            allowed="NVIDIA devices of the table of devices, such as `H100-SXM`",
            device=device.name,
        )
    if not 1 <= count <= _MAX_DEVICES:
        raise ConfigError(
            "{count} simulated devices: expected 1 to {max_devices}",
            code="simulated-device-count",
            count=count,
            max_devices=_MAX_DEVICES,
        )
    if _shim is None:
        check_build()
        check_release()
        _shim = load_library(SHIM)
        _shim.paceline_memory_fraction.restype = ctypes.c_double
        if torch.accelerator.current_accelerator() != torch.device("cuda"):
            raise SimulationError(
                "torch {version} did not accept the simulated CUDA device",
                code="simulated-device-rejected",
                allowed=SUPPORTED,
                version=torch.__version__,
            )
    memory_bytes, block_bytes = map(ctypes.c_int64, (device.memory_bytes, ALLOCATION_BYTES))
    _shim.paceline_set_devices(count, memory_bytes, block_bytes)
    _answer_as(device, device.compute_capability, count)


def load_library(source: Path) -> ctypes.CDLL:
    """Compile a C++ source if necessary, and load it into this process.

    Raises:
        SimulationError: it cannot be compiled or loaded.
    """
    path = build_library(source)
    try:
        return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise SimulationError(
            "the compiled {source} cannot be loaded: {reason}",
            code="simulation-not-loaded",
            fix="delete {parent}; it is compiled again",
            source=source.name,
            reason=error,
            parent=path.parent,
        ) from error


def _set_memory_fraction(fraction: float, index: int) -> None:
    assert _shim is not None, "simulate_cuda has not been called"
    _shim.paceline_set_memory_fraction(index, ctypes.c_double(fraction))


def _memory_fraction(index: int) -> float:
    assert _shim is not None, "simulate_cuda has not been called"
    return float(_shim.paceline_memory_fraction(index))


def use_math_attention() -> None:
    """Select the attention of matrix products and softmax, which runs on any device."""
    assert _shim is not None, "simulate_cuda has not been called"
    _shim.paceline_use_math_attention()


def observe_synchronizations(observe: Callable[[str, float | None], None]) -> None:
    """Call ``observe`` for each call for which the host of a GPU would wait for the device.

    Calls of streams, events and devices are known. Operations of tensors are known only to what
    gives simulated tensors values: the tests.

    Args:
        observe: receives the name of the call and, if it waits for an event, when the event was
            recorded, as of ``time.perf_counter``. It is called in the thread that waits.
    """
    global _observer
    assert _shim is not None, "simulate_cuda has not been called"

    def call(name: bytes, recorded_at: float) -> None:
        observe(name.decode(), None if recorded_at < 0 else recorded_at)

    _observer = _OBSERVER(call)
    _shim.paceline_observe_synchronizations(_observer)


def observe_order(observe: Callable[[str, int, int, int | None], None] | None) -> None:
    """Call ``observe`` for each call that orders the work of streams, or stop calling it.

    Args:
        observe: receives what is done, the device, the number of the stream, and the address of an
            event or of memory: ``event.record``, ``event.wait``, ``event.synchronize``,
            ``event.destroy``, ``stream.synchronize``, ``device.synchronize``, ``memory.allocate``,
            ``memory.record_stream`` and ``memory.free``, which includes pinned memory. It is called
            in the thread that does it.
    """
    global _order_observer
    assert _shim is not None, "simulate_cuda has not been called"
    previous = _order_observer  # until the shim does not call it any more
    if observe is None:
        _order_observer = None
    else:
        call = observe
        _order_observer = _ORDER_OBSERVER(lambda what, *values: call(what.decode(), *values))
    _shim.paceline_observe_order(_order_observer)
    del previous


class _Stream(torch.Stream):
    """``torch.cuda.Stream``, whose base class only GPU builds have."""

    def __new__(cls, device: Any = None, priority: int = 0, **ids: Any) -> "_Stream":
        if ids:  # stream_id, device_index, device_type
            return super().__new__(cls, **ids)
        if device is None:
            device = torch.accelerator.current_device_index()
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        return super().__new__(cls, device=device, priority=priority)


class _Event(torch.Event):
    """``torch.cuda.Event``; creates a ``torch.Event``, because ``elapsed_time`` accepts no
    subclass."""

    def __new__(cls, enable_timing: bool = False, *_: Any, **__: Any) -> torch.Event:  # type: ignore[misc]
        return torch.Event("cuda", enable_timing=enable_timing)


def _answer_as(device: Device, capability: tuple[int, int], count: int) -> None:
    """Replace the functions that need a GPU build of torch."""
    accelerator, core, cuda = torch.accelerator, torch._C, torch.cuda

    def index_of(device: Any) -> int:
        if isinstance(device, int):
            return device
        index = None if device is None else torch.device(device).index
        return accelerator.current_device_index() if index is None else index

    _replace(
        core,
        {
            "_cuda_getDeviceCount": lambda: count,
            "_cuda_init": lambda: None,
            "_cuda_getDevice": core._accelerator_getDeviceIndex,
            "_cuda_setDevice": core._accelerator_setDeviceIndex,
            "_cuda_exchangeDevice": core._accelerator_exchangeDevice,
            "_cuda_maybeExchangeDevice": core._accelerator_maybeExchangeDevice,
            "_cuda_synchronize": lambda: core._accelerator_synchronizeDevice(index_of(None)),
            "_cuda_getCurrentRawStream": lambda index: 0,
            "_cuda_isCurrentStreamCapturing": lambda: False,
            "_cuda_emptyCache": lambda: None,
            "_cuda_getArchFlags": lambda: "sm_{}{}".format(*capability),
            "_cuda_memoryStats": core._accelerator_getDeviceStats,
            "_cuda_resetPeakMemoryStats": core._accelerator_resetPeakStats,
            "_cuda_resetAccumulatedMemoryStats": core._accelerator_resetAccumulatedStats,
            "_cuda_setMemoryFraction": _set_memory_fraction,
            "_cuda_getMemoryFraction": _memory_fraction,
            "_cuda_cudaCachingAllocator_is_enabled": lambda: True,
        },
    )
    # recognize() of paceline.planner.devices finds the row by this name.
    name = f"NVIDIA {device.name}"
    properties = SimpleNamespace(
        name=name, major=capability[0], minor=capability[1], total_memory=device.memory_bytes
    )
    generators = tuple(torch.Generator(f"cuda:{index}") for index in range(count))
    _replace(
        cuda,
        {
            "_initialized": True,  # or _lazy_init() would load libcudart
            "_exchange_device": core._accelerator_exchangeDevice,
            "_maybe_exchange_device": core._accelerator_maybeExchangeDevice,
            "default_generators": generators,
            "is_available": lambda: True,
            "device_count": lambda: count,
            "get_device_properties": lambda device=None: properties,
            "get_device_name": lambda device=None: name,
            "get_device_capability": lambda device=None: capability,
            "is_bf16_supported": lambda including_emulation=True: (
                including_emulation or capability >= _BFLOAT16_CAPABILITY
            ),
            "current_stream": accelerator.current_stream,
            "default_stream": lambda device=None: torch.Stream(
                stream_id=0, device_index=index_of(device), device_type=1
            ),
            "set_stream": accelerator.set_stream,
            "stream": lambda stream: contextlib.nullcontext() if stream is None else stream,
            "manual_seed": lambda seed: generators[index_of(None)].manual_seed(seed),
            "manual_seed_all": lambda seed: [
                generator.manual_seed(seed) for generator in generators
            ],
        },
    )
    for module in (cuda, cuda.memory):
        _replace(module, {"mem_get_info": accelerator.get_memory_info})
    for module in (cuda, cuda.streams):
        _replace(module, {"Stream": _Stream, "Event": _Event})
    _replace(
        cuda.nvtx,  # marks for a profiler, which DeepSpeed sets
        dict.fromkeys(
            ("range_push", "range_pop", "mark", "range_start", "range_end"),
            lambda *args, **options: 0,
        ),
    )
    _replace(torch.Tensor, {"record_stream": lambda tensor, stream: None})
    _replace(torch.utils, {"swap_tensors": _swap})
    # As CUDA is "available", FakeTensorMode would first create a real tensor for
    # torch.tensor(..., device="cuda").
    _replace(FakeTensorMode, {"avoid_device_init": True})


def _replace(owner: object, values: Mapping[str, object]) -> None:
    for name, value in values.items():
        setattr(owner, name, value)


def _swap(first: torch.Tensor, second: torch.Tensor) -> None:
    """Swap two tensors, as ``Module.to`` does with fake parameters. torch's function refuses a
    tensor with weak references, such as FakeTensorMode's, which do no harm here."""
    if not (isinstance(first, FakeTensor) and isinstance(second, FakeTensor)):
        _swap_tensors(first, second)
    elif (first.device, first.dtype) != (second.device, second.dtype):
        first.__class__, second.__class__ = second.__class__, first.__class__
        first.__dict__, second.__dict__ = second.__dict__, first.__dict__
        torch._C._swap_tensor_impl(first, second)
