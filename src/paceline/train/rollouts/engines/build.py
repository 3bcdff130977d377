"""Build the engine that a config asks for."""

from __future__ import annotations

from paceline.config.schema import Config
from paceline.distributed.timing.progress import ProgressTracker
from paceline.train.rollouts.engines.base import CompletionEngine, CompletionLimits
from paceline.train.state import TrainComponents


def build_engine(
    config: Config,
    components: TrainComponents,
    progress: ProgressTracker,
    limits: CompletionLimits,
    picks_logits: bool,
) -> CompletionEngine:
    """Return the engine. A collective for vLLM.

    Args:
        picks_logits: whether the model can compute the logits of the last token only.
    """
    engine = config.grpo.engine_used
    if engine == "continuous_batching":
        from paceline.train.rollouts.engines.batching import BatchingEngine

        return BatchingEngine(components, progress, limits)
    from paceline.train.rollouts.generation import RolloutGenerator

    return RolloutGenerator(components, progress, limits, picks_logits)
