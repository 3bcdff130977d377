"""How busy, how warm and how hungry this rank's accelerator is, read beside the training. Where
NVML does not answer, or nvidia-ml-py is not installed, there is nothing to read, and step lines say
nothing of it."""

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.core.events import DeviceFigures

_PERIOD_S = 5.0
#: As numbers for the table that the ranks fill together: each is its value plus one, so that 0 is:
#: not known.
NOTHING = [0.0, 0.0, 0.0]
#: (key of the event, how it is read, what it is divided by); torch maps its device to that of NVML.
_FIGURES: tuple[tuple[str, Callable[[Any], int], float], ...] = (
    ("utilisation", torch.cuda.utilization, 100.0),
    ("temperature_c", torch.cuda.temperature, 1.0),
    ("power_w", torch.cuda.power_draw, 1000.0),
)


class DeviceMonitor:
    """A thread that reads the device every few seconds; a step only looks at :attr:`last`. It ends
    with this object."""

    def __init__(self, device: torch.device) -> None:
        self.last = list(NOTHING)
        if device.type == "cuda":
            ended = threading.Event()
            weakref.finalize(self, ended.set)
            threading.Thread(
                target=_run, args=(device, self.last, ended), name="device-reader", daemon=True
            ).start()


def _run(device: torch.device, last: list[float], ended: threading.Event) -> None:
    while True:
        last[:] = [_read(read, device, divisor) for _, read, divisor in _FIGURES]
        if last == NOTHING or ended.wait(_PERIOD_S):
            return


def _read(read: Callable[[Any], int], device: torch.device, divisor: float) -> float:
    try:
        return read(device) / divisor + 1.0
    except (
        Exception
    ):  # NVML's own errors: no library, no driver, or a figure that this device has not
        return 0.0


def device_figures(rows: Sequence[Sequence[float]]) -> list[DeviceFigures]:
    """Return the figures of the devices that are known, given :attr:`DeviceMonitor.last` of each
    rank."""
    devices: list[DeviceFigures] = []
    for rank, row in enumerate(rows):
        if any(row):
            known = [round(value - 1.0, 3) if value else None for value in row]
            utilisation, temperature_c, power_w = known
            devices.append(
                {
                    "rank": rank,
                    "utilisation": utilisation,
                    "temperature_c": temperature_c,
                    "power_w": power_w,
                }
            )
    return devices
