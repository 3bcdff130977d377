"""Build the pipeline of a run that trains on completions of its own."""

from __future__ import annotations

from pathlib import Path

from paceline.data.loader_process import LoaderOptions
from paceline.data.text.tokenizer import load_tokenizer
from paceline.distributed.timing.progress import PROGRESS
from paceline.models.blocks import base_model
from paceline.rollouts.sampling import Sampling
from paceline.tasks.grpo.task import CompletionRows, GrpoTask
from paceline.train.rollouts.engines.base import CompletionEngine, CompletionLimits
from paceline.train.rollouts.engines.build import build_engine
from paceline.train.rollouts.engines.generation import RolloutGenerator
from paceline.train.rollouts.order import CompletionOrder
from paceline.train.rollouts.pipeline import RolloutPipeline
from paceline.train.rollouts.scoring import GroupScorer
from paceline.train.rollouts.turns import TurnGenerator
from paceline.train.run_spec import RunSpec
from paceline.train.state import TrainComponents


def build_rollout_pipeline(
    spec: RunSpec,
    components: TrainComponents,
    options: LoaderOptions,
    train_dataset: CompletionRows,
    eval_dataset: CompletionRows | None,
    accumulation: int,
) -> RolloutPipeline:
    """Return the pipeline. The model must have its initial weights, which the reference model
    keeps.

    Args:
        accumulation: number of micro-batches per step on this rank.
    """
    task, config = components.task, spec.config
    assert isinstance(task, GrpoTask)
    assert task.prepared is not None
    settings, args, world = config.grpo, config.train_args, components.strategy.world
    folder = Path(task.prepared.handle.tokenizer_path)
    tokenizer = load_tokenizer(folder, config.trust_remote_code)
    special = tokenizer.special_ids

    def text_of(ids: list[int]) -> str:
        return tokenizer.decode([token for token in ids if token not in special])

    order = CompletionOrder(
        len(train_dataset),
        spec.derived.global_batch_size,
        args.seed,
        settings.num_generations,
        settings.num_iterations,
        train_dataset.lengths if task.packed else None,
        args.shuffle,
    )
    limits = CompletionLimits(
        _end_ids(task, components, folder),
        Sampling(settings.temperature, settings.top_k or 0, settings.top_p),
        settings.max_completion_length,
        args.seed,
    )
    generator = build_engine(config, components, PROGRESS, limits, task.picks_logits)
    num_ranks = world.env.local_world_size
    scorer = GroupScorer(config, text_of, tokenizer.decode, world.device, num_ranks, PROGRESS)
    return RolloutPipeline(
        config,
        components,
        train_dataset,
        eval_dataset,
        order,
        options,
        generator,
        scorer,
        PROGRESS,
        _build_turns(task, folder, generator, scorer),
        last_step=spec.derived.steps,
        accumulation=accumulation,
    )


def _build_turns(
    task: GrpoTask, folder: Path, generator: CompletionEngine, scorer: GroupScorer
) -> TurnGenerator | None:
    """Return what generates completions with tools; None without an environment."""
    settings = task.config.grpo
    if settings.environment is None:
        return None
    assert isinstance(generator, RolloutGenerator), "check_engine has refused other engines"
    kind, tool_turns = task.tool_turns(folder)
    return TurnGenerator(generator, scorer, kind, tool_turns, settings, PROGRESS)


def _end_ids(task: GrpoTask, components: TrainComponents, folder: Path) -> frozenset[int]:
    """Return the tokens that end a completion, from the tokenizer, the chat template and the
    model's generation settings."""
    config = getattr(base_model(components.model), "generation_config", None)
    of_model = getattr(config, "eos_token_id", None)
    ids = of_model if isinstance(of_model, list) else [of_model]
    return frozenset(token for token in [*ids, *task.stop_tokens(folder)] if token is not None)
