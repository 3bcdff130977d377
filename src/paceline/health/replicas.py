"""Compare replicas, which must be identical bit for bit. Without this check, a replica that
diverges (a flipped bit, a driver bug) would continue to train unnoticed and be saved."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.core.errors import FaultError
from paceline.core.event_log import EventLog
from paceline.core.formatting import counted, rank_names
from paceline.core.processes import host_name
from paceline.distributed.traffic import uncounted
from paceline.parallel.save_load import trained_state
from paceline.parallel.state import local_tensor
from paceline.parallel.strategy import Strategy


@dataclass(frozen=True)
class ReplicaDivergence:
    """Replicas that differ.

    Args:
        ranks: the ranks that differ from the majority, or the entire group if there is no majority.
        others: the other ranks of the group.
        parameter: name of the first tensor that differs, in the model's order; ``NAME/KEY`` for
            optimizer state.
        num_differing: number of tensors that differ, out of ``num_compared``.
    """

    ranks: tuple[int, ...]
    others: tuple[int, ...]
    parameter: str
    num_differing: int
    num_compared: int

    def text(self, hosts: Sequence[str]) -> str:
        """Return the divergence as one line of text. ``hosts`` has the host of each rank."""
        ranks = ", ".join(f"rank {rank} (host {hosts[rank]})" for rank in self.ranks)
        tensors = (
            f"in {counted(self.num_differing, 'tensor')} of {self.num_compared:,}, the first is"
            f" `{self.parameter}`"
        )
        if not self.others:
            return (
                f"the replicas on {ranks} differ {tensors}; without a majority, the wrong one is"
                " not known"
            )
        differs = "differs" if len(self.ranks) == 1 else "differ"
        return f"{ranks} {differs} from the replicas on {rank_names(self.others)} {tensors}"


def check_replicas(strategy: Strategy, events: EventLog, step: int) -> None:
    """Raise FaultError on every rank if some replicas differ. Replicas on devices of different
    types are aligned instead, because such devices round differently. A collective, which waits for
    the device."""
    comm, group = strategy.world, strategy.replica_group
    if group is None:
        return
    if comm.mixes_devices:
        align_replicas(strategy)
        return
    with uncounted(), torch.no_grad():
        divergence = compare(strategy)
        is_divergent = divergence is not None
        if group.size < comm.size:  # ranks of other groups end as well
            is_divergent = comm.sum(float(is_divergent))[0] > 0
        if not is_divergent:
            return
        by_rank: list[Any] = comm.gather_objects((divergence, host_name()))
    reports = [row for row in by_rank if row is not None and row[0] is not None]
    divergences = {row[0].ranks: row[0] for row in reports}
    hosts = ["" if row is None else str(row[1]) for row in by_rank]
    ranks = sorted({rank for group_ranks in divergences for rank in group_ranks})
    first = next(iter(divergences.values()))
    text = "; ".join(divergence.text(hosts) for divergence in divergences.values())
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
        "step {step}: {text}. Replicas make the same updates, so a memory, a device or a link has"
        " changed bits, or your code changes parameters on a single rank. The latest checkpoint"
        " was compared before it was written",
        code="replicas-differ",
        fix="if it happens again, check the hardware of that host",
        ranks=ranks,
        step=step,
        text=text,
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
    """Return how the replicas of this rank's group differ, or None if they do not. A collective
    over :attr:`~paceline.parallel.strategy.Strategy.replica_group`."""
    group = strategy.replica_group
    if group is None or group.size == 1:
        return None
    tensors = {name: local_tensor(tensor) for name, tensor in strategy.replicated_tensors()}
    if not tensors:
        return None
    local_sums = torch.stack([bit_sum(tensor).to(group.device) for tensor in tensors.values()])
    gathered = local_sums.new_empty(group.size * len(tensors))
    group.wait(group.all_gather(gathered, local_sums))
    rows = group.read(gathered).view(group.size, -1)
    if bool((rows == rows[0]).all()):
        return None
    return find_divergence([tuple(row) for row in rows.tolist()], list(tensors), group.ranks)


def find_divergence(
    rows: Sequence[tuple[int, ...]], names: Sequence[str], ranks: Sequence[int]
) -> ReplicaDivergence:
    """Return which replicas differ from the majority. ``rows`` has the bit sums of each rank."""
    usual, votes = Counter(rows).most_common(1)[0]
    has_majority = 2 * votes > len(rows)
    others = [rank for rank, row in zip(ranks, rows, strict=True) if has_majority and row == usual]
    differing = [name for name, *sums in zip(names, *rows, strict=True) if len({*sums}) > 1]
    return ReplicaDivergence(
        tuple(rank for rank in ranks if rank not in others),
        tuple(others),
        differing[0],
        len(differing),
        len(names),
    )


def bit_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum, modulo 2^64, of the tensor's bits interpreted as 64-bit integers, as an int64
    scalar on its device. The computation is limited only by memory bandwidth. A single different
    bit changes the sum for any dtype, and so does a NaN with a different bit pattern."""
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if raw.storage_offset() % 8:
        raw = raw.clone()
    num_aligned = raw.numel() // 8 * 8
    total = raw[:num_aligned].view(torch.int64).sum()
    rest = raw[num_aligned:].to(torch.int64)
    if rest.numel():
        total = total + (rest << (8 * torch.arange(rest.numel(), device=raw.device))).sum()
    return total
