"""Machines to plan for: devices of the table (:mod:`paceline.planner.devices`), or this
machine's."""

import re
from dataclasses import dataclass, replace
from typing import Self

from paceline.core.errors import ConfigError
from paceline.core.processes import available_memory
from paceline.distributed.link import Link
from paceline.planner.devices import BFLOAT16, FLOAT16, Device, devices, find_device
from paceline.planner.machine.calibration import Calibration
from paceline.planner.machine.history import PastRun
from paceline.planner.machine.profile import DeviceRates, MeasuredLink, ProductCurve
from paceline.planner.scale.network import Network
from paceline.planner.setup import TrainingSetup

_GB = 10**9
_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_HOST_DEVICES = 8
#: Modes on devices that are not in the table are ranked as on this one.
_COMMON_DEVICE = "A10"
#: Bandwidth to the memory of the host for devices that are not in the table: PCIe Gen4.
_HOST_LINK_BYTES_S = 0.8 * 32 * _GB

#: Of a CPU that `paceline doctor` did not measure: approximate bandwidth and latency between two
#: Gloo ranks of a host, its memory's bandwidth, and the time of an operation.
_CPU_LINK_BYTES_S, _CPU_MESSAGE_S = 1.5 * _GB, 50e-6
_CPU_MEMORY_BYTES_S, _CPU_OPERATION_S = 10 * _GB, 3e-6
_CPU_FLOPS_S = 50 * _GB
#: Share of the rate of matrix products that attention reaches on such a CPU.
_CPU_ATTENTION = 0.3


@dataclass(frozen=True)
class Machine:
    """The devices of a plan: ``count`` equal ones, with one rank each.

    Args:
        memory_bytes: memory of one device; on a CPU a rank's share of the memory that is free now.
        link_bytes_s: bandwidth between two ranks, of the slowest link.
        device: row of the table; None for a CPU and for devices that are not in the table.
        timed_as: the device whose rates times are estimated with; None for a CPU.
        calibration, history: corrections of times by earlier runs on this machine.
        rates: measured on this machine; of a CPU for several numbers of ranks.
        message_s: latency of a message between ranks; None if it was not measured.
        link_is_measured: whether ``link_bytes_s`` was measured on this machine.
        link: the measured link with its latency; None if it was not measured.
        name_is_assumed: no device was named, so ``device`` is the one with the closest memory size.
        network: switches between hosts; None: all hosts reach each other at the same rate.
        rates_known: False if times only serve to rank modes.
    """

    name: str
    count: int
    memory_bytes: int
    link_bytes_s: float
    is_cpu: bool = False
    notes: tuple[str, ...] = ()
    device: Device | None = None
    timed_as: Device | None = None
    rates: tuple[DeviceRates, ...] = ()
    message_s: float | None = None
    link_is_measured: bool = False
    link: Link | None = None
    network: Network | None = None
    rates_known: bool = True
    name_is_assumed: bool = False
    calibration: Calibration | None = None
    history: tuple[PastRun, ...] = ()

    @property
    def host_link_bytes_s(self) -> float:
        """Bandwidth between a device and pinned host memory, in one direction."""
        return _HOST_LINK_BYTES_S if self.device is None else self.device.host_link_bytes_s

    @property
    def devices_per_host(self) -> int:
        return min(self.count, _HOST_DEVICES)

    def with_links(self, setup: TrainingSetup) -> TrainingSetup:
        """Return the set-up on hosts of this machine's devices, with measured links if there are
        any."""
        setup = replace(setup, devices_per_host=self.devices_per_host)
        if self.network is not None:
            setup = replace(
                setup,
                hosts_per_switch=self.network.hosts_per_switch,
                oversubscription=self.network.oversubscription,
            )
        if not self.link_is_measured:
            return setup
        network = self.link_bytes_s * self.devices_per_host
        return replace(setup, link_bytes_s=self.link_bytes_s, host_network_bytes_s=network)

    def rates_of(self, num_ranks: int) -> DeviceRates | None:
        """Return the measured rates of a device; of a rank of a CPU, if ``num_ranks`` share it. The
        closest measurement is scaled to that number. None: not measured."""
        if not self.rates:
            return None
        closest = min(self.rates, key=lambda each: abs(each.num_ranks - num_ranks))
        if not self.is_cpu or closest.num_ranks == num_ranks:
            return closest
        return _scaled(closest, closest.num_ranks / num_ranks, num_ranks)

    def without_history(self) -> Self:
        """Return the machine without its earlier runs, and without the note about them."""
        notes = tuple(note for note in self.notes if not note.startswith("history:"))
        return replace(self, history=(), notes=notes)

    def with_link(self, link: MeasuredLink) -> Self:
        """Return the machine with the link that `paceline doctor` measured."""
        assert link.bandwidth_bytes_s is not None
        return replace(
            self,
            link_bytes_s=link.bandwidth_bytes_s,
            message_s=link.message_s,
            link_is_measured=True,
            link=Link(link.latency_s, link.bandwidth_bytes_s, self.count),
        )

    def with_count(self, count: int) -> Self:
        """Return the machine with fewer or more devices. Ranks of a CPU share its speed and its
        memory."""
        if not self.is_cpu:
            return replace(self, count=count)
        return replace(self, count=count, memory_bytes=self.memory_bytes * self.count // count)

    def with_budget(self, size_bytes: int | None) -> Self:
        """Return the machine with at most this memory of each device for the run."""
        return self if size_bytes is None else self._with_memory(min(self.memory_bytes, size_bytes))

    def without_limit(self) -> Self:
        """Return the machine with more memory than any run needs."""
        return self._with_memory(1 << 60)

    def _with_memory(self, size_bytes: int) -> Self:
        return replace(self, memory_bytes=size_bytes)

    def with_notes(self, *notes: str) -> Self:
        return replace(self, notes=(*self.notes, *notes))


def parse_size(text: str, flag: str = "--device-memory") -> int:
    """Parse a size: ``80GB`` → 80e9 bytes, ``24GiB`` → 24 × 2³⁰.

    Raises:
        ConfigError: there is no number or no unit, or the size is below 1 MiB.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]+)\s*", text)
    unit = _UNITS.get(match.group(2).lower()) if match else None
    if match is None or unit is None:
        bare = re.fullmatch(r"\s*[0-9.]+\s*", text)
        raise ConfigError(
            "`{flag} {text}` has no unit" if bare else "`{flag} {text}` is not a size",
            code="missing-unit" if bare else "not-a-size",
            allowed="a number and a unit: MB, GB, TB (powers of ten), MiB, GiB, TiB (powers of"
            " two)",
            fix="write e.g. `{flag} {number}GB`",
            flag=flag,
            text=text,
            number=text.strip() if bare else 80,
        )
    size = round(float(match.group(1)) * unit)
    if size < 2**20:
        raise ConfigError(
            "`{flag} {text}` is less than 1 MiB",
            code="memory-too-small",
            fix="write e.g. `{flag} 80GB`",
            flag=flag,
            text=text,
        )
    return size


def named_machine(
    device: Device | None,
    memory_bytes: int | None,
    count: int,
    dtype: str | None,
    notes: tuple[str, ...] = (),
) -> Machine:
    """Return ``count`` devices that need not exist here. Without ``device``, the one of the table
    with the closest memory size gives speed and links.

    Args:
        dtype: dtype of matrix products: ``bfloat16``, ``float16``, ``tf32``, or None for float32.
    """
    assert device is not None or memory_bytes is not None
    name_is_assumed = device is None
    if device is None:
        candidates = [row for row in devices() if row.supports_bfloat16]
        device = min(candidates, key=lambda row: abs(row.memory_bytes - (memory_bytes or 0)))
        notes = (
            *notes,
            (
                f"no device is named: times are estimated for {device.name}, the closest in memory"
                " (`--device NAME` names one)"
            ),
        )
    if device.note:
        notes = (*notes, f"{device.name}: {device.note}")
    if device.flops_s(dtype) is None:
        notes = (*notes, f"{device.name} has no {dtype} units: times are estimated for float32")
    link, notes = _between_hosts(device.link_bytes_s, device.network_bytes_s, count, notes)
    return Machine(
        device.name,
        count,
        memory_bytes or device.memory_bytes,
        link,
        notes=notes,
        device=device,
        timed_as=device,
        name_is_assumed=name_is_assumed,
    )


def default_precision(machine: Machine) -> tuple[str, str]:
    """Resolve ``precision: auto`` for devices of the table, with the reason."""
    if machine.is_cpu:
        return "32", "float32 on a CPU"
    if machine.device is None:
        return "32", f"bfloat16 support of {machine.name} is not known"
    if machine.name_is_assumed:
        return "bf16-mixed", "no device is named, and most accelerators support bfloat16"
    if machine.device.supports_bfloat16:
        return "bf16-mixed", f"bfloat16 is supported by {machine.device.name}"
    return "fp16-mixed", f"bfloat16 is not supported by {machine.device.name}"


def unknown_machine(name: str, memory_bytes: int, count: int) -> Machine:
    """Return devices that are not in the table, with the memory that they report and without times.

    Modes are ranked as if the devices computed and communicated like a common one."""
    common, _ = find_device(_COMMON_DEVICE)
    note = (
        f"{name} is not in the table of devices: its memory is what it reports, its rates are"
        f" not known, so no times are given, and modes are ranked as for {common.name}"
    )
    link, notes = _between_hosts(common.link_bytes_s, common.network_bytes_s, count, (note,))
    return Machine(name, count, memory_bytes, link, notes=notes, timed_as=common, rates_known=False)


def _between_hosts(
    link: float, network: float, count: int, notes: tuple[str, ...]
) -> tuple[float, tuple[str, ...]]:
    if count <= _HOST_DEVICES:
        return link, notes
    link = min(link, network)
    text = (
        f"more than {_HOST_DEVICES} devices are on several hosts, with {link / _GB:g} GB/s per"
        " device between them"
    )
    return link, (*notes, text)


def cpu_machine(
    count: int, dtype: str | None, *, measure: bool = True, memory_bytes: int | None = None
) -> Machine:
    """Return this machine's CPU, shared by ``count`` ranks. ``measure``: time a matrix product
    (0.1 s; imports torch)."""
    flops_s = _known_cpu(dtype) if measure else _CPU_FLOPS_S
    memory = memory_bytes or available_memory() // count
    name = BFLOAT16 if dtype in (BFLOAT16, FLOAT16) else "float32"
    rates = DeviceRates(
        num_ranks=1,
        products={name: ProductCurve(flops_s, 0.0, 0.0)},
        attention_flops_s=flops_s * _CPU_ATTENTION,
        memory_bytes_s=_CPU_MEMORY_BYTES_S,
        operation_s=_CPU_OPERATION_S,
    )
    return Machine(
        "CPU",
        count,
        memory,
        _CPU_LINK_BYTES_S,
        is_cpu=True,
        rates=(rates,),
        message_s=_CPU_MESSAGE_S,
    )


def _scaled(rates: DeviceRates, share: float, num_ranks: int) -> DeviceRates:
    """Return the rates of a rank with ``share`` times the cores. Python's time stays."""
    products = {
        name: replace(curve, flops_s=curve.flops_s * share)
        for name, curve in rates.products.items()
    }
    return replace(
        rates,
        num_ranks=num_ranks,
        products=products,
        attention_flops_s=rates.attention_flops_s * share,
        memory_bytes_s=rates.memory_bytes_s * share,
    )


#: Operations per second of this machine's CPU, by whether the numbers have 16 bits; None if it is
#: measured for each plan.
_remembered: dict[bool, float] | None = None


def remember_cpu_rates() -> dict[bool, float]:
    """Keep what is measured for later plans of this process: plans of the same config are then
    equal. Return it; the caller may add more."""
    global _remembered
    if _remembered is None:
        _remembered = {}
    return _remembered


def _known_cpu(dtype: str | None) -> float:
    if _remembered is None:
        return _measured_cpu(dtype)
    is_low = dtype in (BFLOAT16, FLOAT16)
    if is_low not in _remembered:
        _remembered[is_low] = _measured_cpu(dtype)
    return _remembered[is_low]


def _measured_cpu(dtype: str | None) -> float:
    """Return the operations per second of a matrix product on all cores: the best within 0.1 s."""
    import time

    import torch

    size = 512
    is_low = dtype in (BFLOAT16, FLOAT16)
    matrix = torch.ones(size, size, dtype=torch.bfloat16 if is_low else torch.float32)
    with torch.no_grad():
        matrix @ matrix
        best, started_at = float("inf"), time.perf_counter()
        while time.perf_counter() - started_at < 0.1:
            start = time.perf_counter()
            matrix @ matrix
            best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
