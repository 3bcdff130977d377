"""Copies between host and device for which the host does not wait.

A blocking copy, like reading a value with ``item()``, makes the host wait until the device has run
everything that is queued, and the device is then idle until the host has queued more.
"""

from collections.abc import Sequence

import torch

from paceline.distributed.progress import PROGRESS

#: Devices with asynchronous copies from and to pinned memory.
_ASYNCHRONOUS = ("cuda", "xpu")


class HostCopy:
    """A copy of a small tensor in host memory. On a GPU, it is an asynchronous copy into pinned
    memory that starts with the construction; :meth:`read` waits for what was queued before. On a
    CPU it is the tensor itself; on other devices, :meth:`read` copies it.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host, self._event = tensor.detach(), None
        if tensor.device.type in _ASYNCHRONOUS:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor.detach(), non_blocking=True)
            self._event = torch.Event(tensor.device)
            self._event.record()

    def read(self) -> torch.Tensor:
        """Return the values."""
        if self._event is not None:
            with PROGRESS.waiting("the device"):
                self._event.synchronize()
            self._event = None
        return self._host.cpu()


def tensor_of(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return numbers as a tensor on a device. The copy to a GPU is asynchronous."""
    if device.type not in _ASYNCHRONOUS:
        return torch.tensor(numbers, dtype=dtype, device=device)
    return torch.tensor(numbers, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
