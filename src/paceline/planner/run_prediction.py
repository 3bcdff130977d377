"""Predict the step time of a run, for its report."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.parallel.registry import get_spec
from paceline.planner.machine.local import local_machine
from paceline.planner.micro_batch import MicroBatchProfile
from paceline.planner.mode_time import TimeEstimate, time_of_mode
from paceline.planner.model_profile import ModelProfile

if TYPE_CHECKING:
    from paceline.observe.run_start import RunInfo
    from paceline.parallel.cost import Cost

logger = logging.getLogger(__name__)


def predict_step(info: RunInfo, cost: Cost, step: int) -> TimeEstimate | None:
    """Return the time that the planner predicts for a mean step of a run of a language model; None
    for other models, and on devices that the planner does not know.

    Args:
        step: the last step of the run.
    """
    try:
        return _predict(info, cost, step)
    except Exception as error:  # the run is done, and its report must not depend on this
        logger.warning("the step time could not be predicted: %s: %s", type(error).__name__, error)
        return None


def _predict(info: RunInfo, cost: Cost, step: int) -> TimeEstimate | None:
    from paceline.models.blocks import base_model
    from paceline.models.shape.dims import dims_of

    base: Any = base_model(info.model)
    dims = dims_of(base.config.to_dict()) if hasattr(base, "config") else None
    if dims is None or not info.predicts_activations:
        return None
    config, is_cpu = info.config, info.strategy.world.device.type == "cpu"
    machine = local_machine(info.layout.world_size, is_cpu, config.train_args.compute_format)
    if not machine.rates_known:
        return None
    work = info.workload(step)
    lengths = getattr(info.train_dataset, "lengths", None)
    labels = getattr(info.train_dataset, "label_counts", None)
    length = float(config.train_args.max_length if lengths is None else np.mean(lengths))
    share = 1.0
    if lengths is not None and labels is not None and lengths.sum():
        share = float(labels.sum() / lengths.sum())
    tokens = work.positions
    batch = MicroBatchProfile(tokens, tokens, share, min(length, tokens))
    profile = ModelProfile(info.shape, dims)
    args = config.train_args.model_copy(
        update={"gradient_accumulation_steps": info.derived.gradient_accumulation_steps}
    )
    config = config.model_copy(update={"train_args": args})
    stage = get_spec(info.layout.strategy).variant(config)
    return time_of_mode(info.layout, config, profile, batch, cost, machine, stage)
