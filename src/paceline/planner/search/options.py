"""The options of ``paceline plan`` that search machines: the memory of a device, the time of the
run, and the price of devices. Imports no torch."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from paceline.core.errors import ConfigError
from paceline.planner.devices import find_device
from paceline.planner.machine.hardware import parse_size
from paceline.planner.scale.network import Network, parse_network

_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True)
class SearchOptions:
    """What to search.

    Args:
        lists_front: whether the front of time and memory is listed.
        budget_bytes: memory of a device that the run may use; None: all of it.
        deadline_s: seconds in which the run must finish; None: any.
        price: price of a device per hour; None: only named devices have one.
        prices: prices of named devices, which take precedence.
        network: switches between hosts.
        storage_bytes_s, restart_s: see :class:`~paceline.planner.scale.goodput.FailureModel`.
    """

    lists_front: bool = False
    budget_bytes: int | None = None
    deadline_s: float | None = None
    price: float | None = None
    prices: Mapping[str, float] = field(default_factory=dict)
    network: Network | None = None
    storage_bytes_s: float = 2e9
    restart_s: float = 120.0

    @property
    def compares_machines(self) -> bool:
        return self.deadline_s is not None or self.has_prices

    @property
    def has_prices(self) -> bool:
        return self.price is not None or bool(self.prices)

    def price_of(self, name: str) -> float | None:
        """Return the price of a device per hour; None if the device is not for hire. Without any
        prices, it is 1, and only the device hours count."""
        if not self.has_prices:
            return 1.0
        return self.prices.get(name, self.price)


def parse_options(
    lists_front: bool = False,
    budget: str | None = None,
    deadline: str | None = None,
    prices: Iterable[str] = (),
    network: str | None = None,
    storage: str = "2GB",
    restart_time: str = "2min",
) -> SearchOptions:
    """Parse the options.

    Raises:
        ConfigError: a size, time or price is not one.
    """
    general: float | None = None
    named: dict[str, float] = {}
    for text in prices:
        name, separator, value = text.rpartition("=")
        if separator:
            named[find_device(name)[0].name] = _price(text, value)
        else:
            general = _price(text, value)
    return SearchOptions(
        lists_front,
        None if budget is None else parse_size(budget, "--budget"),
        None if deadline is None else parse_time(deadline, "--deadline"),
        general,
        named,
        None if network is None else parse_network(network),
        float(parse_size(storage, "--storage")),
        parse_time(restart_time, "--restart-time"),
    )


def parse_time(text: str, flag: str) -> float:
    """Parse a time: ``8h`` → 28800.

    Raises:
        ConfigError: there is no positive number or no unit.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(s|min|h|d)\s*", text)
    if match is None or float(match.group(1)) <= 0:
        raise ConfigError(
            "`{flag} {text}` is not a time",
            code="invalid-time",
            allowed="a positive number and a unit: s, min, h, d",
            fix="write e.g. `{flag} 8h`",
            flag=flag,
            text=text,
        )
    return float(match.group(1)) * _SECONDS[match.group(2)]


def _price(text: str, value: str) -> float:
    try:
        price = float(value)
    except ValueError:
        price = -1.0
    if not 0 < price < float("inf"):
        raise ConfigError(
            "`--price {text}` is not a price",
            code="invalid-price",
            allowed="a positive number per device and hour, or one for a device: `H100-SXM=2.5`",
            text=text,
        )
    return price
