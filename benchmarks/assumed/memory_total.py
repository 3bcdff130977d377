"""The memory of a set-up from its parts and fitted constants. Imports no torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from assumed.memory_parts import AssumedMemory
from paceline.planner.setup import TrainingSetup

#: How a figure was measured: tensors, the allocator's blocks, or all that the driver counts.
MemoryKind = Literal["allocated", "reserved", "driver"]


@dataclass(frozen=True)
class MemoryCoefficients:
    """Fitted factors of :class:`~assumed.memory_parts.AssumedMemory`, and the share and
    the bytes that the allocator and the driver add."""

    state: float
    gathered: float
    activations: float
    temporary: float
    reserved: float
    context_bytes: float


def memory_factors(setup: TrainingSetup, kind: MemoryKind) -> dict[str, tuple[str, ...]]:
    """Return for each coefficient the constants that it is the product of."""
    is_eager = setup.software in ("eager", "eager-2023")
    return {
        "state": ("memory: state",),
        "gathered": ("memory: gathered",),
        "activations": ("memory: eager" if is_eager else "memory: fused",),
        "temporary": ("memory: temporary",),
        "reserved": () if kind == "allocated" else ("memory: reserved",),
        "context_bytes": {
            "allocated": (),
            "reserved": ("memory: workspaces",),
            "driver": ("memory: context",),
        }[kind],
    }


def memory_coefficients(
    setup: TrainingSetup, kind: MemoryKind, constants: Mapping[str, float]
) -> MemoryCoefficients:
    """Return the coefficients of a set-up."""
    values = {
        name: math.prod(constants[factor] for factor in used)
        for name, used in memory_factors(setup, kind).items()
    }
    if kind == "allocated":
        values["context_bytes"] = 0.0
    return MemoryCoefficients(**values)


def memory_bytes(parts: AssumedMemory, factors: MemoryCoefficients) -> float:
    """Return the bytes of a rank; of arrays, elementwise."""
    state = parts.weights + parts.gradients + parts.optimizer
    tensors = (
        state * factors.state
        + parts.gathered * factors.gathered
        + parts.activations * factors.activations
        + parts.temporary * factors.temporary
    )
    return tensors * factors.reserved + factors.context_bytes
