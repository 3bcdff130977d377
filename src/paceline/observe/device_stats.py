"""Read utilization, temperature and power of this rank's accelerator in a background thread. If
torch has no functions for the device, NVML does not respond or nvidia-ml-py is not installed, step
events lack these figures."""

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.core.events import DeviceFigures

_PERIOD_S = 5.0
#: Figures are stored as their value plus one, so that 0 means unknown in the table that all ranks
#: fill.
UNKNOWN = [0.0, 0.0, 0.0]
#: Type of device → (function of torch's module for it that reads a figure, divisor), in the order
#: of the event's keys. The modules map their devices to devices of NVML, AMD SMI and Level Zero.
_FIGURES = {
    "cuda": (("utilization", 100.0), ("temperature", 1.0), ("power_draw", 1000.0)),
    "xpu": (("utilization", 100.0), ("temperature", 1.0), ("power_draw", 1.0)),
}


class DeviceMonitor:
    """Reads the device in a thread every few seconds, so that a step only reads :attr:`last`. The
    thread ends when this object is deleted."""

    def __init__(self, device: torch.device) -> None:
        self.last = list(UNKNOWN)
        if device.type in _FIGURES:
            stop = threading.Event()
            weakref.finalize(self, stop.set)
            threading.Thread(
                target=_run, args=(device, self.last, stop), name="device-reader", daemon=True
            ).start()


def _run(device: torch.device, last: list[float], stop: threading.Event) -> None:
    module = torch.get_device_module(device)
    figures = [(getattr(module, name), divisor) for name, divisor in _FIGURES[device.type]]
    while True:
        last[:] = [_read(read, device, divisor) for read, divisor in figures]
        if last == UNKNOWN or stop.wait(_PERIOD_S):
            return


def _read(read: Callable[[Any], float], device: torch.device, divisor: float) -> float:
    try:
        return read(device) / divisor + 1.0
    except Exception:  # any error of NVML: no library, no driver, or an unsupported figure
        return 0.0


def device_figures(rows: Sequence[Sequence[float]]) -> list[DeviceFigures]:
    """Return the figures of all devices that have figures. ``rows`` has the
    :attr:`DeviceMonitor.last` of each rank."""
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
