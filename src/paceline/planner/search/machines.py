"""Find the cheapest machine of the table of devices that finishes a run in time. Imports no
torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from paceline.core.errors import ConfigError
from paceline.parallel.registry import ParallelLayout
from paceline.planner.devices import Device, devices
from paceline.planner.machine.hardware import Machine, default_precision, named_machine
from paceline.planner.search.options import SearchOptions
from paceline.planner.search.search import Candidate, search
from paceline.planner.search.trials import Trials, with_settings

#: Numbers of devices to try.
_COUNTS = tuple(2**power for power in range(11))
_LISTED = 5

Layouts = Callable[[int], list[ParallelLayout]]


@dataclass(frozen=True)
class Offer:
    """A machine that finishes the run in time.

    Args:
        price: price of the run; without prices, its device hours.
    """

    machine: Machine
    candidate: Candidate
    seconds: float
    price: float

    @property
    def device_hours(self) -> float:
        return self.machine.count * self.seconds / 3600


def cheapest_machines(
    trials: Trials, layouts: Layouts, samples: int, options: SearchOptions
) -> list[Offer]:
    """Return the cheapest offers, one for each device, the cheapest first.

    Devices are tried in the order of the least price that is possible: the price with perfect
    scaling and without a limit of memory. The search ends at a device whose least price is not
    among the best.

    Args:
        trials: estimates for a config with a global batch size, on any machine.
        layouts: returns the layouts for a number of devices.
        samples: number of samples of the whole run.
    """
    offers: list[Offer] = []
    for lower_bound, device in sorted(
        _bounds(trials, layouts, samples, options), key=lambda x: x[0]
    ):
        if len(offers) >= _LISTED and lower_bound >= offers[_LISTED - 1].price:
            break
        offer = _offer(trials, layouts, samples, options, device, lower_bound)
        if offer is not None:
            offers = sorted([*offers, offer], key=lambda each: each.price)
    return offers[:_LISTED]


def on_device(trials: Trials, device: Device, count: int, budget_bytes: int | None) -> Trials:
    """Return the trials on a machine, in its default precision unless the config sets one."""
    config = trials.config
    machine = named_machine(device, None, count, config.train_args.compute_format)
    if "precision" not in config.train_args.model_fields_set:
        precision, _ = default_precision(machine)
        config = with_settings(config, {"train_args.precision": precision})
        machine = named_machine(device, None, count, config.train_args.compute_format)
    return trials.with_config(config).on(machine.with_budget(budget_bytes))


def _bounds(
    trials: Trials, layouts: Layouts, samples: int, options: SearchOptions
) -> Iterator[tuple[float, Device]]:
    """Yield the least possible price of a run on each device."""
    for device in devices():
        price = options.price_of(device.name)
        if price is None:
            continue
        [single, *_] = layouts(1)
        mode = _fastest(on_device(trials, device, 1, None), single)
        if mode is None or mode.mode.time is None:
            continue
        # Several devices may share the update.
        parts = mode.mode.time.parts_s or {}
        seconds = mode.mode.time.seconds - parts.get("optimizer_s", 0.0)
        yield price * seconds / mode.mode.global_batch_size * samples / 3600, device


def _fastest(trials: Trials, single: ParallelLayout) -> Candidate | None:
    searched = search(trials.on(trials.machine.without_limit()), [single], "time")
    return searched.fitting[0] if searched.fitting else None


def _offer(
    trials: Trials,
    layouts: Layouts,
    samples: int,
    options: SearchOptions,
    device: Device,
    lower_bound: float,
) -> Offer | None:
    """Return the cheapest offer of a device: of the smallest number of devices that finishes in
    time, or of twice as many, which may need to save less memory."""
    price = options.price_of(device.name)
    assert price is not None
    deadline = options.deadline_s or float("inf")
    best: Offer | None = None
    for count in _COUNTS:
        if lower_bound / price * 3600 / count > deadline:
            continue
        sized = on_device(trials, device, count, options.budget_bytes)
        try:
            # The time of an update on the CPU is not estimated.
            searched = search(sized, layouts(count), "time", offloads_all=False)
        except ConfigError:
            return best
        chosen = searched.chosen("time")
        if chosen is not None:
            seconds = chosen.seconds_per_sample * samples
            cost = price * count * seconds / 3600
            is_in_time = seconds <= deadline
            if is_in_time and (best is None or cost < best.price):
                best = Offer(sized.machine, chosen, seconds, cost)
            elif best is not None:
                break
    return best
