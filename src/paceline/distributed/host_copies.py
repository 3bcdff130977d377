"""Copies between host and device for which the host does not wait, through pinned host memory.

A blocking copy, like reading a value with ``item()``, makes the host wait until the device has run
everything that is queued, and the device is then idle until the host has queued more.
"""

from collections.abc import Sequence

import torch

from paceline.distributed.timing.progress import DEVICE, PROGRESS

#: Device types with streams and pinned host memory. On others, copies are synchronous.
_WITH_STREAMS = ("cuda", "xpu")


class CopyStream:
    """Copies in one direction, in the order of the calls. They overlap with the work of the
    device's current stream that is issued later."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.Stream(device) if device.type in _WITH_STREAMS else None

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy, once the work that was issued so far is done. Both tensors must exist until
        :meth:`mark` of the copy has been waited for; host memory may be freed earlier."""
        if self._stream is None:
            target.copy_(source)
            return
        self._stream.wait_stream(torch.accelerator.current_stream(self.device))
        with self._stream:
            target.copy_(source, non_blocking=True)

    def mark(self) -> torch.Event | None:
        """Return an event that happens when the copies so far are done; None if they are."""
        return None if self._stream is None else self._stream.record_event()

    def wait(self, event: torch.Event | None) -> None:
        """Let the work that is issued from now on wait for a mark."""
        if event is not None:
            torch.accelerator.current_stream(self.device).wait_event(event)


def empty_on_host(like: torch.Tensor) -> torch.Tensor:
    """Return an uninitialized tensor in host memory with the same layout, pinned if the device of
    ``like`` copies asynchronously."""
    return torch.empty_like(like, device="cpu", pin_memory=like.device.type in _WITH_STREAMS)


class HostCopy:
    """A copy of a small tensor in host memory. On a GPU, it is an asynchronous copy into pinned
    memory that starts with the construction; :meth:`read` waits for what was queued before. On a
    CPU it is the tensor itself; on other devices, :meth:`read` copies it.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host, self._event = tensor.detach(), None
        if tensor.device.type in _WITH_STREAMS:
            self._host = empty_on_host(tensor.detach())
            self._host.copy_(tensor.detach(), non_blocking=True)
            # The copy runs on the stream of the tensor's device, which may not be the current one.
            stream = torch.accelerator.current_stream(tensor.device)
            self._event = stream.record_event()

    @property
    def is_ready(self) -> bool:
        """Whether :meth:`read` returns without waiting for an asynchronous copy."""
        return self._event is None or self._event.query()

    def read(self) -> torch.Tensor:
        """Return the values."""
        if self._event is not None:
            with PROGRESS.waiting(DEVICE):
                self._event.synchronize()
            self._event = None
        return self._host.cpu()


def tensor_of(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return numbers as a tensor on a device. The copy to a GPU is asynchronous."""
    if device.type not in _WITH_STREAMS:
        return torch.tensor(numbers, dtype=dtype, device=device)
    return torch.tensor(numbers, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
