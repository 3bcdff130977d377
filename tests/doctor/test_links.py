"""Test the link measurements between real ranks, including corrupted messages."""

from dataclasses import replace
from typing import Any

import pytest
from ranks import run_ranks

from paceline.distributed.communicator import Communicator
from paceline.distributed.link import Link
from paceline.doctor.links import NetworkMeasurements, Pair, check_links, measure_network


def _measure(world: Communicator) -> tuple[Any, int]:
    before = world.traffic.total
    return measure_network(world), world.traffic.total - before


@pytest.mark.alone
@pytest.mark.soak
def test_measures_every_pair_and_ranks_agree() -> None:
    results = run_ranks(_measure, 3)
    networks = [network for network, _ in results]
    assert [(pair.sender, pair.receiver) for pair in networks[0].pairs] == [(0, 1), (0, 2), (1, 2)]
    assert networks[0].pairs == networks[1].pairs == networks[2].pairs
    for pair in networks[0].pairs:
        assert pair.intact
        assert 0 < pair.latency_s < 5
        assert pair.bandwidth_bytes_s > 0
        assert abs(pair.clock_offset_s) < 5  # the ranks share one clock
    assert networks[0].sum_intact
    assert len(set(networks[0].hosts)) == 1
    assert [sent for _, sent in results] == [0, 0, 0]  # does not count as traffic of the run


def _measure_with_corruption(world: Communicator) -> Any:
    """Measure while half of each message is received as zeros, as happens with GPU peer-to-peer
    copies on some machines."""
    import torch.distributed as dist

    original_recv = dist.recv

    def recv_zeros(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        source = original_recv(tensor, *args, **kwargs)
        if world.rank == 1 and tensor.numel() > 1000:
            tensor[tensor.numel() // 2 :] = 0
        return source

    dist.recv = recv_zeros  # type: ignore[assignment]
    try:
        return measure_network(world)
    finally:
        dist.recv = original_recv


def test_detects_corrupted_messages() -> None:
    for network in run_ranks(_measure_with_corruption, 3):
        # rank 1 is the receiver of the first pair and the sender of the last
        assert [pair.intact for pair in network.pairs] == [False, True, False]


PAIR = Pair(0, 1, 1e-4, 1e9, True, 0.0)
GOOD = NetworkMeasurements(
    ["a", "a", "b"],
    [PAIR, replace(PAIR, receiver=2), replace(PAIR, sender=1, receiver=2)],
    Link(1e-4, 1e9, 3),
    True,
)


def test_check_links() -> None:
    assert [(check.name, check.ok) for check in check_links(GOOD)] == [
        ("links", True),
        ("all_reduce", True),
    ]
    assert "of each step" in check_links(GOOD, 10**9)[1].value
    corrupt = check_links(replace(GOOD, pairs=[replace(PAIR, intact=False), *GOOD.pairs[1:]]))
    assert corrupt[0].fatal
    assert "rank 0 on a ↔ rank 1 on a" in corrupt[0].value
    assert check_links(replace(GOOD, sum_intact=False))[0].fatal
    slow = check_links(
        replace(GOOD, pairs=[*GOOD.pairs[:2], replace(GOOD.pairs[2], bandwidth_bytes_s=1e8)])
    )
    assert not slow[0].ok
    assert "rank 1 on a ↔ rank 2 on b" in slow[0].value
    skewed = check_links(
        replace(GOOD, pairs=[replace(PAIR, clock_offset_s=-30.0), *GOOD.pairs[1:]])
    )
    assert (skewed[-1].name, skewed[-1].ok) == ("clocks_apart", False)
    assert "30.0 s" in skewed[-1].value


@pytest.mark.parametrize("bandwidth", [None, 1e9])
def test_check_links_with_unknown_bandwidth(bandwidth: float | None) -> None:
    network = replace(GOOD, all_reduce=Link(1e-4, bandwidth, 3))
    assert check_links(network, 1000)[1].ok
