"""Model FLOPs utilization: the share of a device's peak rate that training uses.

Chowdhery et al., "PaLM" (2022), appendix B: only the FLOPs that the model requires count, without
recomputation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.config.schema import Config
from paceline.core.report import PeakRate
from paceline.models.blocks import base_model
from paceline.models.shape.dims import LanguageDims, dims_of
from paceline.models.shape.flops import language_flops


@dataclass(frozen=True)
class ModelFlops:
    """The FLOPs of a language model.

    Args:
        attended_tokens: mean length of the sample of a token.
        num_devices: number of devices that share the work of a step.
        peak: the peak rate of a device; None if unknown.
    """

    dims: LanguageDims
    config: Config
    attended_tokens: float
    num_devices: int
    peak: PeakRate | None

    def per_device(self, labels: float, tokens: float) -> float:
        """Return the FLOPs of forward and backward of a device.

        Args:
            labels: number of tokens with loss, of all devices.
            tokens: number of tokens, of all devices.
        """
        total = language_flops(
            self.dims, self.config, tokens, labels, self.attended_tokens, with_recomputation=False
        )
        return total / self.num_devices

    def utilization(self, flops_per_device_s: float) -> float | None:
        """Return the model FLOPs utilization, from 0 to 1; None if the peak is unknown."""
        return None if self.peak is None else flops_per_device_s / self.peak["flops_s"]


def model_flops(
    model: Any, config: Config, lengths: np.ndarray | None, num_devices: int, peak: PeakRate | None
) -> ModelFlops | None:
    """Return the FLOPs of a model; None if they are unknown, as for all models except language
    models.

    Args:
        lengths: number of tokens of each sample; None if samples do not consist of tokens.
    """
    base = base_model(model)
    if lengths is None or not len(lengths) or not hasattr(base, "config"):
        return None
    dims = dims_of(base.config.to_dict())
    if dims is None:
        return None
    tokens = lengths.astype(np.float64)
    attended_tokens = float((tokens**2).sum() / max(tokens.sum(), 1.0))
    return ModelFlops(dims, config, attended_tokens, num_devices, peak)


def mean_peak(peaks: Sequence[PeakRate | None]) -> PeakRate | None:
    """Return the mean peak rate of the devices; None if one of them is unknown."""
    known = [peak for peak in peaks if peak is not None]
    if not known or len(known) < len(peaks):
        return None
    return {
        "device": ", ".join(dict.fromkeys(peak["device"] for peak in known)),
        "flops_s": sum(peak["flops_s"] for peak in known) / len(known),
        "source": "; ".join(dict.fromkeys(peak["source"] for peak in known)),
    }
