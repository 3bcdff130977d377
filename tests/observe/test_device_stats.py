"""Accelerator statistics, and their absence on a CPU."""

import gc
import threading

import pytest
import torch

from paceline.observe.device_stats import UNKNOWN, DeviceMonitor, device_figures


def count_reader_threads() -> int:
    return sum(thread.name == "device-reader" for thread in threading.enumerate())


def test_cpu_has_no_device_statistics() -> None:
    monitor = DeviceMonitor(torch.device("cpu"))
    assert monitor.last == UNKNOWN
    assert count_reader_threads() == 0
    assert device_figures([monitor.last, monitor.last]) == []


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_monitor_stops_if_device_does_not_respond(kind: str) -> None:
    monitor = DeviceMonitor(torch.device(kind, 99))  # this device does not exist
    for thread in threading.enumerate():
        if thread.name == "device-reader":
            thread.join(timeout=30)
    assert count_reader_threads() == 0
    assert monitor.last == UNKNOWN
    del monitor
    gc.collect()


def test_unknown_figures_are_null() -> None:
    figures = device_figures([[1.5, 41.0, 0.0], UNKNOWN, [1.0, 0.0, 301.25]])
    assert figures == [
        {"rank": 0, "utilisation": 0.5, "temperature_c": 40.0, "power_w": None},
        {"rank": 2, "utilisation": 0.0, "temperature_c": None, "power_w": 300.25},
    ]
