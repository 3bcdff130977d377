"""Find the largest micro-batch that fits (``auto_find_batch_size``), with the same global batch."""

import logging
from dataclasses import replace

from paceline.config.derive import ResolvedValues
from paceline.config.schema import Config
from paceline.core.files import human_bytes
from paceline.parallel.registry import ParallelLayout
from paceline.planner.estimate import estimate
from paceline.planner.hardware import Machine
from paceline.planner.micro_batch import micro_batch
from paceline.planner.model_profile import describe
from paceline.train.run_spec import RunSpec

logger = logging.getLogger(__name__)


def with_batch_size(config: Config, micro_batch_size: int, accumulation: int) -> Config:
    """Return the config with another size of micro-batches."""
    update = {
        "per_device_train_batch_size": micro_batch_size,
        "gradient_accumulation_steps": accumulation,
    }
    train_args = config.train_args.model_copy(update=update)
    return config.model_copy(update={"train_args": train_args})


def largest_that_fits(config: Config, layout: ParallelLayout, machine: Machine) -> Config:
    """Return the config with the largest micro-batch that is predicted to fit on ``machine``: a
    divisor of the samples of a rank. If none is, it has one sample. If the memory of the run cannot
    be predicted, the config is unchanged."""
    args = config.train_args
    before = args.per_device_train_batch_size
    num_samples = before * args.gradient_accumulation_steps
    profile = describe(config)
    for size in _divisors(num_samples):
        trial = with_batch_size(config, size, num_samples // size)
        scaled = profile.scaled(size / before)
        mode = estimate(layout, trial, scaled, micro_batch(trial), machine)
        if mode.cost is None:
            logger.warning(
                f"auto_find_batch_size: the memory of this run is not predicted ({mode.reason});"
                f" it starts with micro-batches of {before}, and smaller ones are tried if a rank"
                " runs out of memory"
            )
            return config
        if mode.fits:
            needed = f"{human_bytes(mode.total)} of {human_bytes(machine.memory_bytes)} per rank"
            reason = f"the largest that are predicted to fit ({needed})"
            if not profile.knows_activations:
                reason = (
                    f"all samples of a rank; the memory of activations is not predicted (the rest:"
                    f" {needed}), and smaller ones are tried if a rank runs out of memory"
                )
            logger.info(
                f"auto_find_batch_size: micro-batches of {size} × {num_samples // size}"
                f" accumulation, {reason}"
            )
            return trial
    logger.warning("auto_find_batch_size: not even micro-batches of 1 sample are predicted to fit")
    return with_batch_size(config, 1, num_samples)


def smaller_batch(spec: RunSpec) -> RunSpec | None:
    """Return the spec with the next smaller micro-batch, after a rank ran out of memory. None if
    the config does not allow it, or if micro-batches have one sample already."""
    args, derived = spec.config.train_args, spec.derived
    if not args.auto_find_batch_size or args.per_device_train_batch_size == 1:
        return None
    num_samples = args.per_device_train_batch_size * args.gradient_accumulation_steps
    size = next(size for size in _divisors(num_samples) if size < args.per_device_train_batch_size)
    config = with_batch_size(spec.config, size, num_samples // size)
    return replace(spec, config=config, derived=_with_micro_batch(derived, size))


def _with_micro_batch(derived: ResolvedValues, size: int) -> ResolvedValues:
    accumulation = -(-derived.global_batch_size // (size * derived.replicas))
    return replace(derived, micro_batch_size=size, gradient_accumulation_steps=accumulation)


def _divisors(number: int) -> list[int]:
    """Return the divisors of a number, the largest first."""
    return [divisor for divisor in range(number, 0, -1) if number % divisor == 0]
