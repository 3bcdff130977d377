"""Measure latency, bandwidth and data integrity between every pair of ranks. All ranks call this
together."""

import time
from dataclasses import dataclass
from itertools import combinations
from statistics import median, median_high
from typing import TypedDict

import torch
import torch.distributed as dist

from paceline.core.files import human_bytes
from paceline.core.formatting import counted, short_duration
from paceline.core.processes import host_name
from paceline.distributed.communicator import Communicator
from paceline.distributed.link import Link, measure_link, time_once
from paceline.distributed.traffic import uncounted
from paceline.launch.passes.host_checks import CheckResult

_PINGS = 12
#: Size of the messages that bandwidth is measured with: so large that latency hardly counts. The
#: smaller one is for links with a latency above ``_SLOW_S``.
_LARGE_BYTES, _SMALL_BYTES = 8 << 20, 1 << 20
_SLOW_S = 0.02
_REPEATS = 3
#: Warn of a link whose bandwidth is this many times below the median.
_SLOWER = 3.0
#: A larger clock offset makes the logs of two hosts hard to compare.
_MAX_CLOCK_OFFSET_S = 1.0

#: A link between two ranks, as JSON.
PairRecord = TypedDict(
    "PairRecord",
    {
        "from": int,
        "to": int,
        "latency_s": float,
        "bandwidth_bytes_s": float,
        "intact": bool,
        "clock_offset_s": float,
    },
)


@dataclass(frozen=True)
class Pair:
    """The link between two ranks.

    Args:
        latency_s: half the round trip of a message of 4 bytes, median.
        bandwidth_bytes_s: in one direction.
        intact: every message came back unchanged.
        clock_offset_s: clock of ``receiver`` minus clock of ``sender``, accurate to the latency.
    """

    sender: int
    receiver: int
    latency_s: float
    bandwidth_bytes_s: float
    intact: bool
    clock_offset_s: float

    def record(self) -> PairRecord:
        """Return the link as JSON."""
        return {
            "from": self.sender,
            "to": self.receiver,
            "latency_s": self.latency_s,
            "bandwidth_bytes_s": self.bandwidth_bytes_s,
            "intact": self.intact,
            "clock_offset_s": self.clock_offset_s,
        }


@dataclass(frozen=True)
class NetworkMeasurements:
    """The measurements of all ranks.

    Args:
        hosts: host name of each rank.
        all_reduce: the α–β model of an all-reduce over all ranks.
        sum_intact: the all-reduce of known numbers gave their exact sum on every rank.
    """

    hosts: list[str]
    pairs: list[Pair]
    all_reduce: Link
    sum_intact: bool


def measure_network(world: Communicator) -> NetworkMeasurements:
    """Measure all pairs, one after the other so that they do not share bandwidth, and an
    all-reduce. A collective; every rank gets the same result."""
    with uncounted():
        pairs = [_measure_pair(world, *ranks) for ranks in combinations(range(world.size), 2)]
        intact = _sum_intact(world)
    link = measure_link(world)
    assert link is not None
    return NetworkMeasurements(world.gather_objects(host_name()), pairs, link, intact)


def _measure_pair(world: Communicator, sender: int, receiver: int) -> Pair:
    world.barrier()
    figures = torch.zeros(4, dtype=world.wide_dtype)
    if world.rank in (sender, receiver):
        figures = _exchange(world, sender, receiver)
    figures = figures.to(world.device)
    world.wait(world.all_reduce(figures))
    latency_s, bandwidth, num_corrupt, offset_s = figures.tolist()
    return Pair(sender, receiver, latency_s, bandwidth, num_corrupt == 0, offset_s)


def _exchange(world: Communicator, sender: int, receiver: int) -> torch.Tensor:
    """Return [latency, bandwidth, number of corrupt messages, clock offset]. Figures that only the
    sender measures are 0 on the receiver, so that the sum over the ranks is the figure."""
    is_sender = world.rank == sender
    peer = receiver if is_sender else sender
    tiny = torch.zeros(1, device=world.device)
    pings = [_round_trip(world, tiny, peer, is_sender) for _ in range(_PINGS)][2:]
    latency_s = median(pings) / 2
    clock = torch.zeros(1, dtype=torch.float64)
    offsets = [
        _clock_offset(world, clock.to(world.device, world.wide_dtype), peer, is_sender)
        for _ in range(3)
    ]
    # both must choose the same size
    is_slow = torch.tensor([float(latency_s > _SLOW_S)], device=world.device)
    _round_trip(world, is_slow, peer, is_sender)
    size = _SMALL_BYTES if is_slow.item() else _LARGE_BYTES
    message = pattern(size // 4, sender * 1009 + receiver, world.device)
    times, num_corrupt = [], 0
    for _ in range(_REPEATS):
        arrived = message.clone() if is_sender else torch.zeros_like(message)
        times.append(_round_trip(world, arrived, peer, is_sender))
        num_corrupt += int(not torch.equal(arrived, message))
    if not is_sender:
        return torch.tensor([0.0, 0.0, num_corrupt, 0.0], dtype=world.wide_dtype)
    transfer_s = max(min(times) / 2 - latency_s, 1e-9)
    return torch.tensor(
        [latency_s, size / transfer_s, num_corrupt, median(offsets)], dtype=world.wide_dtype
    )


def _round_trip(world: Communicator, tensor: torch.Tensor, peer: int, is_sender: bool) -> float:
    """Return the seconds until the tensor came back, received into ``tensor`` itself; the receiver
    returns what it received."""
    steps = (_send, _receive) if is_sender else (_receive, _send)
    return time_once(world, lambda: [step(world, tensor, peer) for step in steps])


def _clock_offset(world: Communicator, clock: torch.Tensor, peer: int, is_sender: bool) -> float:
    """Compare the peer's clock with the middle of the round trip, as NTP does (Mills, RFC 5905,
    section 8). Times count from the start of the hour, so that a float32 can represent them."""
    base = time.time() // 3600 * 3600
    if not is_sender:
        _receive(world, clock, peer)
        clock.fill_(time.time() - base)
        _send(world, clock, peer)
        return 0.0
    before = time.time()
    _send(world, clock, peer)
    _receive(world, clock, peer)
    after = time.time()
    return clock.item() - ((before + after) / 2 - base)


def _sum_intact(world: Communicator) -> bool:
    """All-reduce integers that are small enough for their sum to be exact in any order."""
    base = pattern(1 << 16, 7, world.device)
    total = base * (world.rank + 1)
    world.wait(world.all_reduce(total))
    is_wrong = not torch.equal(total, base * (world.size * (world.size + 1) // 2))
    return max(world.gather_numbers(float(is_wrong))) == 0


def pattern(numel: int, seed: int, device: torch.device) -> torch.Tensor:
    """Return integers from 1 to 997 as float32: none is zero, and neighbors differ."""
    return ((torch.arange(numel, device=device) * 31 + seed) % 997 + 1).float()


def _send(world: Communicator, tensor: torch.Tensor, to: int) -> None:
    dist.send(tensor, world.ranks[to], group=world.group)


def _receive(world: Communicator, tensor: torch.Tensor, source: int) -> None:
    dist.recv(tensor, world.ranks[source], group=world.group)


def check_peer_copies(count: int, device_type: str) -> list[tuple[int, int]]:
    """Return the pairs of this host's devices between which a copy arrives corrupted: with some
    drivers and virtual machines it arrives as zeros."""
    corrupt = []
    for source in range(count):
        message = pattern(1 << 18, source, torch.device(device_type, source))
        for target in range(count):
            copy = message.to(f"{device_type}:{target}")
            if not torch.equal(copy.cpu(), message.cpu()):
                corrupt.append((source, target))
    return corrupt


def check_links(
    network: NetworkMeasurements, gradient_bytes: int | None = None
) -> list[CheckResult]:
    """Judge the measurements. ``gradient_bytes``: of the config; None if not known."""
    corrupt = [pair for pair in network.pairs if not pair.intact]
    if corrupt or not network.sum_intact:
        links = ", ".join(_ranks_text(network, pair) for pair in corrupt) or "the all-reduce"
        advice = (
            "between GPUs of one host set NCCL_P2P_DISABLE=1; else check the network interface's"
            " driver and offloading"
        )
        return [CheckResult.error("links", f"data arrives corrupted: {links}", advice)]
    checks = [_check_pairs(network), _check_all_reduce(network, gradient_bytes)]
    worst = max(network.pairs, key=lambda pair: abs(pair.clock_offset_s))
    if abs(worst.clock_offset_s) > _MAX_CLOCK_OFFSET_S + worst.latency_s:
        text = f"{_ranks_text(network, worst)}: {abs(worst.clock_offset_s):.1f} s apart"
        checks.append(
            CheckResult.warning(
                "clocks_apart",
                text,
                "synchronize the clocks of both hosts with chrony or systemd-timesyncd",
            )
        )
    return checks


def _check_pairs(network: NetworkMeasurements) -> CheckResult:
    slowest = min(network.pairs, key=lambda pair: pair.bandwidth_bytes_s)
    median_rate = median_high(pair.bandwidth_bytes_s for pair in network.pairs)
    text = (
        f"{counted(len(network.pairs), 'pair')}, all intact; the slowest,"
        f" {_ranks_text(network, slowest)}: {human_bytes(slowest.bandwidth_bytes_s)}/s,"
        f" {short_duration(slowest.latency_s)}"
    )
    if slowest.bandwidth_bytes_s * _SLOWER < median_rate:
        return CheckResult.warning(
            "links",
            f"{text}; the median is {human_bytes(median_rate)}/s",
            "check the cable, slot or port of that link",
        )
    return CheckResult.passed("links", text)


def _check_all_reduce(network: NetworkMeasurements, gradient_bytes: int | None) -> CheckResult:
    link = network.all_reduce
    rate = "no measurable bandwidth limit"
    if link.bandwidth_bytes_s is not None:
        rate = f"{human_bytes(link.bandwidth_bytes_s)}/s per rank"
    text = f"{short_duration(link.latency_s)} per message, {rate}"
    if gradient_bytes is not None:
        text += (
            f"; the gradients of this config ({human_bytes(gradient_bytes)}) take"
            f" {short_duration(link.all_reduce_s(gradient_bytes))} of each step, partly overlapped"
            " with backward"
        )
    return CheckResult.passed("all_reduce", text)


def _ranks_text(network: NetworkMeasurements, pair: Pair) -> str:
    ends = [
        f"rank {rank}" + (f" on {network.hosts[rank]}" if len(set(network.hosts)) > 1 else "")
        for rank in (pair.sender, pair.receiver)
    ]
    return f"{ends[0]} ↔ {ends[1]}"
