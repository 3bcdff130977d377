"""Replicas hold the same bits. Now and then they compare a sum over them: one that has drifted (a
flipped bit, a fault of a driver) would train on beside the others without a word, and be saved."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.core.errors import FaultError
from paceline.core.event_log import EventLog
from paceline.core.formatting import counted
from paceline.core.processes import host_name
from paceline.distributed.traffic import uncounted
from paceline.parallel.base import Strategy
from paceline.parallel.protocols import checkable_replicas
from paceline.parallel.save_load import trained_state
from paceline.parallel.state import local_tensor


@dataclass(frozen=True)
class ReplicaDivergence:
    """Replicas that differ.

    Args:
        ranks: that differ from most; all of the line where there is no majority.
        others: the rest of the line.
        parameter: the first that differs, in the model's order; ``NAME/KEY`` for what the optimizer
            keeps.
        num_differing, num_compared: so many tensors differ, of so many.
    """

    ranks: tuple[int, ...]
    others: tuple[int, ...]
    parameter: str
    num_differing: int
    num_compared: int


def check_replicas(strategy: Strategy, events: EventLog, step: int) -> None:
    """Raise FaultError, on every rank, if some replicas differ. Replicas on devices of different
    types are aligned instead, because such devices round differently. A collective; waits for the
    device."""
    comm, replicas = strategy.world, checkable_replicas(strategy)
    group = None if replicas is None else replicas.replica_group
    if group is None:
        return
    if comm.mixes_devices:
        align_replicas(strategy)
        return
    with uncounted(), torch.no_grad():
        divergence = compare(strategy)
        is_divergent = divergence is not None
        if group.size < comm.size:  # all ranks end, those of other groups too
            is_divergent = comm.sum(float(is_divergent))[0] > 0
        if not is_divergent:
            return
        by_rank: list[Any] = comm.gather_objects((divergence, host_name()))
    reports = [row for row in by_rank if row is not None and row[0] is not None]
    divergences = {row[0].ranks: row[0] for row in reports}
    hosts = ["" if row is None else str(row[1]) for row in by_rank]
    ranks = sorted({rank for group_ranks in divergences for rank in group_ranks})
    first = next(iter(divergences.values()))
    text = "; ".join(_text(divergence, hosts) for divergence in divergences.values())
    text = f"step {step}: {text}"
    events.emit(
        {
            "type": "drift",
            "step": step,
            "ranks": ranks,
            "hosts": [hosts[rank] for rank in ranks],
            "parameter": first.parameter,
            "tensors": first.num_differing,
        },
        file_only=True,
    )
    raise FaultError(
        f"{text}. Replicas make the same updates: a memory, a device or a link has changed bits, or"
        " code of yours changes parameters on one rank alone. The newest checkpoint was written"
        " before",
        fix="where it comes again, look at the hardware of that host",
        ranks=ranks,
    )


def align_replicas(strategy: Strategy) -> None:
    """Copy rank 0's trained weights and optimizer state to all ranks. A collective. Does nothing if
    replicas diverge between synchronizations."""
    if strategy.replicas_diverge:
        return
    with uncounted(), torch.no_grad():
        replicated = trained_state(strategy)
        strategy.world.broadcast([tensor for _, tensor in replicated if tensor.dim() > 0])


def compare(strategy: Strategy) -> ReplicaDivergence | None:
    """How this rank's replicas differ. A collective along
    :attr:`~paceline.parallel.protocols.SupportsReplicaCheck.replica_group`."""
    replicas = checkable_replicas(strategy)
    line = None if replicas is None else replicas.replica_group
    if replicas is None or line is None or line.size == 1:
        return None
    named = [(name, local_tensor(each)) for name, each in replicas.replicated_tensors()]
    if not named:
        return None
    mine = torch.stack([bit_sum(one).to(line.device) for _, one in named])
    gathered = mine.new_empty(line.size * len(named))
    line.wait(line.all_gather(gathered, mine))
    rows = gathered.view(line.size, -1)
    if bool((rows == rows[0]).all()):
        return None
    return judge([tuple(row) for row in rows.tolist()], [name for name, _ in named], line.ranks)


def judge(
    rows: Sequence[tuple[int, ...]], names: Sequence[str], ranks: Sequence[int]
) -> ReplicaDivergence:
    """Who has drifted, of replicas with these sums (one row a rank): those that differ from the
    majority."""
    usual, votes = Counter(rows).most_common(1)[0]
    majority = 2 * votes > len(rows)
    bad = [place for place, row in enumerate(rows) if row != usual or not majority]
    differing = [place for place in range(len(names)) if len({row[place] for row in rows}) > 1]
    return ReplicaDivergence(
        tuple(ranks[place] for place in bad),
        tuple(rank for place, rank in enumerate(ranks) if place not in bad),
        names[differing[0]],
        len(differing),
        len(names),
    )


def bit_sum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum, modulo 2^64, of the tensor's bits taken as 64-bit numbers: int64, a scalar on its
    device, at the speed of memory. A single bit that differs changes it, whatever the type; so does
    NaN of other bits."""
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if raw.storage_offset() % 8:
        raw = raw.clone()
    whole = raw.numel() // 8 * 8
    total = raw[:whole].view(torch.int64).sum()
    rest = raw[whole:].to(torch.int64)
    return (
        total + (rest << (8 * torch.arange(rest.numel(), device=raw.device))).sum()
        if rest.numel()
        else total
    )


def _text(drift: ReplicaDivergence, hosts: Sequence[str]) -> str:
    where = ", ".join(f"rank {rank} (host {hosts[rank]})" for rank in drift.ranks)
    what = (
        f"in {counted(drift.num_differing, 'tensor')} of {drift.num_compared:,}, the first"
        f" `{drift.parameter}`"
    )
    if not drift.others:
        verdict = (
            "one of them has drifted" if len(drift.ranks) == 2 else "no two halves of them agree"
        )
        return f"the replicas {where} differ {what}: {verdict}, and too few agree to say which"
    others = ", ".join(map(str, drift.others))
    has = "has" if len(drift.ranks) == 1 else "have"
    return (
        f"{where} {has} drifted from the replicas on"
        f" {'rank' if len(drift.others) == 1 else 'ranks'} {others}: {what}"
    )
