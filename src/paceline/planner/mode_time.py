"""The time of a step of one of Paceline's modes on a machine. Imports no torch."""

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Self

from paceline.config.schema import Config
from paceline.models.shape.dims import LanguageDims
from paceline.parallel.cost import Cost
from paceline.parallel.registry import ParallelLayout
from paceline.planner.from_config import setup_of
from paceline.planner.machine.hardware import Machine
from paceline.planner.machine.history import correction
from paceline.planner.micro_batch import MicroBatchProfile, micro_batch_flops
from paceline.planner.model_profile import ModelProfile
from paceline.planner.setup import TrainingSetup
from paceline.planner.time.constants import (
    coefficients_of,
    constants,
    cpu_coefficients,
    spread_of,
    with_measured_products,
)
from paceline.planner.time.rates import Rates, cpu_rates, curve_of, rates_of, with_measured
from paceline.planner.time.step import Coefficients, EstimatedStepTime, step_time
from paceline.planner.time.work import RankWork, bucket_shares, count_work

#: Stands for a model whose widths are not known: only its operations are counted.
_NO_DIMS = LanguageDims(
    hidden=128, layers=1, heads=1, key_heads=1, queries=128, keys=128, feed_forward=1, vocabulary=1
)
_NO_WORK = RankWork(
    **dict.fromkeys((field.name for field in fields(RankWork)), 0.0) | {"chunks": 1.0}
)


@dataclass(frozen=True)
class TimeEstimate:
    """The time of a step.

    Args:
        low_s, high_s: 80 % of published results are within this range of a prediction; None if
            nothing is known about that, as on CPUs.
        parts: seconds by kind, before earlier runs on the machine correct their sum; without
            ``rollout_s``.
        rollout_s: mean seconds per step in which completions are generated.
    """

    seconds: float
    low_s: float | None = None
    high_s: float | None = None
    parts: EstimatedStepTime | None = None
    rollout_s: float = 0.0

    @property
    def parts_s(self) -> dict[str, float] | None:
        return None if self.parts is None else asdict(self.parts)

    def scaled(self, factor: float) -> Self:
        """Return the estimate with another time."""
        low = None if self.low_s is None else self.low_s * factor
        high = None if self.high_s is None else self.high_s * factor
        return replace(self, seconds=self.seconds * factor, low_s=low, high_s=high)

    def with_rollout(self, rollout_s: float) -> Self:
        """Return the estimate with the time in which completions are generated. How far published
        results differ from such an estimate is not known, so it has no range."""
        seconds = self.seconds + rollout_s
        return replace(self, seconds=seconds, low_s=None, high_s=None, rollout_s=rollout_s)

    @property
    def range_s(self) -> list[float] | None:
        return None if self.low_s is None or self.high_s is None else [self.low_s, self.high_s]


def time_of_setup(setup: TrainingSetup, machine: Machine, dtype: str | None) -> TimeEstimate:
    """Estimate the step of a language model on devices of the table.

    Args:
        dtype: dtype of matrix products, see :meth:`~paceline.planner.devices.Device.flops_s`.
    """
    rates, reached = _on_device(setup, machine, dtype)
    return _estimate(step_time(count_work(setup, rates), reached), machine)


def time_of_mode(
    layout: ParallelLayout,
    config: Config,
    profile: ModelProfile,
    batch: MicroBatchProfile,
    cost: Cost,
    machine: Machine,
    stage: int | None = None,
) -> TimeEstimate:
    """Estimate the step of a mode, corrected by earlier runs on the machine. ``stage``: of
    DeepSpeed."""
    estimate = _uncorrected(layout, config, profile, batch, cost, machine, stage)
    return _corrected(estimate, layout, config, machine)


def time_of_layout(
    layout: ParallelLayout,
    config: Config,
    dims: LanguageDims,
    batch: MicroBatchProfile,
    machine: Machine,
) -> TimeEstimate:
    """Estimate the step of a mode from the model's widths alone: without the parameters of norms
    and biases, and without what a strategy copies to and from the host."""
    samples, length = batch.positions / batch.sample, batch.sample
    setup = setup_of(config, dims, layout, samples, length, batch.label_share)
    estimate = _time_of_setup(machine.with_links(setup), layout, config, None, machine)
    return _corrected(estimate, layout, config, machine)


def _corrected(
    estimate: TimeEstimate, layout: ParallelLayout, config: Config, machine: Machine
) -> TimeEstimate:
    calibration, parts = machine.calibration, estimate.parts_s or {}
    factor = 1.0
    if calibration is not None and parts:
        factor = calibration.seconds(parts) / estimate.seconds
    if machine.history:
        factor *= correction(
            machine.history, layout.strategy, layout.world_size, config.model, calibration
        )
    return estimate.scaled(factor)


def _uncorrected(
    layout: ParallelLayout,
    config: Config,
    profile: ModelProfile,
    batch: MicroBatchProfile,
    cost: Cost,
    machine: Machine,
    stage: int | None,
) -> TimeEstimate:
    setup = setup_of_batch(config, profile, layout, batch, stage)
    if setup is None:
        return _time_of_operations(layout, config, profile, batch, cost, machine)
    return _time_of_setup(_setup_of_mode(setup, cost, machine), layout, config, cost, machine)


def _time_of_setup(
    setup: TrainingSetup,
    layout: ParallelLayout,
    config: Config,
    cost: Cost | None,
    machine: Machine,
) -> TimeEstimate:
    rates, reached = reached_rates(setup, layout, config, machine)
    work = count_work(setup, rates)
    if cost is not None:
        work = _waiting(work, layout, cost, machine)
    result = step_time(work, reached)
    if machine.timed_as is None:
        return TimeEstimate(result.total_s, parts=result)
    return _estimate(result, machine, cost)


def reached_rates(
    setup: TrainingSetup, layout: ParallelLayout, config: Config, machine: Machine
) -> tuple[Rates, Coefficients]:
    """Return the rates of the machine's devices, and what a set-up reaches of them."""
    dtype = config.train_args.compute_format
    if machine.timed_as is None:
        return _on_cpu(layout, machine, dtype)
    return _on_device(setup, machine, dtype)


def setup_of_batch(
    config: Config,
    profile: ModelProfile,
    layout: ParallelLayout,
    batch: MicroBatchProfile,
    stage: int | None = None,
) -> TrainingSetup | None:
    """Return the set-up of a language model with known widths, else None. ``stage``: of
    DeepSpeed."""
    if profile.dims is None or not batch.has_tokens:
        return None
    samples, length = batch.positions / batch.sample, batch.sample
    return setup_of(
        config,
        profile.dims,
        layout,
        samples,
        length,
        batch.label_share,
        stage,
        profile.shape.splits_tokens,
    )


def _setup_of_mode(setup: TrainingSetup, cost: Cost, machine: Machine) -> TrainingSetup:
    if setup.zero_stage == 0 and setup.tensor == setup.pipeline == 1:
        # Local SGD exchanges weights seldom, and compressed gradients are smaller. Computation
        # waits for the tokens that experts exchange, so they are counted apart.
        exchanged = cost.traffic.get("all_to_all", 0) if setup.expert > 1 else 0
        setup = replace(setup, sync_bytes=float(cost.traffic_per_step - exchanged))
    return machine.with_links(setup)


def _on_device(
    setup: TrainingSetup, machine: Machine, dtype: str | None
) -> tuple[Rates, Coefficients]:
    """Return the rates of the machine's accelerators and what the set-up reaches of them, measured
    where `paceline doctor` did."""
    device = machine.timed_as
    assert device is not None
    rates, reached = (
        rates_of(setup, device, dtype),
        coefficients_of(setup, device, constants()),
    )
    measured = machine.rates_of(machine.devices_per_host)
    curve = None if measured is None else curve_of(measured, dtype)
    if measured is None or curve is None:
        return rates, reached
    return with_measured(rates, measured, curve), with_measured_products(
        reached, curve, measured.operation_s, setup, constants()
    )


def _estimate(
    result: EstimatedStepTime, machine: Machine, cost: Cost | None = None
) -> TimeEstimate:
    device = machine.timed_as
    assert device is not None
    if cost is not None:
        result = replace(result, host_s=result.host_s + host_time(cost, machine, result.total_s))
    factor = math.exp(spread_of(device))
    seconds = result.total_s
    return TimeEstimate(seconds, seconds / factor, seconds * factor, result)


def _time_of_operations(
    layout: ParallelLayout,
    config: Config,
    profile: ModelProfile,
    batch: MicroBatchProfile,
    cost: Cost,
    machine: Machine,
) -> TimeEstimate:
    """Estimate the step of a model if only its number of operations is known. On a device, the step
    reaches the rate of large matrix products."""
    axes, device = layout.axes, machine.timed_as
    flops = micro_batch_flops(config, profile, batch) / (axes.tensor * axes.pipeline * axes.context)
    if device is None:
        rates, reached = _on_cpu(layout, machine, config.train_args.compute_format)
    else:
        setup = machine.with_links(TrainingSetup(_NO_DIMS))
        rates, reached = _on_device(setup, machine, config.train_args.compute_format)
    bucket_bytes = config.parallel.bucket_cap_mb * 2**20
    first_bucket, last_bucket = bucket_shares(float(cost.gradients), bucket_bytes)
    work = replace(
        _NO_WORK,
        products_s=flops / rates.flops_s,
        sync_link_s=cost.traffic_per_step / rates.link_bytes_s,
        sync_first=first_bucket,
        sync_last=last_bucket,
        stages=float(axes.pipeline),
        micro_batches=float(config.train_args.gradient_accumulation_steps),
    )
    result = step_time(_waiting(work, layout, cost, machine), reached)
    result = replace(result, host_s=result.host_s + host_time(cost, machine, result.total_s))
    return TimeEstimate(result.total_s, parts=result)


def _on_cpu(
    layout: ParallelLayout, machine: Machine, dtype: str | None
) -> tuple[Rates, Coefficients]:
    """Return the measured rates of a CPU rank and what training reaches of them."""
    # A single rank uses all cores.
    measured = machine.rates_of(1 if layout.world_size == 1 else machine.devices_per_host)
    assert measured is not None
    curve = curve_of(measured, dtype) or next(iter(measured.products.values()))
    rates = cpu_rates(measured, curve, machine.link_bytes_s, machine.message_s or 0.0)
    return rates, cpu_coefficients(curve, rates, constants())


def _waiting(work: RankWork, layout: ParallelLayout, cost: Cost, machine: Machine) -> RankWork:
    """Return the work with the traffic between the threads of `dp`, which computation waits for."""
    if layout.num_processes > 1 or layout.axes.replicas == 1:
        return work
    copied_s = cost.traffic_per_step / machine.link_bytes_s
    return replace(work, sync_link_s=0.0, sync_network_s=0.0, host_copy_s=copied_s)


def host_time(cost: Cost, machine: Machine, compute_s: float) -> float:
    """Return the seconds of the copies to and from the host that do not overlap with computation.

    Activations leave during forward, a third of the computation, and return during backward.
    Parameters and gradients are copied in both. The state of the optimizer is copied while nothing
    else is computed, in both directions at once.
    """
    link = machine.host_link_bytes_s
    each_way = cost.host_traffic.get("activations", 0) / 2 / link
    seconds = max(0.0, each_way - compute_s / 3) + max(0.0, each_way - compute_s * 2 / 3)
    seconds += max(0.0, cost.host_traffic.get("parameters", 0) / link - compute_s)
    return seconds + cost.host_traffic.get("optimizer", 0) / 2 / link
