"""The losses of the CPU device, which those of simulated devices are compared with."""

from collections.abc import Callable
from pathlib import Path

from commands import losses
from device_runs import train_on
from switches import LAYOUTS, Layout, Switches

Reference = Callable[[Layout, Switches], list[float]]


def make_reference(new_folder: Callable[[], Path]) -> Reference:
    """Return a function that returns the losses of three steps on the CPU device. It trains once
    for all strategies that train as one rank does."""
    known: dict[tuple[str, Switches], list[float]] = {}

    def losses_of(layout: Layout, switches: Switches) -> list[float]:
        key = layout.reference, switches
        if key not in known:
            reference = next(each for each in LAYOUTS if each.name == layout.reference)
            folder = new_folder()
            train_on("cpu", folder, *reference.args, *switches.args)
            known[key] = losses(folder)
        return known[key]

    return losses_of
