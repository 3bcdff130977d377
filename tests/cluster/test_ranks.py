"""Test the order of the hosts in a rendezvous round, and gather and broadcast among its ranks."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from paceline.cluster.ranks import HostEntry, Round, ordered
from paceline.distributed.environment import RankEnv


def ordered_names(*hosts: HostEntry) -> str:
    return "".join(host.host for host in ordered(hosts))


def entry(host: str, group_rank: int, **fields: object) -> HostEntry:
    return HostEntry(host, group_rank, 2, **fields)


@pytest.mark.soak
def test_endpoint_host_is_first_even_if_sorted_last() -> None:
    assert ordered_names(entry("a", 0), entry("b", 1), entry("z", 2, is_endpoint=True)) == "zab"


def test_hosts_keep_node_ranks_of_previous_round() -> None:
    hosts = [
        entry("z", 2, is_endpoint=True, previous=0),
        entry("a", 1, previous=2),
        entry("b", 0, previous=1),
    ]
    assert ordered_names(*hosts) == "zba"


def test_returning_host_fills_its_gap() -> None:
    hosts = [entry("z", 0, is_endpoint=True, previous=0), entry("c", 1, previous=2), entry("b", 2)]
    assert ordered_names(*hosts) == "zbc"


def test_hosts_move_up_to_fill_gap() -> None:
    assert (
        ordered_names(
            entry("z", 0, is_endpoint=True, previous=0),
            entry("c", 1, previous=2),
            entry("d", 2, previous=3),
        )
        == "zcd"
    )


def test_node_rank_is_respected_and_duplicates_are_resolved() -> None:
    assert (
        ordered_names(
            entry("z", 0, is_endpoint=True), entry("a", 1, node_rank=2), entry("b", 2, node_rank=1)
        )
        == "zba"
    )
    assert (
        ordered_names(
            entry("z", 0, is_endpoint=True), entry("a", 1, node_rank=1), entry("b", 2, node_rank=1)
        )
        == "zab"
    )


def test_unknown_endpoint_keeps_group_rank_order() -> None:
    assert ordered_names(entry("b", 1), entry("a", 0)) == "ab"


@pytest.mark.parametrize("world_size", [1, 3])
def test_gather_is_in_rank_order_and_broadcast_from_rank_0(
    world_size: int,
) -> None:
    store = HashStore()
    rounds = [
        Round(RankEnv(rank, world_size, rank, world_size), ["a"] * world_size, 0, store)
        for rank in range(world_size)
    ]
    with ThreadPoolExecutor(world_size) as threads:
        gathered = list(
            threads.map(lambda round_: round_.gather("value", {"rank": round_.env.rank}), rounds)
        )
        broadcast = list(
            threads.map(lambda round_: round_.broadcast("value", round_.env.rank + 7), rounds)
        )
    assert gathered == [[{"rank": rank} for rank in range(world_size)]] * world_size
    assert broadcast == [7] * world_size
    assert "RANK" not in os.environ
