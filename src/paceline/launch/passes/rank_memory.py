"""The memory that a rank may use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any, Self

from paceline.core.processes import available_memory
from paceline.planner.machine.local import DeviceMemory, smallest_device_memory

if TYPE_CHECKING:
    from paceline.distributed.devices import Devices


@dataclass(frozen=True)
class RankMemory:
    """The memory of a rank.

    Args:
        device: memory of its accelerator; None on a CPU, or if the device does not report it.
        host_bytes: its share of the free memory of its host.
        device_name: name of the device.
    """

    device: DeviceMemory | None
    host_bytes: int
    device_name: str = "CPU"

    def as_values(self) -> list[Any]:
        """Return the fields as JSON, for :meth:`smallest`."""
        total, occupied = (0, 0) if self.device is None else astuple(self.device)
        return [total, occupied, self.host_bytes, self.device_name]

    @classmethod
    def smallest(cls, values: Sequence[Sequence[Any]]) -> Self:
        """Return the memory of the rank with the least free memory on its device.

        Args:
            values: results of :meth:`as_values` of all ranks.
        """
        total, occupied, _, name = min(values, key=lambda fields: fields[0] - fields[1])
        device = DeviceMemory(total, occupied) if total else None
        return cls(device, min(fields[2] for fields in values), name)

    @property
    def is_shared(self) -> bool:
        """Whether other processes hold memory of the device."""
        return self.device is not None and self.device.occupied_bytes > 0

    @property
    def usable_bytes(self) -> int:
        return self.host_bytes if self.device is None else self.device.free_bytes


def rank_memory(devices: Devices) -> RankMemory:
    """Return the memory that each rank of this host may use. Call it before the ranks use their
    devices."""
    host_bytes = available_memory() // devices.count
    if devices.type == "cpu":
        return RankMemory(None, host_bytes)
    return RankMemory(smallest_device_memory(devices.count), host_bytes, devices.names[0])
