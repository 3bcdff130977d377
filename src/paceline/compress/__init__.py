"""Gradient compressors: what is sent of a bucket of gradients, and what waits for a later step."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.compress.base import Compressor
    from paceline.config.schema_communication import Compression


def make_compressor(settings: Compression, seed: int, momentum: float = 0.0) -> Compressor:
    """The compressor that the config's section asks for.

    Args:
        momentum: of momentum correction, for `topk` and `randomk`.
    """
    from paceline.compress.dense import FewerBits
    from paceline.compress.lowrank import PowerSGD
    from paceline.compress.signs import SignSGD
    from paceline.compress.sparse import RandomK, TopK

    method = settings.chain[0]
    if method in ("topk", "randomk"):
        return (TopK if method == "topk" else RandomK)(settings, seed, momentum)
    return {"powersgd": PowerSGD, "signsgd": SignSGD}.get(method, FewerBits)(settings, seed)
