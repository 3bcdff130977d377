"""Build the engine that a config asks for."""

from __future__ import annotations

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.distributed.timing.progress import ProgressTracker
from paceline.rollouts.engine_check import generates_completions
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
    if not generates_completions(config):
        engine = "generate"  # which nothing will ask for completions
    if engine == "continuous_batching":
        from paceline.train.rollouts.engines.batching import BatchingEngine

        return BatchingEngine(components, progress, limits)
    if engine == "vllm":
        if components.strategy.world.device.type != "cuda":
            raise ConfigError(
                "`grpo.engine: vllm` needs GPUs, and the ranks compute on {device}",
                code="vllm-needs-gpus",
                fix="leave `grpo.engine` out",
                device=components.strategy.world.device.type,
            )
        if config.grpo.vllm_mode == "server":
            from paceline.train.rollouts.engines.vllm_server import ServerVllm

            return ServerVllm(config, components, progress, limits)
        from paceline.train.rollouts.engines.vllm_colocated import ColocatedVllm

        return ColocatedVllm(config, components, progress, limits)
    from paceline.train.rollouts.engines.generation import RolloutGenerator

    max_rows = config.grpo.num_generations
    return RolloutGenerator(components, progress, limits, picks_logits, max_rows)
