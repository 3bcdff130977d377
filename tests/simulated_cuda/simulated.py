"""Simulated CUDA devices with values: CUDA tensors in the memory of the host, computed by the
kernels of the CPU, and collectives over Gloo, or over a backend with the rules of NCCL if the
environment variable :data:`BACKEND` names it.

In a process that tests start with :data:`VARIABLES`, ``preload/sitecustomize.py`` simulates the
devices before anything else is imported, so commands, ranks and data workers have them. Functions
for :func:`ranks.run_ranks` call :func:`simulate_values` first.
"""

import os
from pathlib import Path

import hostnccl
import torch
import torch.distributed as dist
from planted import plant
from stream_order.deferring import defer_if_requested
from stream_order.tracing import check_if_requested
from synchronizations import record_synchronizations
from torch._subclasses.fake_tensor import FakeTensor

from paceline.planner.devices import find_device
from paceline.simulation.cuda import load_library, simulate_cuda, use_math_attention

DEVICE = "H100-SXM"
NUM_DEVICES = 4
#: Environment variable: the backend of process groups, ``gloo`` or ``hostnccl``. It is read when a
#: process creates its first group, because the process may be forked from one without it.
BACKEND = "PACELINE_TEST_BACKEND"
VALUES = Path(__file__).with_name("values.cpp")
_histc = torch.histc
_resize, _clone = torch.UntypedStorage.resize_, torch.UntypedStorage.clone
_default_backend = dist.get_default_backend_for_device


def simulate_values(device: str = DEVICE, count: int = NUM_DEVICES) -> None:
    """Simulate devices with values in this process, until it ends.

    The CPU build cannot create, copy or resize a storage of CUDA memory, so these functions of
    storages are replaced.
    """
    simulate_cuda(find_device(device)[0], count)
    load_library(VALUES)
    use_math_attention()
    dist.Backend.default_device_backend_map["cuda"] = "gloo"
    hostnccl.register()
    dist.get_default_backend_for_device = _choose_backend
    torch.UntypedStorage.resize_ = _resize_storage
    torch.UntypedStorage.clone = _clone_storage
    torch.Tensor.record_stream = _record_stream
    torch.histc = _count_integers
    record_synchronizations()
    check_if_requested()
    defer_if_requested()


def _choose_backend(device: str | torch.device) -> str:
    if torch.device(device).type != "cuda":
        return _default_backend(device)
    plant()
    check_if_requested()
    defer_if_requested()
    return os.environ.get(BACKEND, "gloo")


def _count_integers(tensor: torch.Tensor, *args: int, **settings: int) -> torch.Tensor:
    """Compute ``torch.histc``, which takes integers on CUDA devices only."""
    if tensor.device.type != "cuda" or tensor.is_floating_point():
        return _histc(tensor, *args, **settings)
    return _histc(tensor.float(), *args, **settings).to(tensor.dtype)


def _record_stream(tensor: torch.Tensor, stream: torch.Stream) -> None:
    if not isinstance(tensor, FakeTensor):
        torch.ops.aten.record_stream(tensor, stream)


def _as_tensor(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _clone_storage(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    if storage.device.type != "cuda":
        return _clone(storage)
    return _as_tensor(storage).clone().untyped_storage()


def _resize_storage(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    if storage.device.type != "cuda":
        return _resize(storage, size)
    torch.ops.simulated_cuda.resize_storage(_as_tensor(storage), size)
    return storage
