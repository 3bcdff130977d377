"""The rates of a device and its links that the time of a step depends on. Imports no torch."""

import math
from dataclasses import dataclass, replace

from paceline.planner.devices import BFLOAT16, Device
from paceline.planner.machine.profile import DeviceRates, ProductCurve
from paceline.planner.setup import TrainingSetup

#: Share of the data sheet's bandwidth that the sum of two large tensors reaches: an estimate, which
#: was not measured.
_REACHED_BANDWIDTH = 0.9


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
        attention_flops_s: rate of attention, if it was measured; else the rate of matrix products.
        operation_s: seconds of an operation that Python launches, if that was measured; else 1, as
            the constants are seconds of a layer.
        message_s: latency of a message, if that was measured; else 1 in the same way.
    """

    flops_s: float
    product_flops_s: float
    memory_bytes_s: float
    link_bytes_s: float
    host_network_bytes_s: float
    host_link_bytes_s: float
    attention_flops_s: float
    operation_s: float = 1.0
    message_s: float = 1.0


def rates_of(setup: TrainingSetup, device: Device, dtype: str | None = BFLOAT16) -> Rates:
    """Return the rates of a device for a set-up.

    Args:
        dtype: dtype of matrix products, see :meth:`~paceline.planner.devices.Device.flops_s`.
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
        attention_flops_s=flops_s,
    )


def curve_of(measured: DeviceRates, dtype: str | None) -> ProductCurve | None:
    """Return the measured products in ``dtype`` (None: float32); products in float16 are as fast
    as in bfloat16."""
    name = {None: "float32", "float16": BFLOAT16}.get(dtype, dtype)
    return measured.products.get(name or "float32")


def with_measured(rates: Rates, measured: DeviceRates, curve: ProductCurve) -> Rates:
    """Return the rates of an accelerator with its measured products and memory bandwidth. Constants
    for memory relate to the data sheet's bandwidth, so the measured one is scaled to that."""
    speedup = rates.product_flops_s / rates.flops_s
    return replace(
        rates,
        flops_s=curve.flops_s,
        product_flops_s=curve.flops_s * speedup,
        memory_bytes_s=measured.memory_bytes_s / _REACHED_BANDWIDTH,
    )


def cpu_rates(
    measured: DeviceRates, curve: ProductCurve, link_bytes_s: float, message_s: float
) -> Rates:
    """Return the measured rates of a CPU rank."""
    return Rates(
        flops_s=curve.flops_s,
        product_flops_s=curve.flops_s,
        memory_bytes_s=measured.memory_bytes_s,
        link_bytes_s=link_bytes_s,
        host_network_bytes_s=link_bytes_s * measured.num_ranks,
        host_link_bytes_s=math.inf,
        attention_flops_s=measured.attention_flops_s,
        operation_s=measured.operation_s,
        message_s=message_s,
    )
