"""Metrics of generated answers, over the ranks."""

import logging
from collections.abc import Sequence
from typing import Any

from paceline.core.texts import UserText
from paceline.core.user_code import error_summary
from paceline.distributed.rank_zero import rank_zero_phase
from paceline.train.answers.generation import AnswerGenerator, Prompt
from paceline.train.answers.text_metrics import text_metric

logger = logging.getLogger(__name__)


def answer_metrics(
    generator: AnswerGenerator, dataset: Any, names: Sequence[str], batch_size: int
) -> tuple[dict[str, float], int]:
    """Generate answers to rows of the validation data and compare them with their references.

    Returns:
        The metrics, the same on every rank, and the number of rows. Both are empty, with a warning,
        if the model cannot generate. A metric that fails is left out, with a warning. A collective.
    """
    prompts = _read_prompts(generator, dataset)
    reason = generator.unsupported_reason()
    if reason is None and not prompts:
        reason = "no row of the validation data has a prompt and an answer"
    if reason is None:
        answers = generator.generate(prompts, batch_size)
        reason = answers.error
    if reason is not None:
        logger.warning(
            UserText(
                "`evaluation.metrics`: no answers were generated: {reason}",
                code="no-answers-generated",
                reason=reason,
            )
        )
        return {}, 0
    comm = generator.comm
    metrics = None
    with rank_zero_phase(comm, "computing the metrics of generated answers"):
        if comm.is_rank_zero:  # functions of the user may not be deterministic
            texts = [generator.text(answers.ids[number]) for number in range(len(prompts))]
            references = [generator.text(prompt.reference) for prompt in prompts]
            metrics = _compute(names, texts, references)
    shared = comm.broadcast_object(metrics)
    assert shared is not None
    return shared, len(prompts)


def _read_prompts(generator: AnswerGenerator, dataset: Any) -> list[Prompt]:
    """Read the prompts, spread evenly over the validation data. They are the same at every
    evaluation."""
    num_rows = generator.config.evaluation.metric_rows
    count = len(dataset) if num_rows is None else min(num_rows, len(dataset))
    rows = (number * len(dataset) // count for number in range(count))
    prompts = (generator.last_prompt(dataset, row) for row in rows)
    return [prompt for prompt in prompts if prompt is not None]


def _compute(names: Sequence[str], answers: list[str], references: list[str]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for name in names:
        try:
            metrics |= text_metric(name)(answers, references)
        except Exception as error:  # training must not be lost because of a metric
            logger.warning(
                UserText(
                    "`evaluation.metrics: {name}` failed: {reason}",
                    code="metric-failed",
                    name=name,
                    reason=error_summary(error),
                )
            )
    return metrics
