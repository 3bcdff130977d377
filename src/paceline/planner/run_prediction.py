"""Predict the step time of a run, for its report."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.config.schema.tasks import ROLLOUT_TASKS
from paceline.core.texts import UserText
from paceline.parallel.registry import get_spec
from paceline.planner.machine.local import local_machine
from paceline.planner.micro_batch import MicroBatchProfile
from paceline.planner.mode_time import TimeEstimate, time_of_mode
from paceline.planner.model_profile import ModelProfile

if TYPE_CHECKING:
    from paceline.models.shape.record import ModelShape
    from paceline.parallel.cost import Cost, Workload
    from paceline.train.run_spec import RunSpec

logger = logging.getLogger(__name__)


def predict_step(
    spec: RunSpec, model: Any, shape: ModelShape, dataset: Any, work: Workload, cost: Cost
) -> TimeEstimate | None:
    """Return the time that the planner predicts for a mean step of a run of a language model; None
    on devices that the planner does not know, and for a task that generates completions: how many
    tokens these have is not known before.

    Args:
        model: the model as the strategy has set it up.
        shape: shape of the model as the task has built it.
        dataset: the training data.
        work: mean workload of a replica per step.
        cost: cost of such a step.
    """
    try:
        return _predict(spec, model, shape, dataset, work, cost)
    except Exception as error:  # the run is done, and its report must not depend on this
        logger.warning(
            UserText(
                "the step time could not be predicted: {kind}: {reason}",
                code="step-time-not-predicted",
                kind=type(error).__name__,
                reason=error,
            )
        )
        return None


def _predict(
    spec: RunSpec, model: Any, shape: ModelShape, dataset: Any, work: Workload, cost: Cost
) -> TimeEstimate | None:
    if spec.config.task in ROLLOUT_TASKS:
        return None
    from paceline.models.blocks import base_model
    from paceline.models.shape.dims import dims_of

    base: Any = base_model(model)
    dims = dims_of(base.config.to_dict()) if hasattr(base, "config") else None
    if dims is None:
        return None
    config, layout = spec.config, spec.layout
    is_cpu, dtype = spec.device_type == "cpu", config.train_args.compute_format
    machine = local_machine(layout.world_size, is_cpu, dtype)
    if not machine.rates_known:
        return None
    lengths = getattr(dataset, "lengths", None)
    labels = getattr(dataset, "label_counts", None)
    length = float(config.train_args.max_length if lengths is None else np.mean(lengths))
    share = 1.0
    if lengths is not None and labels is not None and lengths.sum():
        share = float(labels.sum() / lengths.sum())
    tokens = work.positions
    batch = MicroBatchProfile(tokens, tokens, share, min(length, tokens))
    count = spec.derived.gradient_accumulation_steps
    args = config.train_args.model_copy(update={"gradient_accumulation_steps": count})
    config = config.model_copy(update={"train_args": args})
    stage = get_spec(layout.strategy).variant(config)
    return time_of_mode(layout, config, ModelProfile(shape, dims), batch, cost, machine, stage)
