"""The processors, memory and NVIDIA GPUs of this machine."""

import os
import threading
import time
from typing import Any

import psutil
from pydantic import JsonValue

from paceline.web.files import JSONObject

_MAX_AGE_S = 1.0
_lock = threading.Lock()
_last: tuple[float, JSONObject] = (-float("inf"), {})


def machine() -> JSONObject:
    """Return ``{cpu_count, memory_bytes, gpus: [{index, name, utilisation (0 to 1), temperature_c,
    power_w, memory_used_bytes, memory_bytes}], gpus_problem}``, at most a second old. A figure that
    a device does not report is None."""
    global _last
    with _lock:
        if time.monotonic() - _last[0] > _MAX_AGE_S:
            gpus, problem = _gpus()
            machine: JSONObject = {
                "cpu_count": os.cpu_count(),
                "memory_bytes": psutil.virtual_memory().total,
                "gpus": gpus,
                "gpus_problem": problem,
            }
            _last = (time.monotonic(), machine)
        return _last[1]


def _gpus() -> tuple[list[JsonValue] | None, str | None]:
    """Return the GPUs and None, or None and the reason why they cannot be read."""
    try:
        import pynvml
    except ImportError:
        return None, "nvidia-ml-py is not installed, so NVIDIA GPUs cannot be monitored"
    try:
        pynvml.nvmlInit()
        try:
            return [_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())], None
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        return None, f"the NVIDIA driver does not respond ({error})"


def _gpu(nvml: Any, index: int) -> JSONObject:
    device = nvml.nvmlDeviceGetHandleByIndex(index)

    def query(function: Any, *args: Any) -> Any:
        try:
            return function(device, *args)
        except nvml.NVMLError:  # this device does not report the figure
            return None

    name, memory = query(nvml.nvmlDeviceGetName), query(nvml.nvmlDeviceGetMemoryInfo)
    rates, power = query(nvml.nvmlDeviceGetUtilizationRates), query(nvml.nvmlDeviceGetPowerUsage)
    return {
        "index": index,
        "name": name.decode() if isinstance(name, bytes) else name,
        "utilisation": None if rates is None else rates.gpu / 100,
        "temperature_c": query(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
        "power_w": None if power is None else power / 1000,
        "memory_used_bytes": None if memory is None else memory.used,
        "memory_bytes": None if memory is None else memory.total,
    }
