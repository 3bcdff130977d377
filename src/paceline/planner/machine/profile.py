"""Measurements of this machine by `paceline doctor`, saved for the planner. Imports no torch."""

import json
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import TypedDict

from paceline.core.files import cache_dir, write_json_atomic

_VERSION = 2
_FILE = "machine.json"


@dataclass(frozen=True)
class ProductCurve:
    """The time of a matrix product of ``rows × inputs`` by ``inputs × outputs``: its operations /
    ``flops_s`` × (1 + row_loss / rows + width_loss × (1 / inputs + 1 / outputs)).

    Args:
        flops_s: operations per second of a large product.
        row_loss, width_loss: rows, and widths, that double the time.
    """

    flops_s: float
    row_loss: float
    width_loss: float


class CurveRecord(TypedDict):
    """A :class:`ProductCurve` as JSON."""

    flops_s: float
    row_loss: float
    width_loss: float


class RatesRecord(TypedDict):
    """:class:`DeviceRates` as JSON."""

    num_ranks: int
    products: dict[str, CurveRecord]
    attention_flops_s: float
    memory_bytes_s: float
    operation_s: float


@dataclass(frozen=True)
class DeviceRates:
    """What a device reached, or a rank of a CPU with its share of the cores.

    Args:
        num_ranks: ranks of this host that measured at the same time.
        products: by dtype: ``float32``, ``bfloat16``.
        attention_flops_s: operations per second of causal attention, forward and backward.
        memory_bytes_s: bytes that an addition of two large tensors reads and writes per second.
        operation_s: seconds that Python takes to launch an operation, mean of forward and
            backward.
    """

    num_ranks: int
    products: dict[str, ProductCurve]
    attention_flops_s: float
    memory_bytes_s: float
    operation_s: float

    def record(self) -> RatesRecord:
        """Return the rates as JSON."""
        return RatesRecord(
            num_ranks=self.num_ranks,
            products={
                name: CurveRecord(
                    flops_s=curve.flops_s, row_loss=curve.row_loss, width_loss=curve.width_loss
                )
                for name, curve in self.products.items()
            },
            attention_flops_s=self.attention_flops_s,
            memory_bytes_s=self.memory_bytes_s,
            operation_s=self.operation_s,
        )


@dataclass(frozen=True)
class MeasuredLink:
    """A link between ranks.

    Args:
        latency_s, bandwidth_bytes_s: terms of an all-reduce, by the α–β model
            (:class:`~paceline.distributed.link.Link`).
        busy_latency_s: what a small all-reduce between computations adds, so that ranks wait for
            each other; None if it was not measured.
    """

    num_ranks: int
    num_hosts: int
    latency_s: float
    bandwidth_bytes_s: float | None
    busy_latency_s: float | None = None

    @property
    def message_s(self) -> float:
        """The latency between ranks that compute, if it was measured."""
        return self.latency_s if self.busy_latency_s is None else self.busy_latency_s


@dataclass(frozen=True)
class DeviceProfile:
    """The measurements of a kind of device.

    Args:
        host: name of the measured machine; other machines ignore the profile.
        device_type: type of the ranks' devices.
        day: date of the measurement, as 2026-01-31.
        link: None if only one rank measured.
        rates: for each number of ranks that measured at the same time.
    """

    host: str
    device_type: str
    day: str
    link: MeasuredLink | None = None
    rates: tuple[DeviceRates, ...] = field(default=())

    def rates_of(self, num_ranks: int) -> DeviceRates | None:
        """Return the rates with the closest number of ranks per host; None without any."""
        return min(self.rates, key=lambda each: abs(each.num_ranks - num_ranks), default=None)


def save(device_type: str, link: MeasuredLink | None, rates: Sequence[DeviceRates] = ()) -> Path:
    """Write the profile of this machine, and return its path. Of an earlier one, the link stays if
    none was measured now, and the rates of other numbers of ranks do."""
    earlier, numbers = read(device_type), {each.num_ranks for each in rates}
    if earlier is not None:
        rates = [*rates, *(each for each in earlier.rates if each.num_ranks not in numbers)]
        link = earlier.link if link is None else link
    profile = DeviceProfile(
        socket.gethostname(), device_type, date.today().isoformat(), link, tuple(rates)
    )
    path = cache_dir() / _FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomic(path, {"version": _VERSION, **asdict(profile)})
    return path


def read(device_type: str) -> DeviceProfile | None:
    """Return the profile of this machine for this device type; None if there is no readable one."""
    try:
        content = json.loads((cache_dir() / _FILE).read_text(encoding="utf-8"))
        if content.pop("version") != _VERSION:
            return None
        link, rates = content.pop("link"), content.pop("rates")
        profile = DeviceProfile(
            **content,
            link=None if link is None else MeasuredLink(**link),
            rates=tuple(rates_from(each) for each in rates),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    is_this_machine = profile.host == socket.gethostname()
    return profile if is_this_machine and profile.device_type == device_type else None


def rates_from(record: RatesRecord) -> DeviceRates:
    """Return the rates that are recorded as JSON."""
    return DeviceRates(
        num_ranks=record["num_ranks"],
        products={name: ProductCurve(**curve) for name, curve in record["products"].items()},
        attention_flops_s=record["attention_flops_s"],
        memory_bytes_s=record["memory_bytes_s"],
        operation_s=record["operation_s"],
    )
