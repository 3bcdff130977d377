"""The numbers of the hosts in a round, and what the ranks of a round share."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from paceline.cluster.ranks import HostEntry, Round, ordered
from paceline.distributed.environment import RankEnv


def names(*hosts: HostEntry) -> str:
    return "".join(host.host for host in ordered(hosts))


def entry(host: str, group_rank: int, **fields: object) -> HostEntry:
    return HostEntry(host, group_rank, 2, **fields)


@pytest.mark.soak
def test_the_endpoint_host_is_first_also_where_it_sorts_last() -> None:
    assert names(entry("a", 0), entry("b", 1), entry("z", 2, is_endpoint=True)) == "zab"


def test_hosts_keep_the_numbers_of_the_round_before() -> None:
    hosts = [
        entry("z", 2, is_endpoint=True, previous=0),
        entry("a", 1, previous=2),
        entry("b", 0, previous=1),
    ]
    assert names(*hosts) == "zba"


def test_a_host_that_has_come_back_fills_the_gap_that_it_left() -> None:
    hosts = [entry("z", 0, is_endpoint=True, previous=0), entry("c", 1, previous=2), entry("b", 2)]
    assert names(*hosts) == "zbc"


def test_hosts_move_up_where_one_is_missing() -> None:
    assert (
        names(
            entry("z", 0, is_endpoint=True, previous=0),
            entry("c", 1, previous=2),
            entry("d", 2, previous=3),
        )
        == "zcd"
    )


def test_node_rank_is_kept_and_two_hosts_that_want_one_number_are_both_placed() -> None:
    assert (
        names(
            entry("z", 0, is_endpoint=True), entry("a", 1, node_rank=2), entry("b", 2, node_rank=1)
        )
        == "zba"
    )
    assert (
        names(
            entry("z", 0, is_endpoint=True), entry("a", 1, node_rank=1), entry("b", 2, node_rank=1)
        )
        == "zab"
    )


def test_without_a_known_endpoint_the_order_is_that_of_elastic() -> None:
    assert names(entry("b", 1), entry("a", 0)) == "ab"


@pytest.mark.parametrize("world_size", [1, 3])
def test_values_are_gathered_in_the_order_of_the_ranks_and_broadcast_from_rank_0(
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
            threads.map(lambda round_: round_.broadcast("word", round_.env.rank + 7), rounds)
        )
    assert gathered == [[{"rank": rank} for rank in range(world_size)]] * world_size
    assert broadcast == [7] * world_size
    assert "RANK" not in os.environ
