"""The rates of a device and its links that the time of a step depends on. Imports no torch."""

from dataclasses import dataclass

from paceline.planner.devices import BFLOAT16, Device
from paceline.planner.setup import TrainingSetup


@dataclass(frozen=True)
class Rates:
    """Figures of data sheets; what training reaches of them is fitted.

    Args:
        flops_s: operations per second of dense matrix products in the precision of the run; in
            bfloat16 if that is float8.
        product_flops_s: the same of the layers' matrix products.
        memory_bytes_s: bandwidth of the device's memory.
        link_bytes_s: from a device to another of its host.
        host_network_bytes_s: from a host to the others, over all its cards.
        host_link_bytes_s: between a device and pinned host memory.
    """

    flops_s: float
    product_flops_s: float
    memory_bytes_s: float
    link_bytes_s: float
    host_network_bytes_s: float
    host_link_bytes_s: float


def rates_of(setup: TrainingSetup, device: Device, dtype: str | None = BFLOAT16) -> Rates:
    """Return the rates of a device for a set-up.

    Args:
        dtype: of matrix products, see :meth:`~paceline.planner.devices.Device.flops_s`.
    """
    flops_s = device.flops_s(dtype) or device.float32_flops_s
    network = device.network_bytes_s * setup.devices_per_host
    return Rates(
        flops_s=flops_s,
        product_flops_s=flops_s * (device.float8_speedup if setup.precision == "fp8" else 1),
        memory_bytes_s=device.memory_bandwidth_bytes_s,
        link_bytes_s=setup.link_bytes_s or device.link_bytes_s,
        host_network_bytes_s=setup.host_network_bytes_s or network,
        host_link_bytes_s=device.host_link_bytes_s,
    )
