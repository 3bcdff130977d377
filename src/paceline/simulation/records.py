"""What a simulation is asked for, and its result. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypedDict

from pydantic import JsonValue

#: Kinds of memory.
PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"
ACTIVATIONS, TEMPORARY, COMMUNICATION = "activations", "temporary", "communication"

#: CUDA's caching allocator rounds sizes up to a multiple of this.
ALLOCATION_BYTES = 512
#: Simulated devices of a host.
DEVICES_PER_HOST = 8

Verdict = Literal["fits", "unsure", "does_not_fit"]

#: Memory that torch's allocator reserves, divided by the memory of all tensors. Published figures
#: of training runs are about this; the simulation knows only the tensors.
RESERVED_SHARE = 1.23


class MemoryByKind(TypedDict):
    """Bytes by kind at the moment of the peak.

    ``parameters`` includes buffers and master weights; ``communication`` are buffers of messages,
    among them weights that FSDP gathers; ``temporary`` is what an operation of backward or of the
    optimizer allocates and frees."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    temporary: int
    communication: int


class Messages(TypedDict):
    """Messages of one collective in a step, or copies to the host or the device. ``bytes``: sum of
    the sizes of the message buffers."""

    collective: str
    count: float
    bytes: int


class Kernels(TypedDict):
    """Kernels of one operation in a phase of a step: ``forward``, ``backward``, ``update`` of the
    weights, or ``synchronize`` after it."""

    phase: str
    operation: str
    launches: float
    bytes: int


class RankReport(TypedDict):
    """The simulated step of a rank, in the JSON of a plan.

    ``launches`` and ``bytes_moved``: number of kernels that compute or copy on the device, and the
    bytes that they read and write; ``kernels`` divides them by operation. ``host_memory_bytes``:
    tensors that are offloaded to the host, at their peak.
    """

    rank: int
    peak_memory_bytes: int
    memory_bytes: MemoryByKind
    messages: list[Messages]
    flops: int
    launches: int
    bytes_moved: int
    kernels: list[Kernels]
    time_floor_s: float
    host_memory_bytes: int


class SimulationReport(TypedDict):
    """``simulated`` in the JSON of a plan. ``peak_memory_bytes``: of the rank that uses most."""

    verdict: Verdict
    peak_memory_bytes: int
    ranks: list[RankReport]


class SimulatedPart(TypedDict, total=False):
    """The keys that a simulation adds to the JSON of a plan."""

    simulated: SimulationReport | None
    simulated_reason: str | None


class SimulatedRankResult(TypedDict, total=False):
    """The result of a job: the report, or why the rank cannot be simulated."""

    report: RankReport
    error: str


@dataclass(frozen=True)
class RankJob:
    """One rank to simulate.

    Args:
        config: the config as JSON.
        strategy, axes: strategy and sizes of the layout.
        lengths: number of tokens of each sample in the micro-batch.
        label_share: share of the tokens that have a loss.
        device: name of a row of the table of devices.
        link_bytes_s: bandwidth between two ranks.
    """

    rank: int
    config: Mapping[str, JsonValue]
    strategy: str
    axes: Mapping[str, int]
    lengths: tuple[int, ...]
    label_share: float
    device: str
    link_bytes_s: float


def verdict_of(peak_memory_bytes: int, memory_bytes: int) -> Verdict:
    """Return whether a device has enough memory: surely, perhaps (fragmentation decides), or
    not."""
    if peak_memory_bytes * RESERVED_SHARE <= memory_bytes:
        return "fits"
    return "unsure" if peak_memory_bytes <= memory_bytes else "does_not_fit"
