"""Copy tensors between a device and pinned host memory on a stream, while the device computes."""

import torch

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
