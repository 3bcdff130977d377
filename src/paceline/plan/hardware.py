"""Devices: their memory, arithmetic and links, from the vendors' data sheets; and this machine's own.

Matrix products are the dense figures: where a sheet prints them with sparsity, half of these. They are with float32
accumulation, at which GeForce cards do half as many as at float16's. Links are in one direction: half of the sum that sheets
print. The sheets, and what stands in them, as read in copies and quotations of them:

- B200: "NVIDIA Blackwell" data sheet, column HGX B200, individual GPU (4.5 PFLOPS with sparsity, 75, 180 GB, NVLink 1.8 TB/s).
- H200, H100: "H200 / H100 Tensor Core GPU" data sheets (SXM: 1,979 TFLOPS with sparsity, 67, NVLink 900 GB/s; PCIe: 1,513, 51,
  PCIe Gen5 128 GB/s, for its NVLink joins pairs alone).
- A100: "A100 Tensor Core GPU" data sheet (312, 19.5, NVLink 600 GB/s).
- L40S: data sheet (362.05, 91.6, PCIe Gen4 64 GB/s). L4: data sheet (242 with sparsity, 30.3, PCIe Gen4 x16). Neither says that
  it accumulates in float32, and the sheet of the L40, the same chip, has half of the L40S's: take them as upper bounds.
- V100: data sheet of the SXM2 module (125, 15.7, NVLink 300 GB/s). T4: data sheet (65, 8.1, PCIe Gen3 x16).
- RTX 5090: "RTX Blackwell GPU Architecture" white paper (209.5; float32: 21,760 cores × 2 × 2.407 GHz, PCIe Gen5). RTX 4090:
  "Ada GPU Architecture" white paper, appendix A (165.2, 82.6, PCIe Gen4).
- RTX 3090: "Ampere GA102 GPU Architecture" white paper (35.6, PCIe Gen4). Its 71 was not found in a copy of the paper: it is
  half of the 142 quoted for float16 accumulation.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from paceline.core.errors import ConfigError
from paceline.world.host import available_memory

_GB, _T = 10**9, 10**12


@dataclass(frozen=True)
class Device:
    """A kind of device.

    Args:
        memory_bytes: as sold (80 GB = 80e9 bytes).
        low_flops_s, float32_flops_s: operations a second of matrix products in bfloat16 (float16 on T4 and V100), and in
            float32 without TF32, which torch leaves off.
        link_bytes_s: that one device sends to another of its host.
        network_bytes_s: that one device sends to another host.
    """

    name: str
    memory_bytes: int
    low_flops_s: float
    float32_flops_s: float
    link_bytes_s: float
    network_bytes_s: float


def _device(name: str, memory: float, low: float, full: float, link: float, network: float = 1.25) -> Device:
    return Device(name, round(memory * _GB), low * _T, full * _T, link * _GB, network * _GB)


#: name, memory [GB], bf16 and float32 [TFLOP/s], NVLink or PCIe and network [GB/s]. The networks are an assumption: 400 Gbit/s
#: a device beside NVLink of the last generations, 200 beside the first, else 10 Gbit/s Ethernet. Of devices of one size the
#: first stands for it.
TABLE = (
    _device("B200", 180, 2250, 75, 900, 50),
    _device("H200", 141, 989, 67, 450, 50),
    _device("A100-80GB", 80, 312, 19.5, 300, 25),
    _device("H100-SXM", 80, 989, 67, 450, 50),
    _device("H100-PCIe", 80, 756, 51, 64, 25),
    _device("L40S", 48, 362, 91.6, 32),
    _device("A100-40GB", 40, 312, 19.5, 300, 25),
    _device("RTX-5090", 32, 209.5, 104.8, 64),
    _device("V100-32GB", 32, 125, 15.7, 150, 12.5),
    _device("RTX-4090", 24, 165.2, 82.6, 32),
    _device("RTX-3090", 24, 71, 35.6, 32),
    _device("L4", 24, 121, 30.3, 32),
    _device("T4", 16, 65, 8.1, 16),
    _device("V100-16GB", 16, 125, 15.7, 150, 12.5),
)
_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_HOST_DEVICES = 8

#: Share of a data sheet's figure that training reaches: "model FLOPs utilization" of 40 to 57 % is reported for large models
#: on A100 (Chowdhery et al., "PaLM", 2022, table 3; Korthikanti et al., 2022, table 5); small models reach less.
DEVICE_EFFICIENCY = 0.4
#: The same against a large matrix product measured on this CPU.
CPU_EFFICIENCY = 0.5
#: What one gloo rank sends to another of the same host, roughly.
_CPU_LINK_BYTES_S = 1.5 * _GB
_CPU_FLOPS_S = 50 * _GB


@dataclass(frozen=True)
class Machine:
    """The devices a plan is made for: ``count`` alike, one rank each.

    Args:
        memory_bytes: of one device; on a CPU one rank's share of the memory that is free now.
        flops_s: operations a second that a rank's training reaches, in the precision of the config.
        link_bytes_s: between two ranks.
    """

    name: str
    count: int
    memory_bytes: int
    flops_s: float
    link_bytes_s: float
    is_cpu: bool = False
    notes: tuple[str, ...] = ()


def parse_size(text: str, flag: str = "--device-memory") -> int:
    """``80GB`` → 80e9 bytes, ``24GiB`` → 24 × 2³⁰.

    Raises:
        ConfigError: no number, no unit, or nothing left of it.
    """
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]+)\s*", text)
    unit = _UNITS.get(found.group(2).lower()) if found else None
    if found is None or unit is None:
        bare = re.fullmatch(r"\s*[0-9.]+\s*", text)
        raise ConfigError(
            f"`{flag} {text}` " + ("has no unit" if bare else "is not a size"),
            allowed="a number and a unit: MB, GB, TB (powers of ten), MiB, GiB, TiB (powers of two)",
            fix=f"write e.g. `{flag} {text.strip() if bare else 80}GB`",
        )
    size = round(float(found.group(1)) * unit)
    if size < 2**20:
        raise ConfigError(f"`{flag} {text}` is less than 1 MiB", fix=f"write e.g. `{flag} 80GB`")
    return size


def find_device(name: str) -> Device:
    """The device of the table that is meant: ``h100``, ``rtx4090``, ``A100-40GB``.

    Raises:
        ConfigError: none is; lists those there are.
    """
    wanted = _plain(name)
    known = {_plain(one.name): one for one in TABLE}
    if wanted in known:
        return known[wanted]
    for one in TABLE:
        if wanted and (_plain(one.name).startswith(wanted) or _plain(one.name).removeprefix("rtx") == wanted):
            return one
    raise ConfigError(
        f"`--device {name}` is not in the table of devices",
        allowed=", ".join(one.name for one in TABLE),
        fix="name one of these that is like it, and give its memory by `--device-memory`",
    )


def recognise(full_name: str, memory_bytes: int) -> Device | None:
    """The table's entry for a name as the driver gives it, e.g. ``NVIDIA A100-SXM4-80GB``; None where there is none."""
    plain = _plain(full_name)
    fitting = [one for one in TABLE if re.match(r"(rtx)?[a-z]*[0-9]+s?", _plain(one.name)) and _family(one) in plain]
    fitting = [one for one in fitting if len(_family(one)) == max(len(_family(each)) for each in fitting)]
    if "pcie" in plain:
        fitting = [one for one in fitting if "PCIe" in one.name] or fitting
    else:
        fitting = [one for one in fitting if "PCIe" not in one.name] or fitting
    return min(fitting, key=lambda one: abs(one.memory_bytes - memory_bytes), default=None)


def _family(device: Device) -> str:
    """``A100-80GB`` → ``a100``; ``RTX-4090`` → ``rtx4090``."""
    parts = device.name.split("-")
    return _plain("".join(parts[:2]) if parts[0] == "RTX" else parts[0])


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def named_machine(device: Device | None, memory_bytes: int | None, count: int, low_precision: bool) -> Machine:
    """``count`` devices that need not be here: of a kind, or of a size alone (the table's nearest then gives speed and
    links)."""
    assert device is not None or memory_bytes is not None
    notes = []
    if device is None:
        device = min(TABLE, key=lambda one: abs(one.memory_bytes - (memory_bytes or 0)))
        notes.append(f"no device is named: times are those of {device.name}, the nearest in memory (`--device NAME` names one)")
    link = device.link_bytes_s
    if count > _HOST_DEVICES:
        link = min(link, device.network_bytes_s)
        notes.append(
            f"more than {_HOST_DEVICES} devices: several hosts, {link / _GB:g} GB/s a device between them, for every mode"
        )
    speed = device.low_flops_s if low_precision else device.float32_flops_s
    return Machine(device.name, count, memory_bytes or device.memory_bytes, speed * DEVICE_EFFICIENCY, link, notes=tuple(notes))


def cpu_machine(count: int, low_precision: bool, *, measure: bool = True, memory_bytes: int | None = None) -> Machine:
    """This machine's CPU, shared by ``count`` ranks. ``measure``: time a matrix product (0.1 s; imports torch)."""
    speed = _measured_cpu(low_precision) if measure else _CPU_FLOPS_S
    memory = memory_bytes or available_memory() // count
    return Machine("CPU", count, memory, speed * CPU_EFFICIENCY / count, _CPU_LINK_BYTES_S, is_cpu=True)


def _measured_cpu(low_precision: bool) -> float:
    """Operations a second of a matrix product on all cores: the best of several within 0.1 s."""
    import time

    import torch

    size = 512
    one = torch.ones(size, size, dtype=torch.bfloat16 if low_precision else torch.float32)
    with torch.no_grad():
        one @ one
        best, begun = float("inf"), time.perf_counter()
        while time.perf_counter() - begun < 0.1:
            start = time.perf_counter()
            one @ one
            best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
