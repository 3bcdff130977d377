"""How the replicas of a strategy come together, as numbers: what it takes to tell what that costs,
and whether it pays."""

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
    """Seconds of this rank since the start, added up over the steps, as its host saw them.

    Args:
        backward_s: in the backward during which plain ddp would send its buckets.
        method_s: in the method's own computing (choosing, packing, an outer step): processor time
            where it runs in a thread beside the step, seconds of the step where it does not.
        moments_s: in what plain ddp's optimizer would do in its stead.
    """

    backward_s: float
    method_s: float = 0.0
    moments_s: float = 0.0


@dataclass(frozen=True)
class CommProfile:
    """Gradients of replicas that plain ddp would sum in buckets, and what is done instead.

    Args:
        method: what saves traffic, for a person; None: nothing, this is plain ddp.
        without: what to change in the config to have plain ddp.
        bucket_bytes: of each bucket that plain ddp would sum.
        group: the ranks over which plain ddp would sum them.
        line: the ranks between which the method sends.
        sent_bytes: what a rank sends over it in a step, a mean over ``period`` steps.
        messages: one after the other, in a step; likewise. About.
        spent: asked for anew each time.
        beside: the method computes in a thread beside the step.
        period: steps after which what is sent repeats.
        warmup: steps of a run before the method sends as little as it will.
        has_other_collectives: in a step the ranks also communicate within groups of their own.
    """

    method: str | None
    without: str
    bucket_bytes: Sequence[int]
    group: Communicator
    line: Communicator
    sent_bytes: float
    messages: float
    spent: Callable[[], CommTimes]
    beside: bool = False
    period: int = 1
    warmup: int = 0
    has_other_collectives: bool = False
