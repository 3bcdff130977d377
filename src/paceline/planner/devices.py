"""The table of devices: memory, compute rates and links as vendors publish them, in
``devices.json`` with a source per row. Imports no torch.
"""

import difflib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import NotRequired, TypedDict

from paceline.core.errors import ConfigError
from paceline.core.report import PeakRate

_GB, _T = 10**9, 10**12
#: Drivers report between 94 % (memory reserved for error correction) and 108 % (GB sold as GiB) of
#: the nominal size.
_MEMORY_TOLERANCE = 0.15
_NEAREST = 6
#: Makers and product lines, which do not identify the model.
_MAKERS = ("nvidia", "amd", "tesla", "geforce", "instinct")

BFLOAT16, FLOAT16, TF32 = "bfloat16", "float16", "tf32"


@dataclass(frozen=True)
class Device:
    """A kind of device.

    Args:
        compute_capability: NVIDIA's version of the device's instruction set, such as (9, 0); None
            for other makers.
        memory_bytes: as sold (80 GB = 80e9 bytes).
        bfloat16_flops_s, float16_flops_s, tf32_flops_s, float32_flops_s: operations per second of
            dense matrix products; None if the device has no units for the type. ``float32`` is
            without TF32, which `train_args.tf32` turns on.
        interconnect: as text, with the rate of both directions.
        link_bytes_s: to another device of the host, in one direction.
        network_bytes_s: to another host; an assumption.
        aliases: further names, including drivers' names without the maker. Variants of a device may
            share some.
        chip: what it shares with devices that differ in memory and links: constants of the time
            model are fitted for it.
    """

    name: str
    compute_capability: tuple[int, int] | None
    memory_bytes: int
    bfloat16_flops_s: float | None
    float16_flops_s: float | None
    tf32_flops_s: float | None
    float32_flops_s: float
    memory_bandwidth_bytes_s: float
    interconnect: str
    link_bytes_s: float
    network_bytes_s: float
    aliases: tuple[str, ...]
    source: str
    note: str = ""
    chip: str = ""

    @property
    def family(self) -> str:
        """The kind of product: what its data sheet's rates mean differs between them."""
        if self.compute_capability is None:
            return "Instinct"
        if "GeForce" in self.source or re.match(r"RTX-[2-5]0\d\d", self.name):
            return "GeForce"
        is_workstation = "RTX" in self.name or self.memory_bandwidth_bytes_s < 1000 * _GB
        return "workstation" if is_workstation else "data center"

    @property
    def generation(self) -> str:
        """Whether the fastest kernels need instructions that common attention kernels lack."""
        is_new = self.compute_capability is not None and self.compute_capability[0] in (9, 10)
        return "Hopper and later" if is_new else "up to Ada"

    @property
    def has_fast_link(self) -> bool:
        """Whether devices of a host have links that are faster than PCIe."""
        return self.link_bytes_s > 70 * _GB

    @property
    def host_link_bytes_s(self) -> float:
        """Bandwidth to and from pinned host memory, in one direction: about 80 % of the
        bandwidth of PCIe x16. Hopper and later have Gen5, Volta and Turing Gen3, all others here
        Gen4."""
        capability = self.compute_capability or (8, 0)
        return 0.8 * _GB * (64 if capability >= (9, 0) else 32 if capability >= (8, 0) else 16)

    @property
    def driver_memory_bytes(self) -> int:
        """What the driver reports of the memory: vendors sell 2³⁰ bytes as a GB; boards with GDDR
        memory for servers reserve a sixteenth for error correction."""
        is_server_card = self.memory_bandwidth_bytes_s < 1000 * _GB and "RTX" not in self.name
        share = 0.94 if is_server_card else 0.985
        return round(share * 2**30 * self.memory_bytes / _GB)

    @property
    def float8_speedup(self) -> float:
        """The rate of matrix products in float8 in units of that in bfloat16: data sheets give
        twice the rate for the devices that have such units, which are Ada and later, and MI300."""
        capability = self.compute_capability
        has_units = self.name.startswith("MI3") if capability is None else capability >= (8, 9)
        return 2.0 if has_units else 1.0

    @property
    def supports_bfloat16(self) -> bool:
        return self.bfloat16_flops_s is not None

    def flops_s(self, dtype: str | None) -> float | None:
        """Return the operations per second in ``dtype`` (``bfloat16``, ``float16``, ``tf32``, None
        for float32); None if the device has no units for it."""
        rates = {
            BFLOAT16: self.bfloat16_flops_s,
            FLOAT16: self.float16_flops_s,
            TF32: self.tf32_flops_s,
        }
        return self.float32_flops_s if dtype is None else rates[dtype]


class _DeviceRow(TypedDict):
    name: str
    chip: NotRequired[str]
    compute_capability: str | None
    memory_gb: float
    bf16_tflops: float | None
    fp16_tflops: float | None
    tf32_tflops: float | None
    fp32_tflops: float
    memory_bandwidth_gb_s: float
    interconnect: str
    link_gb_s: float
    network_gb_s: float
    aliases: list[str]
    source: str
    note: NotRequired[str]


@cache
def devices() -> tuple[Device, ...]:
    """Return all rows, in the order of the file. Of rows that share an alias, the first is the most
    common."""
    content = json.loads((files("paceline.planner") / "devices.json").read_text(encoding="utf-8"))
    return tuple(_device(row) for row in content["devices"])


def _flops_s(tera: float | None) -> float | None:
    return None if tera is None else tera * _T


def _device(row: _DeviceRow) -> Device:
    capability = row["compute_capability"]
    major, _, minor = (capability or "").partition(".")
    return Device(
        name=row["name"],
        compute_capability=(int(major), int(minor)) if capability else None,
        memory_bytes=round(row["memory_gb"] * _GB),
        bfloat16_flops_s=_flops_s(row["bf16_tflops"]),
        float16_flops_s=_flops_s(row["fp16_tflops"]),
        tf32_flops_s=_flops_s(row["tf32_tflops"]),
        float32_flops_s=row["fp32_tflops"] * _T,
        memory_bandwidth_bytes_s=row["memory_bandwidth_gb_s"] * _GB,
        interconnect=row["interconnect"],
        link_bytes_s=row["link_gb_s"] * _GB,
        network_bytes_s=row["network_gb_s"] * _GB,
        aliases=tuple(row["aliases"]),
        source=row["source"],
        note=row.get("note", ""),
        chip=row.get("chip", row["name"]),
    )


def find_device(name: str, memory_bytes: int | None = None) -> tuple[Device, str]:
    """Return the device that ``--device NAME`` means, and a notice ("" if the name is exact).

    Case, separators and the maker's name are ignored. A name that several variants share (``A100``)
    means the one whose memory is ``memory_bytes``, else the first of them; the notice says so.

    Raises:
        ConfigError: the name is not in the table; lists the nearest names.
    """
    rows = _by_key().get(_key(name), ())
    if not rows:
        raise ConfigError(
            "`--device {name}` is not in the table of devices",
            code="unknown-device",
            allowed=("the nearest names are " + ", ".join(_nearest(name))),
            fix="use one of these, or set only the memory: `--device-memory 24GB`",
            name=name,
        )
    of_this_size = [
        row for row in rows if memory_bytes is not None and _has_memory(row, memory_bytes)
    ]
    device = _closest(of_this_size, memory_bytes) if of_this_size and memory_bytes else rows[0]
    if len(rows) == 1:
        return device, ""
    names = ", ".join(row.name for row in rows[:-1])
    notice = f"`--device {name}` can be {names} or {rows[-1].name}: this plan is for {device.name}"
    return device, notice


def recognize(driver_name: str, memory_bytes: int) -> Device | None:
    """Return the row for a device that reports ``driver_name`` and ``memory_bytes``; None if there
    is none.

    Nothing is guessed: the device is unknown if its name is not in the table, if no variant has
    this memory size (for example for a part of a device), or if several variants have it.
    """
    rows = [row for row in _by_key().get(_key(driver_name), ()) if _has_memory(row, memory_bytes)]
    if not rows:
        return None
    closest = _closest(rows, memory_bytes)
    return closest if [row.memory_bytes for row in rows].count(closest.memory_bytes) == 1 else None


def peak_rate(driver_name: str, memory_bytes: int, dtype: str | None) -> PeakRate | None:
    """Return the peak rate of a device in ``dtype`` (see :meth:`Device.flops_s`); None if it is not
    in the table."""
    device = recognize(driver_name, memory_bytes)
    flops_s = None if device is None else device.flops_s(dtype)
    if device is None or flops_s is None:
        return None
    return {"device": device.name, "flops_s": flops_s, "source": device.source}


def _has_memory(row: Device, memory_bytes: int) -> bool:
    return abs(memory_bytes - row.memory_bytes) <= _MEMORY_TOLERANCE * row.memory_bytes


def _closest(rows: Iterable[Device], memory_bytes: int) -> Device:
    return min(rows, key=lambda row: abs(memory_bytes - row.memory_bytes))


def _key(name: str) -> str:
    """Normalize a name: ``NVIDIA GeForce RTX 4090 Laptop GPU`` → ``rtx4090laptop``."""
    parts = re.findall(r"[a-z0-9]+", name.lower())
    while len(parts) > 1 and parts[0] in _MAKERS:
        parts = parts[1:]
    return "".join(part for part in parts if part != "gpu" or len(parts) == 1)


@cache
def _by_key() -> dict[str, tuple[Device, ...]]:
    """Map a key to the rows that have this name or, if none has, this alias."""
    by_alias: dict[str, list[Device]] = {}
    for row in devices():
        for key in dict.fromkeys(map(_key, row.aliases)):
            by_alias.setdefault(key, []).append(row)
    by_name = {_key(row.name): (row,) for row in devices()}
    return {key: tuple(rows) for key, rows in by_alias.items()} | by_name


def _nearest(name: str) -> list[str]:
    keys = difflib.get_close_matches(_key(name), _by_key(), n=3 * _NEAREST, cutoff=0.3)
    names = list(dict.fromkeys(row.name for key in keys for row in _by_key()[key]))
    return names[:_NEAREST] or [row.name for row in devices()[:_NEAREST]]
