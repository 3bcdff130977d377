"""Load the engine that `paceline serve` uses."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from paceline.inference.engine.engine import Engine


def load_engine(name: str, run: Path, adapters: Mapping[str, Path]) -> Engine:
    """Return an engine with the model of a run, its base, and adapters of other runs.

    Args:
        name: ``transformers``, ``vllm``, or ``auto``, which is transformers: vLLM is not tested.

    Raises:
        ConfigError: the engine is not installed, or a model cannot be loaded.
    """
    if name == "vllm":
        from paceline.inference.engine.vllm_engine import VllmEngine

        return VllmEngine.of_runs(run, adapters)
    from paceline.inference.engine.transformers_engine import TransformersEngine

    return TransformersEngine.of_runs(run, adapters)
