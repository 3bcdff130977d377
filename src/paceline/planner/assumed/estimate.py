"""Estimate the memory and the time of an assumed set-up. Imports no torch."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Literal, TypedDict

from paceline.core.errors import ConfigError
from paceline.planner.assumed.keys import Value, assume, check_experts
from paceline.planner.hardware import Machine
from paceline.planner.memory.parts import AssumedMemory, memory_parts
from paceline.planner.memory.total import MemoryKind, memory_bytes, memory_coefficients
from paceline.planner.mode_time import TimeEstimate, time_of_setup
from paceline.planner.setup import TrainingSetup
from paceline.planner.time.constants import constants

Verdict = Literal["fits", "unsure", "does_not_fit"]


class AssumedReport(TypedDict):
    """The assumed set-up in the JSON of a plan. ``setup``: all of it; ``memory_bytes``: its parts,
    and the sum as torch allocates it and as the driver counts it."""

    assumed: dict[str, int | float | str | bool | list[str]]
    setup: dict[str, int | float | str | bool | tuple[str, ...] | None]
    world_size: int
    verdict: Verdict
    memory_bytes: dict[str, float]
    step_time_s: float
    step_time_range_s: list[float] | None
    step_time_parts_s: dict[str, float] | None
    tokens_per_second: float
    tokens_per_second_per_device: float


@dataclass(frozen=True)
class AssumedEstimate:
    """The estimate of an assumed set-up.

    Args:
        values: what was assumed.
        allocated_bytes, driver_bytes: bytes of tensors, and of everything on the device.
        limit_bytes: memory of the device.
    """

    values: Mapping[str, Value]
    setup: TrainingSetup
    parts: AssumedMemory
    allocated_bytes: float
    driver_bytes: float
    limit_bytes: int
    time: TimeEstimate

    @property
    def verdict(self) -> Verdict:
        """Whether it fits: in between, the allocator has to return unused blocks."""
        if self.driver_bytes <= self.limit_bytes:
            return "fits"
        return "unsure" if self.allocated_bytes <= self.limit_bytes else "does_not_fit"

    @property
    def tokens_per_second(self) -> float:
        return self.setup.step_tokens / self.time.seconds

    def as_dict(self) -> AssumedReport:
        sizes = {name: float(size) for name, size in asdict(self.parts).items()}
        sizes |= {"allocated": self.allocated_bytes, "driver": self.driver_bytes}
        return AssumedReport(
            assumed={
                key: list(value) if isinstance(value, tuple) else value
                for key, value in self.values.items()
            },
            setup={
                field.name: getattr(self.setup, field.name)
                for field in fields(self.setup)
                if field.name != "dims"
            },
            world_size=self.setup.world_size,
            verdict=self.verdict,
            memory_bytes=sizes,
            step_time_s=self.time.seconds,
            step_time_range_s=self.time.range_s,
            step_time_parts_s=self.time.parts_s,
            tokens_per_second=self.tokens_per_second,
            tokens_per_second_per_device=self.tokens_per_second / self.setup.world_size,
        )


def estimate_assumed(
    base: TrainingSetup, values: Mapping[str, Value], machine: Machine, dtype: str | None
) -> AssumedEstimate:
    """Estimate the set-up ``base`` with other values on the machine. Replicas that are not assumed
    use the remaining devices, which share the state if ``zero_stage`` is not 0.

    Raises:
        ConfigError: the device is not in the table, or the axes do not fit the number of devices.
    """
    if machine.device is None:
        raise ConfigError(
            "`--assume` needs a device of the table", fix="name one: `--device A100-80GB`"
        )
    setup = _on_all_devices(assume(machine.with_links(base), values), values, machine.count)
    check_experts(setup)
    parts, limit = memory_parts(setup), machine.device.driver_memory_bytes
    if machine.memory_bytes != machine.device.memory_bytes:
        limit = machine.memory_bytes
    kinds: tuple[MemoryKind, MemoryKind] = ("allocated", "driver")
    allocated, driver = (
        memory_bytes(parts, memory_coefficients(setup, kind, constants())) for kind in kinds
    )
    time = time_of_setup(setup, machine, dtype)
    return AssumedEstimate(values, setup, parts, allocated, driver, limit, time)


def _on_all_devices(setup: TrainingSetup, values: Mapping[str, Value], count: int) -> TrainingSetup:
    if setup.world_size == count:
        return setup
    # ZeRO divides its state among the ranks of `shard`.
    axis = "shard" if setup.zero_stage else "data"
    rest, remainder = divmod(count, setup.world_size // getattr(setup, axis))
    if axis in values or remainder:
        raise ConfigError(
            f"the assumed axes have {setup.world_size} ranks, and there are {count} devices",
            allowed="axes whose product is the number of devices",
            fix=f"plan for as many devices: `--world-size {setup.world_size}`",
        )
    return assume(setup, {**_axes(setup), axis: rest})


def _axes(setup: TrainingSetup) -> dict[str, Value]:
    names = ("data", "shard", "tensor", "pipeline", "context", "expert")
    return {name: getattr(setup, name) for name in names}
