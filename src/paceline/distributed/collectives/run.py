"""All-reduce and broadcast of our own, over torch's point-to-point calls.

A schedule (:mod:`paceline.distributed.collectives.schedules`) says who sends what when. It is
compiled, for one rank, into a short list of operations in which messages are cut into pieces: while
one piece is on the wire the one before is added up. Results are the same bits on every rank: each
element is summed on one rank and copied to the others.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.weak import WeakTensorKeyDictionary

from paceline.distributed.collectives.program import (
    RECEIVE,
    SEND,
    SENT,
    TAKE,
    Program,
    compile_program,
)
from paceline.distributed.collectives.schedules import Sent, Step, check_algorithm, steps
from paceline.distributed.collectives.trace import Trace
from paceline.distributed.communicator import Communicator
from paceline.distributed.progress import PROGRESS
from paceline.distributed.traffic import uncounted

#: Largest piece on the wire. Each message has its price in system calls and in wake-ups, after
#: which the interpreter's code is no longer in the cache: so pieces are large.
PIECE_BYTES = 4 << 20
#: Receives that are open at a time; pieces to be added take that many slots of memory. Many, for
#: gloo tells the sender of each receive that is opened, and a sender that is told while it writes
#: on the same connection spins until it has written.
WINDOW = 8

Combine = Callable[[torch.Tensor, torch.Tensor], Any]


def _add(into: torch.Tensor, one: torch.Tensor) -> None:
    into.add_(one)


def _maximum(into: torch.Tensor, one: torch.Tensor) -> None:
    torch.maximum(into, one, out=into)


def _minimum(into: torch.Tensor, one: torch.Tensor) -> None:
    torch.minimum(into, one, out=into)


def _multiply(into: torch.Tensor, one: torch.Tensor) -> None:
    into.mul_(one)


_COMBINE: dict[Any, Combine] = {
    dist.ReduceOp.SUM: _add,
    dist.ReduceOp.MAX: _maximum,
    dist.ReduceOp.MIN: _minimum,
    dist.ReduceOp.PRODUCT: _multiply,
}


def all_reduce(
    world_line: Communicator,
    tensor: torch.Tensor,
    algorithm: str = "ring",
    trace: Trace | None = None,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> Sent:
    """Reduce ``tensor`` over the ranks of a line, in place; returns when it is done, with what this
    rank sent. A collective: every rank of the line calls it, with a tensor of the same number of
    elements and dtype. Any shape and strides, also without an element. The sum of bool is "or".

    Calls on one group come one after another; threads that call at the same time each need a group
    of their own. A tensor that lives on (a gradient bucket) is planned for once.

    Args:
        algorithm: ring, tree, halving (recursive halving and doubling) or naive.
        trace: told of every step. Steps then go one by one, each message whole.
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
    return _run(world_line, tensor, ("all-reduce", algorithm, 0), _COMBINE[op], trace)


def broadcast(
    world_line: Communicator,
    tensor: torch.Tensor,
    algorithm: str = "tree",
    root: int = 0,
    trace: Trace | None = None,
) -> Sent:
    """Copy the values of rank ``root`` (of the line) into ``tensor`` on every rank, in place. As
    :func:`all_reduce`; the algorithms are ring (chunks passed along the ranks), tree and naive."""
    check_algorithm(algorithm, "broadcast")
    if not 0 <= root < world_line.size:
        raise ValueError(f"there is no rank {root} among {world_line.size}")
    return _run(world_line, tensor, ("broadcast", algorithm, root), _add, trace)


def _run(
    world: Communicator,
    tensor: torch.Tensor,
    what: tuple[str, str, int],
    combine: Combine,
    trace: Trace | None,
) -> Sent:
    if world.size == 1 or tensor.numel() == 0:
        if trace is not None:
            trace.begin(tensor.reshape(-1))
        return Sent(0, 0)
    PROGRESS.issue(f"{what[1]} {what[0]}", tensor, world.group)
    target = tensor.detach()
    # Always in row-major order: ranks may differ in strides.
    flat = (target if target.is_contiguous() else target.contiguous()).view(-1)
    by_step = trace is not None or flat.device.type != "cpu"
    if by_step:
        done = _by_step(world, flat, _steps(*what, world.size, flat.numel()), combine, trace)
    else:
        done = _in_pieces(
            world, tensor if flat.data_ptr() == tensor.data_ptr() else flat, flat, what, combine
        )
    if flat.data_ptr() != target.data_ptr():
        target.copy_(flat.view(target.shape))
    world.traffic.add("send", done.bytes)
    return done


@lru_cache(maxsize=64)
def _steps(collective: str, algorithm: str, root: int, size: int, numel: int) -> tuple[Step, ...]:
    return tuple(steps(algorithm, size, numel, collective, root))


# -- step by step: where it is watched, and on accelerators
# -----------------------------------------------------------------


# Worlds whose ranks have all met in a collective.
_MET: weakref.WeakSet[Communicator] = weakref.WeakSet()


def _by_step(
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
    raw = _as_bytes(flat)
    wide, rank = flat.element_size(), world.rank
    num_bytes = num_messages = 0
    if trace is not None:
        trace.begin(flat)
    for step in todo:
        sends = [one for one in step.sends if one.source == rank]
        takes = [one for one in step.sends if one.target == rank]
        arrived = [
            torch.empty((one.stop - one.start) * wide, dtype=torch.uint8, device=flat.device)
            for one in takes
        ]
        calls = [
            dist.P2POp(dist.irecv, into, group=world.group, group_peer=one.source)
            for one, into in zip(takes, arrived, strict=True)
        ]
        for one in sends:
            part = raw[one.start * wide : one.stop * wide]
            calls.append(dist.P2POp(dist.isend, part, group=world.group, group_peer=one.target))
            num_bytes, num_messages = num_bytes + part.numel(), num_messages + 1
        if calls:
            with uncounted():  # counted by the caller, as what goes through isend is
                works = dist.batch_isend_irecv(calls)
            for work in works:
                work.wait()
        for one, into in zip(takes, arrived, strict=True):
            values, mine = into.view(flat.dtype), flat[one.start : one.stop]
            combine(mine, values) if one.add else mine.copy_(values)
        if trace is not None:
            trace.step(step, sends, wide, flat)
    return Sent(num_bytes, num_messages)


# -- in pieces
# --------------------------------------------------------------------------------------------------------------


class _Plan:
    """A compiled collective for one storage: the program, and the views that its operations work
    on."""

    def __init__(self, program: Program, flat: torch.Tensor, scratch: torch.Tensor) -> None:
        raw, wide = _as_bytes(flat), flat.element_size()
        self.program = program
        self.scratch = scratch
        self.of = (flat.data_ptr(), flat.numel(), flat.dtype)
        self.sends = [
            ([raw[one.start * wide : one.stop * wide]], one.peer) for one in program.sends
        ]
        slot_bytes = _slot_bytes(program, wide)
        self.receives: list[
            tuple[list[torch.Tensor], int, torch.Tensor | None, torch.Tensor | None]
        ] = []
        adds = 0
        for one in program.receives:
            if not one.add:
                self.receives.append(
                    ([raw[one.start * wide : one.stop * wide]], one.peer, None, None)
                )
                continue
            begin = adds % WINDOW * slot_bytes
            into = scratch[begin : begin + (one.stop - one.start) * wide]
            self.receives.append(
                ([into], one.peer, flat[one.start : one.stop], into.view(flat.dtype))
            )
            adds += 1
        self.total = Sent(sum(part.numel() for [part], _ in self.sends), len(self.sends))

    def fits(self, program: Program, flat: torch.Tensor, scratch: torch.Tensor) -> bool:
        return (
            program is self.program
            and scratch is self.scratch
            and self.of == (flat.data_ptr(), flat.numel(), flat.dtype)
        )

    def run(self, group: dist.ProcessGroup | None, combine: Combine) -> Sent:
        sends, receives = self.sends, self.receives
        sending: list[Any] = [None] * len(sends)
        receiving: list[Any] = [None] * len(receives)
        group = group or dist.group.WORLD
        assert group is not None
        # what dist.isend and dist.irecv come to, after checks of a few µs each
        isend, irecv = group.send, group.recv
        for kind, number in self.program.operations:
            if kind == SEND:
                part, peer = sends[number]
                sending[number] = isend(part, peer, 0)
            elif kind == RECEIVE:
                into, peer, _, _ = receives[number]
                receiving[number] = irecv(into, peer, 0)
            elif kind == TAKE:
                receiving[number].wait()
                receiving[number] = None
                _, _, mine, values = receives[number]
                if mine is not None:
                    combine(mine, values)  # type: ignore[arg-type]
            elif kind == SENT:
                sending[number].wait()
                sending[number] = None
        return self.total


class _Scratch(threading.local):
    """Where pieces arrive that are to be added: one buffer a thread, for threads may run
    collectives at the same time."""

    def __init__(self) -> None:
        self.buffer = torch.empty(0, dtype=torch.uint8)

    def of(self, size_bytes: int) -> torch.Tensor:
        if self.buffer.numel() < size_bytes:
            self.buffer = torch.empty(size_bytes, dtype=torch.uint8)
        return self.buffer


_SCRATCH = _Scratch()
# Plans go with the tensors that they were made for: they hold views of the storage, not the tensor
# itself.
_PLANS = WeakTensorKeyDictionary()


def _in_pieces(
    world: Communicator,
    owner: torch.Tensor,
    flat: torch.Tensor,
    what: tuple[str, str, int],
    combine: Combine,
) -> Sent:
    program = _program(
        *what, world.rank, world.size, flat.numel(), flat.element_size(), PIECE_BYTES
    )
    scratch = _SCRATCH.of(min(WINDOW, program.adds) * _slot_bytes(program, flat.element_size()))
    plans = _PLANS.setdefault(owner, {})
    key = (what, world.rank, world.size, threading.get_ident())
    plan = plans.get(key)
    if plan is None or not plan.fits(program, flat, scratch):
        plan = plans[key] = _Plan(program, flat, scratch)
    return plan.run(world.group, combine)


def _slot_bytes(program: Program, element_size: int) -> int:
    """Room for a piece, on a cache line; an odd number of lines, so that slots do not fall on one
    another in the cache."""
    return (-(-program.longest * element_size // 64) | 1) * 64


@lru_cache(maxsize=256)
def _program(
    collective: str,
    algorithm: str,
    root: int,
    rank: int,
    size: int,
    numel: int,
    element_size: int,
    piece_bytes: int,
) -> Program:
    todo = _steps(collective, algorithm, root, size, numel)
    return compile_program(todo, rank, max(1, piece_bytes // element_size), WINDOW)


def _as_bytes(flat: torch.Tensor) -> torch.Tensor:
    """The same storage as bytes: so every dtype can be sent."""
    return flat.view(torch.uint8)
