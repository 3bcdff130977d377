"""What is told of accelerators, and that nothing is told where there are none."""

import gc
import threading

import torch

from paceline.observe.device_stats import UNKNOWN, DeviceMonitor, device_figures


def readers() -> int:
    return sum(thread.name == "device-reader" for thread in threading.enumerate())


def test_on_a_cpu_nothing_is_read() -> None:
    reader = DeviceMonitor(torch.device("cpu"))
    assert reader.last == UNKNOWN
    assert readers() == 0
    assert device_figures([reader.last, reader.last]) == []


def test_a_device_that_does_not_respond_is_not_read_again() -> None:
    reader = DeviceMonitor(torch.device("cuda", 99))  # there is no such device anywhere
    for thread in threading.enumerate():
        if thread.name == "device-reader":
            thread.join(timeout=30)
    assert readers() == 0
    assert reader.last == UNKNOWN
    del reader
    gc.collect()


def test_each_figure_is_known_or_null() -> None:
    figures = device_figures([[1.5, 41.0, 0.0], UNKNOWN, [1.0, 0.0, 301.25]])
    assert figures == [
        {"rank": 0, "utilisation": 0.5, "temperature_c": 40.0, "power_w": None},
        {"rank": 2, "utilisation": 0.0, "temperature_c": None, "power_w": 300.25},
    ]
