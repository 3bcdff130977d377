"""How the replicas of a strategy are synchronized, as numbers: what is needed to predict the cost
of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

from pydantic import JsonValue

if TYPE_CHECKING:
    from paceline.distributed.communicator import Communicator


class StrategyMetrics(TypedDict, total=False):
    """Sections of the report that only some strategies have."""

    communication: dict[str, JsonValue]
    staleness: dict[str, JsonValue]


@dataclass(frozen=True)
class CommTimes:
    """Seconds of this rank's host, added up over the steps since the start.

    Args:
        backward_s: of the backward passes during which plain ddp would send its buckets.
        method_s: of the method's computation (choosing, packing, an outer step): processor time if
            it runs in a background thread, else seconds of the step.
        moments_s: of computation that replaces some of plain ddp's optimizer.
    """

    backward_s: float
    method_s: float = 0.0
    moments_s: float = 0.0


@dataclass(frozen=True)
class CommProfile:
    """Gradients of replicas that plain ddp would sum in buckets, and what is done instead.

    Args:
        method: the name of the method that saves traffic; None for plain ddp.
        opt_out: what to change in the config to use plain ddp.
        bucket_bytes: bytes of each bucket that plain ddp would sum.
        ddp_group: the ranks over which plain ddp would sum them.
        method_group: the ranks between which the method sends.
        sent_bytes: bytes that a rank sends between them per step, a mean over ``period`` steps.
        messages: approximate number of successive messages per step, a mean over ``period`` steps.
        times: returns the times so far.
        in_background: the method computes in a background thread.
        period: number of steps after which the traffic repeats.
        warmup: number of steps at the start in which the method sends more.
        has_other_collectives: in a step the ranks also communicate within smaller groups.
    """

    method: str | None
    opt_out: str
    bucket_bytes: Sequence[int]
    ddp_group: Communicator
    method_group: Communicator
    sent_bytes: float
    messages: float
    times: Callable[[], CommTimes]
    in_background: bool = False
    period: int = 1
    warmup: int = 0
    has_other_collectives: bool = False
