"""Describe how a strategy synchronizes its replicas, in the numbers that predict its cost."""

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
    """Seconds on this rank's host, added up over the steps since the start.

    Args:
        backward_s: time of the backward passes during which plain ddp would send its buckets.
        method_s: time of the method's computation (choosing, packing, an outer step): processor
            time if it runs in a background thread, else wall time.
        moments_s: time of computation that replaces part of plain ddp's optimizer.
    """

    backward_s: float
    method_s: float = 0.0
    moments_s: float = 0.0


@dataclass(frozen=True)
class CommProfile:
    """The communication of a strategy compared with plain ddp, which would sum gradients in
    buckets.

    Args:
        method: name of the method that saves traffic, or None for plain ddp.
        opt_out: advice on what to change in the config to use plain ddp.
        bucket_bytes: size in bytes of each bucket that plain ddp would sum.
        ddp_group: group of ranks over which plain ddp would sum them.
        method_group: group of ranks that the method communicates in.
        sent_bytes: bytes that a rank sends in this group per step, averaged over ``period`` steps.
        messages: approximate number of successive messages per step, averaged over ``period``
            steps.
        times: function that returns the times so far.
        in_background: whether the method computes in a background thread.
        period: number of steps after which the traffic repeats.
        warmup: number of steps at the start in which the method sends more.
        has_other_collectives: whether the ranks also communicate within smaller groups in a step.
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


@dataclass(frozen=True)
class RankLoss:
    """A rank that was lost while the other ranks continue.

    Args:
        reason: reason why its process ended, such as ``was killed by SIGKILL``.
        replica: number of its share of the global batch.
        replicas: number of shares of the global batch before the loss.
        steps_missed: number of recent steps whose updates do not include its share.
    """

    rank: int
    pid: int
    reason: str
    replica: int
    replicas: int
    steps_missed: int
