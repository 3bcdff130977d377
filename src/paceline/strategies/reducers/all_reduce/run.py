"""Run all-reduce and broadcast with torch's point-to-point calls.

The steps of a schedule (:mod:`.schedules`) run one after another. Results are bit-identical on all
ranks, because each element is summed on one rank and copied to the others.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from paceline.distributed.communicator import Communicator
from paceline.distributed.timing.progress import PROGRESS, hide_in_call_sites
from paceline.distributed.traffic import inside_collective, uncounted
from paceline.strategies.reducers.all_reduce.schedules import Sent, Step, check_algorithm, steps

hide_in_call_sites(__file__)

Combine = Callable[[torch.Tensor, torch.Tensor], Any]


@dataclass
class CollectiveTrace:
    """A record of a collective on one rank.

    Args:
        steps: steps that were run.
        values: values of this rank before the first step and after each step.
    """

    steps: list[Step] = field(default_factory=list)
    values: list[list[float]] = field(default_factory=list)


#: Combines received values into local ones, in place.
_COMBINE: dict[Any, Combine] = {
    dist.ReduceOp.SUM: torch.Tensor.add_,
    dist.ReduceOp.MAX: lambda local, received: torch.maximum(local, received, out=local),
    dist.ReduceOp.MIN: lambda local, received: torch.minimum(local, received, out=local),
    dist.ReduceOp.PRODUCT: torch.Tensor.mul_,
}


def all_reduce(
    comm: Communicator,
    tensor: torch.Tensor,
    algorithm: str = "ring",
    trace: CollectiveTrace | None = None,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> Sent:
    """Reduce ``tensor`` over the ranks of a group, in place, and return the amount that this rank
    sent.

    A collective: every rank of the group must call it with a tensor of the same dtype and number of
    elements. The tensor may have any shape and strides, and may be empty. SUM of bool is a logical
    or. Threads that communicate at the same time need separate groups.

    Args:
        algorithm: ring, tree, halving (recursive halving and doubling) or naive.
        trace: record to which every step is added, or None.
        op: SUM, MAX, MIN or PRODUCT.

    Raises:
        ConfigError: if the algorithm is unknown.
        ValueError: if the operation is not supported for this dtype.
    """
    check_algorithm(algorithm)
    if op not in _COMBINE:
        raise ValueError(f"unsupported reduction {op}; expected SUM, MAX, MIN or PRODUCT")
    if tensor.is_complex() and op in (dist.ReduceOp.MAX, dist.ReduceOp.MIN):
        raise ValueError(
            f"{op} is not supported with {tensor.dtype}: complex numbers have no order"
        )
    return _run(comm, tensor, ("all-reduce", algorithm, 0), _COMBINE[op], trace)


def broadcast(
    comm: Communicator,
    tensor: torch.Tensor,
    algorithm: str = "tree",
    root: int = 0,
    trace: CollectiveTrace | None = None,
) -> Sent:
    """Copy the values of rank ``root`` (of the group) into ``tensor`` on every rank, in place.

    The arguments and errors are as in :func:`all_reduce`. The algorithms are ring (chunks are
    passed along the ranks), tree and naive.
    """
    check_algorithm(algorithm, "broadcast")
    if not 0 <= root < comm.size:
        raise ValueError(f"root is rank {root}; expected 0 to {comm.size - 1}")
    return _run(comm, tensor, ("broadcast", algorithm, root), torch.Tensor.add_, trace)


def _run(
    world: Communicator,
    tensor: torch.Tensor,
    what: tuple[str, str, int],
    combine: Combine,
    trace: CollectiveTrace | None,
) -> Sent:
    if world.size == 1 or tensor.numel() == 0:
        if trace is not None:
            trace.values.append(tensor.reshape(-1).tolist())
        return Sent(0, 0)
    PROGRESS.issue(f"{what[1]} {what[0]}", tensor, world.group)
    target = tensor.detach()
    # Always send in row-major order, because strides may differ between ranks.
    flat = (target if target.is_contiguous() else target.contiguous()).view(-1)
    done = _run_steps(world, flat, _steps(*what, world.size, flat.numel()), combine, trace)
    if flat.data_ptr() != target.data_ptr():
        target.copy_(flat.view(target.shape))
    world.traffic.add("send", done.bytes)
    return done


@lru_cache(maxsize=64)
def _steps(collective: str, algorithm: str, root: int, size: int, numel: int) -> tuple[Step, ...]:
    return tuple(steps(algorithm, size, numel, collective, root))


#: Communicators on whose group a collective of all ranks has run.
_CONNECTED: weakref.WeakSet[Communicator] = weakref.WeakSet()


def _run_steps(
    world: Communicator,
    flat: torch.Tensor,
    todo: Sequence[Step],
    combine: Combine,
    trace: CollectiveTrace | None,
) -> Sent:
    """Run the messages of each step as one batch. NCCL runs the calls of a batch together, so their
    order cannot cause a deadlock."""
    if flat.device.type != "cpu" and world not in _CONNECTED:
        # batch_isend_irecv requires all ranks to take part in the first call on a group, which the
        # first step of a tree does not do.
        with uncounted():
            dist.all_reduce(torch.zeros(1, device=flat.device), group=world.group)
        _CONNECTED.add(world)
    raw = flat.view(torch.uint8)  # supported by every backend
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
            values, local = into.view(flat.dtype), flat[send.start : send.stop]
            combine(local, values) if send.add else local.copy_(values)
        if trace is not None:
            trace.steps.append(step)
            trace.values.append(flat.tolist())
    return Sent(num_bytes, num_messages)
