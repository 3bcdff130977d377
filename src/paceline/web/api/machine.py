"""What this machine has, and what its NVIDIA accelerators say of themselves."""

import os
import threading
import time
from typing import Any

import psutil
from pydantic import JsonValue

from paceline.web.files import JSONObject

_FRESH_S = 1.0  # a reading this recent is not made again
_lock = threading.Lock()
_last: tuple[float, JSONObject] = (-float("inf"), {})


def machine() -> JSONObject:
    """``{cpu_count, memory_bytes, gpus: [{index, name, utilisation (0 to 1), temperature_c,
    power_w, memory_used_bytes, memory_bytes}], gpus_problem}``; a figure that a device does not
    give is None."""
    global _last
    with _lock:
        if time.monotonic() - _last[0] > _FRESH_S:
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
    try:
        import pynvml
    except ImportError:
        return None, "nvidia-ml-py is not installed, so NVIDIA devices cannot be looked at"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return None, f"NVIDIA's driver does not answer ({error})"
    try:
        return [_gpu(pynvml, number) for number in range(pynvml.nvmlDeviceGetCount())], None
    except pynvml.NVMLError as error:
        return None, f"NVIDIA's driver does not answer ({error})"
    finally:
        pynvml.nvmlShutdown()


def _gpu(nvml: Any, number: int) -> JSONObject:
    device = nvml.nvmlDeviceGetHandleByIndex(number)

    def ask(question: Any, *more: Any) -> Any:
        try:
            return question(device, *more)
        except nvml.NVMLError:  # this device does not know, or does not tell
            return None

    name, memory = ask(nvml.nvmlDeviceGetName), ask(nvml.nvmlDeviceGetMemoryInfo)
    rates, power = ask(nvml.nvmlDeviceGetUtilizationRates), ask(nvml.nvmlDeviceGetPowerUsage)
    return {
        "index": number,
        "name": name.decode() if isinstance(name, bytes) else name,
        "utilisation": None if rates is None else rates.gpu / 100,
        "temperature_c": ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
        "power_w": None if power is None else power / 1000,
        "memory_used_bytes": None if memory is None else memory.used,
        "memory_bytes": None if memory is None else memory.total,
    }
