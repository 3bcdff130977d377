"""The interval between checkpoints of a run whose config gives the mean time between failures."""

import logging
import math

from paceline.config.schema import Config
from paceline.core.texts import UserText
from paceline.models.shape.record import ModelShape, total_bytes
from paceline.parallel.registry import ParallelLayout
from paceline.planner.machine.hardware import Machine
from paceline.planner.model_profile import describe
from paceline.planner.scale.goodput import FailureModel, Goodput, goodput_of
from paceline.planner.search.trials import with_settings

logger = logging.getLogger(__name__)


def checkpoint_bytes(shape: ModelShape) -> int:
    """Return the bytes of a checkpoint: trained weights and the state of the optimizer."""
    return total_bytes(shape.trained) + shape.moment_bytes


def goodput_on(
    failures: FailureModel, config: Config, shape: ModelShape, machine: Machine
) -> Goodput:
    """Return the goodput of a run on all devices of a machine."""
    return goodput_of(
        failures,
        checkpoint_bytes(shape),
        machine.count,
        machine.devices_per_host,
        math.inf if machine.is_cpu else machine.host_link_bytes_s,
        is_async=config.train_args.async_save,
    )


def with_save_interval(config: Config, layout: ParallelLayout, machine: Machine) -> Config:
    """Return the config with the best interval between checkpoints, if it gives the mean time
    between failures and no interval."""
    recovery = config.recovery
    if recovery.mtbf_hours is None or recovery.save_interval_s is not None:
        return config
    shape = describe(config).shape
    machine = machine.with_count(layout.world_size)
    goodput = goodput_on(FailureModel(recovery.mtbf_hours), config, shape, machine)
    seconds = max(1.0, round(goodput.interval_s, 1))
    logger.info(
        UserText(
            "save_interval_s: {seconds}, from recovery.mtbf_hours: {mtbf_hours}: a failure every"
            " {mtbf_s} h on {count} devices, and checkpoints that pause the run for an estimated"
            " {pause_s} s",
            code="save-interval-chosen",
            seconds=seconds,
            mtbf_hours=recovery.mtbf_hours,
            mtbf_s=f"{goodput.mtbf_s / 3600:.3g}",
            count=machine.count,
            pause_s=f"{goodput.pause_s:.2g}",
        ),
    )
    return with_settings(config, {"recovery.save_interval_s": seconds})
