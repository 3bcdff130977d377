"""The device that a model answers on."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


def inference_device(requested: str = "auto") -> torch.device:
    """Return the accelerator with the most free memory, or the CPU if there is none or if it is
    requested. CUDA_VISIBLE_DEVICES restricts the choice."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or requested == "cpu":
        return torch.device("cpu")
    if accelerator.type != "cuda" or torch.cuda.device_count() == 1:
        return accelerator
    try:
        free = [_free_bytes(index) for index in range(torch.cuda.device_count())]
    except Exception as error:  # the driver's library is missing or does not know the device
        logger.info("the free memory of the GPUs is not known: %s", error)
        return torch.device("cuda", 0)
    return torch.device("cuda", free.index(max(free)))


def _free_bytes(index: int) -> int:
    """Return the free memory of a GPU, without initializing a context there."""
    import torch

    total = torch.cuda.get_device_properties(index).total_memory
    return int(total - torch.cuda.device_memory_used(index))
