"""What this machine has, and what its NVIDIA accelerators say of themselves."""

import os
import threading
import time
from typing import Any

_FRESH_S = 1.0  # a reading this recent is not made again
_lock = threading.Lock()
_last: tuple[float, dict[str, Any]] | None = None


def machine() -> dict[str, Any]:
    """``{cpu_count, memory_bytes, gpus: [{index, name, utilisation (0 to 1), temperature_c,
    power_w, memory_used_bytes, memory_bytes}], gpus_problem}``; a figure that a device does not
    give is None."""
    global _last
    with _lock:
        if _last is None or time.monotonic() - _last[0] > _FRESH_S:
            gpus, problem = _gpus()
            memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            found = {
                "cpu_count": os.cpu_count(),
                "memory_bytes": memory,
                "gpus": gpus,
                "gpus_problem": problem,
            }
            _last = (time.monotonic(), found)
        return _last[1]


def _gpus() -> tuple[list[dict[str, Any]] | None, str | None]:
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


def _gpu(nvml: Any, number: int) -> dict[str, Any]:
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
