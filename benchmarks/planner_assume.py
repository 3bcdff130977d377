"""Estimate the memory and the time of a set-up that Paceline may not train, such as ZeRO-1 beside
tensor parallelism. The README lists the keys of an assumption.

    python benchmarks/planner_assume.py CONFIG.yaml --device H100 --world-size 8 --assume tensor=4
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass

from assumed.keys import AXES, Value, assume, check_experts, parse_assumptions
from assumed.memory_parts import memory_parts
from assumed.memory_total import MemoryKind, memory_bytes, memory_coefficients

from paceline.config.load import load_config
from paceline.core.errors import ConfigError
from paceline.core.files import human_bytes
from paceline.models.files import fit_to_model
from paceline.parallel.registry import layout
from paceline.planner.api import Plan, make_plan
from paceline.planner.machine.hardware import Machine
from paceline.planner.mode_time import TimeEstimate, setup_of_batch, time_of_setup
from paceline.planner.setup import TrainingSetup
from paceline.planner.time.constants import constants


@dataclass(frozen=True)
class AssumedEstimate:
    """The estimate of an assumed set-up.

    Args:
        allocated_bytes, driver_bytes: bytes of tensors, and of everything on the device.
        limit_bytes: memory of the device.
    """

    setup: TrainingSetup
    allocated_bytes: float
    driver_bytes: float
    limit_bytes: int
    time: TimeEstimate

    @property
    def verdict(self) -> str:
        """Whether it fits; `unsure`: the allocator has to return unused blocks."""
        if self.driver_bytes <= self.limit_bytes:
            return "fits"
        return "unsure" if self.allocated_bytes <= self.limit_bytes else "does not fit"

    @property
    def tokens_per_second(self) -> float:
        return self.setup.step_tokens / self.time.seconds


def estimate_assumed(
    base: TrainingSetup, values: Mapping[str, Value], machine: Machine, dtype: str | None
) -> AssumedEstimate:
    """Estimate the set-up ``base`` with other values on the machine. Replicas that are not assumed
    use the remaining devices, which share the state if ``zero_stage`` is not 0.

    Raises:
        ConfigError: the axes do not fit the number of devices.
    """
    assert machine.device is not None
    setup = _on_all_devices(assume(machine.with_links(base), values), values, machine.count)
    check_experts(setup)
    parts, limit = memory_parts(setup), machine.device.driver_memory_bytes
    kinds: tuple[MemoryKind, MemoryKind] = ("allocated", "driver")
    allocated, driver = (
        memory_bytes(parts, memory_coefficients(setup, kind, constants())) for kind in kinds
    )
    time = time_of_setup(setup, machine, dtype)
    return AssumedEstimate(setup, allocated, driver, limit, time)


def _on_all_devices(setup: TrainingSetup, values: Mapping[str, Value], count: int) -> TrainingSetup:
    if setup.world_size == count:
        return setup
    # ZeRO divides its state among the ranks of `shard`.
    axis = "shard" if setup.zero_stage else "data"
    rest, remainder = divmod(count, setup.world_size // getattr(setup, axis))
    if axis in values or remainder:
        raise ConfigError(
            f"the assumed axes have {setup.world_size} ranks, and there are {count} devices",
            code="wrong-number-of-devices",
            fix=f"plan for as many devices: `--world-size {setup.world_size}`",
        )
    return assume(setup, {**{name: getattr(setup, name) for name in AXES}, axis: rest})


def estimate(plan: Plan, assumptions: list[str]) -> AssumedEstimate:
    """Estimate the set-up of a plan with other values. What is not assumed comes from the config,
    and from the mode that it sets (else from the one that `auto` chooses)."""
    base = plan.configured or plan.choice.chosen
    where = layout(plan.config.parallel, 1, "single") if base is None else base.layout
    stage = None if base is None else base.settings.get("deepspeed_stage")
    setup = setup_of_batch(plan.config, plan.profile, where, plan.batch, stage)
    if setup is None:
        raise SystemExit("the widths of this model are not known")
    dtype = plan.config.train_args.compute_format
    return estimate_assumed(setup, parse_assumptions(assumptions), plan.machine, dtype)


def describe(estimate: AssumedEstimate) -> str:
    """Describe the memory and the time of a set-up in two lines."""
    time = estimate.time
    low, high = time.range_s or (time.seconds, time.seconds)
    return (
        f"{estimate.verdict}: {human_bytes(estimate.allocated_bytes)} of tensors,"
        f" {human_bytes(estimate.driver_bytes)} with the allocator's blocks and the CUDA context,"
        f" of {human_bytes(estimate.limit_bytes)} per rank\n{time.seconds:.3g} s per step (80 %"
        f" range {low:.3g} to {high:.3g} s): {estimate.tokens_per_second:,.0f} tokens per second"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition(".")[0])
    parser.add_argument("config")
    parser.add_argument("--device", required=True)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--assume", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    config = fit_to_model(load_config(args.config)).config
    plan = make_plan(config, args.world_size, device=args.device)
    print(describe(estimate(plan, args.assume)))
