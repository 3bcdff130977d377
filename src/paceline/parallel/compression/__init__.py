"""Gradient compressors: what is sent of a bucket of gradients, and what waits for a later step."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.config.schema.compression import Compression
    from paceline.parallel.compression.base import Compressor


def make_compressor(settings: Compression, seed: int, momentum: float = 0.0) -> Compressor:
    """The compressor that the config's section asks for.

    Args:
        momentum: of momentum correction, for `topk` and `randomk`.
    """
    from paceline.parallel.compression.cast import CastCompressor
    from paceline.parallel.compression.powersgd import PowerSGD
    from paceline.parallel.compression.signsgd import SignSGD
    from paceline.parallel.compression.sparsify import RandomK, TopK

    method = settings.chain[0]
    if method in ("topk", "randomk"):
        return (TopK if method == "topk" else RandomK)(settings, seed, momentum)
    return {"powersgd": PowerSGD, "signsgd": SignSGD}.get(method, CastCompressor)(settings, seed)
