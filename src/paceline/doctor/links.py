"""Every pair of ranks: how long a message takes, how much goes through, and whether it arrives as
it was sent. Run on all of the ranks at once."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import TYPE_CHECKING, TypedDict

from paceline.core.files import human_bytes
from paceline.core.formatting import counted, short_duration
from paceline.core.processes import host_name
from paceline.distributed.link import Link, measure_link, time_once
from paceline.launch.host_checks import CheckResult

if TYPE_CHECKING:
    import torch

    from paceline.distributed.communicator import Communicator

_PINGS = 12
#: A message large enough that latency hardly counts, unless a small one took longer than this: then
#: the smaller.
_LARGE_BYTES, _SMALL_BYTES = 8 << 20, 1 << 20
_SLOW_S = 0.02
_REPEATS = 3
#: A link this many times slower than the middle one is named.
_SLOWER = 3.0
#: Clocks of hosts further apart than this make their logs hard to compare.
_CLOCKS_APART_S = 1.0


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
    """A link, by rank.

    Args:
        latency_s: half the time of a message of 4 bytes there and back, median.
        bandwidth_bytes_s: one way.
        intact: what went there and came back was what had been sent.
        clock_offset_s: how far the clock of ``receiver`` is ahead of that of ``sender``, to within
            the latency.
    """

    sender: int
    receiver: int
    latency_s: float
    bandwidth_bytes_s: float
    intact: bool
    clock_offset_s: float

    def record(self) -> PairRecord:
        """The link as JSON."""
        return {
            "from": self.sender,
            "to": self.receiver,
            "latency_s": self.latency_s,
            "bandwidth_bytes_s": self.bandwidth_bytes_s,
            "intact": self.intact,
            "clock_offset_s": self.clock_offset_s,
        }


@dataclass(frozen=True)
class Network:
    """What all ranks found together.

    Args:
        hosts: name of each rank's host.
        all_reduce: the α–β model of an all-reduce over all.
        sum_intact: the all-reduce of known numbers gave their sum on every rank.
    """

    hosts: list[str]
    pairs: list[Pair]
    all_reduce: Link
    sum_intact: bool

    @property
    def slowest(self) -> Pair:
        return min(self.pairs, key=lambda one: one.bandwidth_bytes_s)


def measure_network(world: Communicator) -> Network:
    """Measure; a collective. One pair at a time speaks while the others wait, so that each has the
    wire to itself. Every rank gets the same answer."""
    from paceline.distributed.traffic import uncounted

    with uncounted():
        pairs = [
            _measure_pair(world, one, other) for one, other in combinations(range(world.size), 2)
        ]
        intact = _sum_intact(world)
    link = measure_link(world)
    assert link is not None
    hosts = [str(one) for one in world.gather_objects(host_name())]
    return Network(hosts, pairs, link, intact)


def _measure_pair(world: Communicator, sender: int, receiver: int) -> Pair:
    import torch

    world.barrier()
    found = torch.zeros(4, dtype=world.wide_dtype)
    if world.rank in (sender, receiver):
        found = _speak(world, sender, receiver)
    found = found.to(world.device)
    world.wait(world.all_reduce(found))
    latency_s, bandwidth, damaged, offset_s = found.tolist()
    return Pair(sender, receiver, latency_s, bandwidth, damaged == 0, offset_s)


def _speak(world: Communicator, sender: int, receiver: int) -> torch.Tensor:
    """[latency, bandwidth, number of damaged messages, clock offset]; each figure from one of the
    two, so that the sum over the ranks is that figure."""
    import torch

    here = world.rank == sender
    peer = receiver if here else sender
    tiny = torch.zeros(1, device=world.device)
    pings = [_there_and_back(world, tiny, peer, here) for _ in range(_PINGS)][2:]
    latency_s = median(pings) / 2
    clock = torch.zeros(1, dtype=torch.float64)
    offsets = [
        _clock_offset(world, clock.to(world.device, world.wide_dtype), peer, here) for _ in range(3)
    ]
    # both must choose the same size
    slow = torch.tensor([float(latency_s > _SLOW_S)], device=world.device)
    _there_and_back(world, slow, peer, here)
    size = _SMALL_BYTES if slow.item() else _LARGE_BYTES
    message = pattern(size // 4, sender * 1009 + receiver, world.device)
    sent = message.clone()
    times, damaged = [], 0
    for _ in range(_REPEATS):
        arrived = sent.clone() if here else torch.zeros_like(sent)
        times.append(_there_and_back(world, arrived, peer, here))
        damaged += int(not torch.equal(arrived, message))
    one_way_s = max(min(times) / 2 - latency_s, 1e-9)
    if not here:
        return torch.tensor([0.0, 0.0, damaged, 0.0], dtype=world.wide_dtype)
    return torch.tensor(
        [latency_s, size / one_way_s, damaged, median(offsets)], dtype=world.wide_dtype
    )


def _there_and_back(world: Communicator, tensor: torch.Tensor, peer: int, begins: bool) -> float:
    """Seconds until what was sent is back, in ``tensor`` itself; the other side returns what it
    got."""
    steps = (_send, _receive) if begins else (_receive, _send)
    return time_once(world, lambda: [step(world, tensor, peer) for step in steps])


def _clock_offset(world: Communicator, clock: torch.Tensor, peer: int, begins: bool) -> float:
    """As NTP does it: the other's time against the middle of the way there and back (Mills, RFC
    5905, section 8). Counted from this hour on, which a float32 could hold too."""
    base = time.time() // 3600 * 3600
    if not begins:
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
    """Whole numbers small enough that their sum is exact in any order."""
    import torch

    size = 1 << 16
    base = pattern(size, 7, world.device)
    total = base * (world.rank + 1)
    world.wait(world.all_reduce(total))
    wrong = torch.tensor(
        [float(not torch.equal(total, base * (world.size * (world.size + 1) // 2)))]
    )
    return max(world.gather_numbers(wrong.item())) == 0


def pattern(numel: int, seed: int, device: torch.device) -> torch.Tensor:
    """Whole numbers from 1 to 997 as float32: none is zero, and neighbours differ."""
    import torch

    return ((torch.arange(numel, device=device) * 31 + seed) % 997 + 1).float()


def _send(world: Communicator, tensor: torch.Tensor, to: int) -> None:
    import torch.distributed as dist

    dist.send(tensor, world.ranks[to], group=world.group)


def _receive(world: Communicator, tensor: torch.Tensor, source: int) -> None:
    import torch.distributed as dist

    dist.recv(tensor, world.ranks[source], group=world.group)


def check_peer_copies(count: int, device_type: str) -> list[tuple[int, int]]:
    """Pairs of this host's devices between which a copy arrives changed: with some drivers and
    virtual machines it arrives as zeros."""
    import torch

    wrong = []
    for one in range(count):
        message = pattern(1 << 18, one, torch.device(device_type, one))
        for other in range(count):
            if one != other and not torch.equal(
                message.to(f"{device_type}:{other}").cpu(), message.cpu()
            ):
                wrong.append((one, other))
    return wrong


def check_links(network: Network, gradient_bytes: int | None = None) -> list[CheckResult]:
    """What the measurements say."""
    damaged = [pair for pair in network.pairs if not pair.intact]
    if damaged or not network.sum_intact:
        what = ", ".join(_between(network, pair) for pair in damaged) or "the all-reduce"
        advice = (
            "set NCCL_P2P_DISABLE=1 between GPUs of one host; else look at the interface's driver"
            " and its offloading"
        )
        return [CheckResult.error("links", f"data arrives changed: {what}", advice)]
    checks = [_check_pairs(network), _check_all_reduce(network, gradient_bytes)]
    apart = max(network.pairs, key=lambda pair: abs(pair.clock_offset_s))
    if abs(apart.clock_offset_s) > _CLOCKS_APART_S + apart.latency_s:
        text = f"{_between(network, apart)}: {abs(apart.clock_offset_s):.1f} s apart"
        checks.append(
            CheckResult.warning(
                "clocks_apart", text, "let chrony or systemd-timesyncd set the clocks of both"
            )
        )
    return checks


def _check_pairs(network: Network) -> CheckResult:
    slowest = network.slowest
    rates = sorted(pair.bandwidth_bytes_s for pair in network.pairs)
    middle = rates[len(rates) // 2]
    text = (
        f"{counted(len(network.pairs), 'pair')}, all intact; the slowest,"
        f" {_between(network, slowest)}: {human_bytes(slowest.bandwidth_bytes_s)}/s,"
        f" {short_duration(slowest.latency_s)}"
    )
    if slowest.bandwidth_bytes_s * _SLOWER < middle:
        return CheckResult.warning(
            "links",
            f"{text}, where the middle one has {human_bytes(middle)}/s",
            "look at that cable, slot or port",
        )
    return CheckResult.passed("links", text)


def _check_all_reduce(network: Network, gradient_bytes: int | None) -> CheckResult:
    link = network.all_reduce
    rate = (
        "no limit that could be seen"
        if link.bandwidth_bytes_s is None
        else f"{human_bytes(link.bandwidth_bytes_s)}/s"
    )
    text = f"{short_duration(link.latency_s)} a message, {rate} that a rank sends"
    if gradient_bytes is not None:
        takes = short_duration(link.all_reduce_s(gradient_bytes))
        text += (
            f"; the gradients of this config ({human_bytes(gradient_bytes)}) take {takes} of each"
            " step, in part beside backward"
        )
    return CheckResult.passed("all_reduce", text)


def _between(network: Network, pair: Pair) -> str:
    ends = [
        f"rank {rank}" + (f" on {network.hosts[rank]}" if len(set(network.hosts)) > 1 else "")
        for rank in (pair.sender, pair.receiver)
    ]
    return f"{ends[0]} ↔ {ends[1]}"
