"""All-reduce and broadcast of our own, over torch's point-to-point calls.

A schedule (:mod:`paceline.distributed.collectives.schedules`) says who sends what when; its steps
are run one by one. Results are the same bits on every rank: each element is summed on one rank and
copied to the others.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from paceline.distributed.collectives.schedules import Sent, Step, check_algorithm, steps
from paceline.distributed.communicator import Communicator
from paceline.distributed.progress import PROGRESS
from paceline.distributed.traffic import inside_collective, uncounted

Combine = Callable[[torch.Tensor, torch.Tensor], Any]


@dataclass
class Trace:
    """What a collective did, as one rank saw it.

    Args:
        steps: of the schedule, those that were run.
        values: this rank's values before the first step and after each.
    """

    steps: list[Step] = field(default_factory=list)
    values: list[list[float]] = field(default_factory=list)


#: How a value that arrived is combined with the rank's own, in place.
_COMBINE: dict[Any, Combine] = {
    dist.ReduceOp.SUM: torch.Tensor.add_,
    dist.ReduceOp.MAX: lambda mine, arrived: torch.maximum(mine, arrived, out=mine),
    dist.ReduceOp.MIN: lambda mine, arrived: torch.minimum(mine, arrived, out=mine),
    dist.ReduceOp.PRODUCT: torch.Tensor.mul_,
}


def all_reduce(
    comm: Communicator,
    tensor: torch.Tensor,
    algorithm: str = "ring",
    trace: Trace | None = None,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> Sent:
    """Reduce ``tensor`` over the ranks of a group, in place; returns when it is done, with what
    this rank sent. A collective: every rank of the group calls it, with a tensor of the same number
    of elements and dtype. Any shape and strides, also without an element. The sum of bool is "or".

    Calls on one group come one after another; threads that call at the same time each need a group
    of their own.

    Args:
        algorithm: ring, tree, halving (recursive halving and doubling) or naive.
        trace: gets every step.
        op: SUM, MAX, MIN or PRODUCT.

    Raises:
        ConfigError: no such algorithm.
        ValueError: no such operation for this dtype.
    """
    check_algorithm(algorithm)
    if op not in _COMBINE:
        raise ValueError(f"no reduction by {op}; there are SUM, MAX, MIN and PRODUCT")
    if tensor.is_complex() and op in (dist.ReduceOp.MAX, dist.ReduceOp.MIN):
        raise ValueError(f"complex numbers have no order: no reduction by {op}")
    return _run(comm, tensor, ("all-reduce", algorithm, 0), _COMBINE[op], trace)


def broadcast(
    comm: Communicator,
    tensor: torch.Tensor,
    algorithm: str = "tree",
    root: int = 0,
    trace: Trace | None = None,
) -> Sent:
    """Copy the values of rank ``root`` (of the group) into ``tensor`` on every rank, in place. As
    :func:`all_reduce`; the algorithms are ring (chunks passed along the ranks), tree and naive."""
    check_algorithm(algorithm, "broadcast")
    if not 0 <= root < comm.size:
        raise ValueError(f"there is no rank {root} among {comm.size}")
    return _run(comm, tensor, ("broadcast", algorithm, root), torch.Tensor.add_, trace)


def _run(
    world: Communicator,
    tensor: torch.Tensor,
    what: tuple[str, str, int],
    combine: Combine,
    trace: Trace | None,
) -> Sent:
    if world.size == 1 or tensor.numel() == 0:
        if trace is not None:
            trace.values.append(tensor.reshape(-1).tolist())
        return Sent(0, 0)
    PROGRESS.issue(f"{what[1]} {what[0]}", tensor, world.group)
    target = tensor.detach()
    # Always in row-major order: ranks may differ in strides.
    flat = (target if target.is_contiguous() else target.contiguous()).view(-1)
    done = _run_steps(world, flat, _steps(*what, world.size, flat.numel()), combine, trace)
    if flat.data_ptr() != target.data_ptr():
        target.copy_(flat.view(target.shape))
    world.traffic.add("send", done.bytes)
    return done


@lru_cache(maxsize=64)
def _steps(collective: str, algorithm: str, root: int, size: int, numel: int) -> tuple[Step, ...]:
    return tuple(steps(algorithm, size, numel, collective, root))


# Communicators whose ranks have all met in a collective.
_MET: weakref.WeakSet[Communicator] = weakref.WeakSet()


def _run_steps(
    world: Communicator,
    flat: torch.Tensor,
    todo: Sequence[Step],
    combine: Combine,
    trace: Trace | None,
) -> Sent:
    """Each step's messages as one batch (NCCL runs the calls of a batch together: no order of calls
    can lock up the ranks)."""
    if flat.device.type != "cpu" and world not in _MET:
        # The first call on a group must have all its ranks in it
        # (torch.distributed.batch_isend_irecv); a tree's has not.
        with uncounted():
            dist.all_reduce(torch.zeros(1, device=flat.device), group=world.group)
        _MET.add(world)
    raw = flat.view(torch.uint8)  # so every dtype can be sent
    wide, rank = flat.element_size(), world.rank
    num_bytes = num_messages = 0
    if trace is not None:
        trace.values.append(flat.tolist())
    for step in todo:
        takes = [send for send in step.sends if send.target == rank]
        arrived = [
            torch.empty(send.count * wide, dtype=torch.uint8, device=flat.device) for send in takes
        ]
        calls = [
            dist.P2POp(dist.irecv, into, group=world.group, group_peer=send.source)
            for send, into in zip(takes, arrived, strict=True)
        ]
        for send in step.sends:
            if send.source == rank:
                part = raw[send.start * wide : send.stop * wide]
                calls.append(
                    dist.P2POp(dist.isend, part, group=world.group, group_peer=send.target)
                )
                num_bytes += part.numel()
                num_messages += 1
        if calls:
            with inside_collective():  # the caller counts the bytes
                works = dist.batch_isend_irecv(calls)
            for work in works:
                work.wait()
        for send, into in zip(takes, arrived, strict=True):
            values, mine = into.view(flat.dtype), flat[send.start : send.stop]
            combine(mine, values) if send.add else mine.copy_(values)
        if trace is not None:
            trace.steps.append(step)
            trace.values.append(flat.tolist())
    return Sent(num_bytes, num_messages)
