"""This machine's devices, with what is known about them. Imports no torch, unless a device has to
be asked for its memory."""

import logging
from dataclasses import dataclass, replace
from typing import Any

from paceline.core.errors import ConfigError
from paceline.core.files import human_bytes
from paceline.core.formatting import counted
from paceline.core.texts import UserText
from paceline.planner.devices import recognize
from paceline.planner.machine import profile as machine_profile
from paceline.planner.machine.calibration import read as read_calibration
from paceline.planner.machine.hardware import Machine, cpu_machine, named_machine, unknown_machine
from paceline.planner.machine.history import read_runs

logger = logging.getLogger(__name__)

#: Memory that the driver reserves on an idle device, at most.
_DRIVER_BYTES = 2**30


def local_machine(
    num_devices: int,
    is_cpu: bool,
    dtype: str | None,
    memory_bytes: int | None = None,
    *,
    can_measure: bool = True,
) -> Machine:
    """Return ``num_devices`` of this machine's devices.

    Args:
        dtype: see :func:`named_machine`.
        can_measure: whether a CPU whose rates are not known is measured (0.1 s; imports torch).

    Raises:
        ConfigError: an accelerator does not report its memory.
    """
    if is_cpu:
        profile = machine_profile.read("cpu")
        measure = can_measure and (profile is None or not profile.rates)
        machine = cpu_machine(num_devices, dtype, measure=measure, memory_bytes=memory_bytes)
        return _with_profile(machine, "cpu")
    from paceline.distributed.devices import accelerators

    kind, names = accelerators()
    memory = memory_bytes or device_memory()
    name = names[0] if names else (kind or "accelerator")
    if not memory:
        raise ConfigError(
            "{name} does not report its memory",
            code="device-memory-unknown",
            fix="set it with `--device-memory 24GB`, or name the device if it is in the table:"
            " `--device NAME`",
            name=name,
        )
    known = recognize(name, memory)
    if known is None:
        machine = unknown_machine(name, memory, num_devices)
    else:
        machine = replace(named_machine(known, memory, num_devices, dtype), name=name)
    return _with_profile(machine, kind or "cpu")


def _with_profile(machine: Machine, device_type: str) -> Machine:
    """Return the machine with the rates and links that `paceline doctor` measured here, if it
    did, with the calibration, and with the earlier runs on it."""
    machine = _with_runs(machine, device_type)
    profile = machine_profile.read(device_type)
    if profile is None:
        return machine
    if profile.rates:
        note = f"rates: as `paceline doctor` measured on {profile.day}"
        machine = replace(machine, rates=profile.rates).with_notes(note)
    link = profile.link
    if link is None or link.bandwidth_bytes_s is None or machine.count == 1:
        return machine
    note = (
        f"links: {human_bytes(link.bandwidth_bytes_s)}/s per rank, as `paceline doctor` measured on"
        f" {profile.day} with {counted(link.num_ranks, 'rank')}"
    )
    return machine.with_link(link).with_notes(note)


def _with_runs(machine: Machine, device_type: str) -> Machine:
    calibration = read_calibration(device_type)
    runs = read_runs(device_type)
    if calibration is not None:
        note = (
            f"calibration: fitted to {counted(len(calibration.runs), 'run')} on {calibration.day}"
            " by `--calibrate`"
        )
        machine = replace(machine, calibration=calibration).with_notes(note)
    if runs:
        latest = runs[-1]
        note = (
            f"history: {counted(len(runs), 'run')} on this machine; runs of the same model"
            " correct the times; the latest,"
            f" {latest.strategy} of {latest.model} in {latest.output_dir}, took"
            f" {latest.factor:.2f} × the predicted time (`--no-history` ignores them)"
        )
        machine = replace(machine, history=runs).with_notes(note)
    return machine


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of an accelerator.

    Args:
        total_bytes: all of it.
        occupied_bytes: memory that other processes hold.
    """

    total_bytes: int
    occupied_bytes: int = 0

    @property
    def free_bytes(self) -> int:
        return max(0, self.total_bytes - self.occupied_bytes)


def smallest_device_memory(count: int) -> DeviceMemory | None:
    """Return the memory of the accelerator with the least free memory among the first ``count`` of
    this host; None if they do not report it."""
    total = device_memory()
    if not total:
        return None
    return DeviceMemory(total, min(total, max(map(_occupied_memory, range(count)))))


def _occupied_memory(index: int) -> int:
    """Return the bytes that other processes hold on a device, which this run does not use yet; 0,
    with a line, if the driver does not report them."""
    import torch

    from paceline.distributed.devices import accelerators

    module: Any = getattr(torch, accelerators()[0] or "", None)
    try:
        used = int(module.device_memory_used(index))
    except Exception as error:  # no NVML or AMD SMI, an error of theirs, or another type of device
        if not index:
            logger.info(
                UserText(
                    "memory: the driver does not report what other processes hold on the devices"
                    " ({kind}), so the settings are chosen as if they held nothing",
                    code="driver-hides-memory",
                    kind=type(error).__name__,
                )
            )
        return 0
    return used if used > _DRIVER_BYTES else 0


def device_memory() -> int:
    """Return the bytes of this host's smallest accelerator; 0 if it does not report them."""
    import torch

    from paceline.distributed.devices import accelerators

    kind, names = accelerators()
    if kind == "mps":  # shares the memory of the host
        return int(torch.mps.recommended_max_memory())
    module: Any = getattr(torch, kind or "", None)
    try:
        return min(
            int(module.get_device_properties(index).total_memory) for index in range(len(names))
        )
    except (AttributeError, RuntimeError, ValueError):
        return 0
