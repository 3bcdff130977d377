"""Test the goodput with failures, and networks with several levels of switches."""

import math
import random
from dataclasses import replace

import pytest
from raised import raises_error

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.models.shape.dims import LanguageDims
from paceline.planner.scale.goodput import (
    FailureModel,
    daly_interval,
    expected_goodput,
    goodput_of,
    young_interval,
)
from paceline.planner.scale.network import parse_network
from paceline.planner.setup import TrainingSetup
from paceline.planner.time.rates import Rates
from paceline.planner.time.work import count_work

DIMS = LanguageDims(
    hidden=4096, layers=32, heads=32, key_heads=8, queries=4096, keys=1024, feed_forward=14336,
    vocabulary=128256,
)  # fmt: skip
RATES = Rates(989e12, 989e12, 3.35e12, 450e9, 400e9, 50e9, 989e12)


def simulated_goodput(interval_s: float, pause_s: float, recovery_s: float, mtbf_s: float) -> float:
    """Return the share of useful time of a run whose failures are drawn at random."""
    draw = random.Random(3)
    useful = total = 0.0
    failure = draw.expovariate(1 / mtbf_s)
    for _ in range(20_000):
        while failure < interval_s + pause_s:
            total += failure
            failure = draw.expovariate(1 / mtbf_s)
            while failure < recovery_s:  # a failure while recovering
                total += failure
                failure = draw.expovariate(1 / mtbf_s)
            failure -= recovery_s
            total += recovery_s
        failure -= interval_s + pause_s
        total += interval_s + pause_s
        useful += interval_s
    return useful / total


@pytest.mark.parametrize("interval_s", [200.0, 600.0, 2000.0])
def test_goodput_is_that_of_random_failures(interval_s: float) -> None:
    predicted = expected_goodput(interval_s, 20.0, 120.0, 3000.0)
    assert predicted == pytest.approx(simulated_goodput(interval_s, 20, 120, 3000), rel=0.03)


@pytest.mark.parametrize(("pause_s", "mtbf_s"), [(5.0, 3600.0), (60.0, 3600.0), (300.0, 2000.0)])
def test_dalys_interval_is_the_best(pause_s: float, mtbf_s: float) -> None:
    best = max(
        (expected_goodput(interval, pause_s, 100, mtbf_s), interval)
        for interval in range(1, 8000, 2)
    )
    daly = expected_goodput(daly_interval(pause_s, mtbf_s), pause_s, 100, mtbf_s)
    assert daly >= best[0] * 0.9999
    # Young's approximation is close if failures are rare.
    assert young_interval(5, 3600) == pytest.approx(math.sqrt(2 * 5 * 3600))
    assert daly_interval(1, 1e6) == pytest.approx(young_interval(1, 1e6), rel=0.01)
    assert daly_interval(100, 10) == 10


def test_more_devices_fail_more_often() -> None:
    failures = FailureModel(50_000)
    sizes = [
        goodput_of(failures, 10**12, ranks, 8, 51e9, is_async=True) for ranks in (64, 1024, 16384)
    ]
    assert [each.mtbf_s for each in sizes] == [
        pytest.approx(50_000 * 3600 / ranks) for ranks in (64, 1024, 16384)
    ]
    assert sizes[0].goodput > sizes[1].goodput > sizes[2].goodput > 0.5
    waiting = goodput_of(failures, 10**12, 64, 8, 51e9, is_async=False)
    assert waiting.pause_s > sizes[0].pause_s
    assert waiting.goodput < sizes[0].goodput
    assert expected_goodput(1e9, 1, 1, 1) == 0


def test_oversubscription_slows_groups_beyond_a_switch() -> None:
    setup = TrainingSetup(DIMS, shard=256, zero_stage=3, micro_batches=2)
    plain = count_work(setup, RATES)
    wide = replace(setup, hosts_per_switch=32, oversubscription=4.0)
    assert count_work(wide, RATES).shard_network_s == plain.shard_network_s
    narrow = replace(setup, hosts_per_switch=4, oversubscription=4.0)
    assert count_work(narrow, RATES).shard_network_s == pytest.approx(4 * plain.shard_network_s)
    assert count_work(narrow, RATES).shard_link_s == plain.shard_link_s
    # Replicas of shards within a switch only exchange gradients above it.
    replicas = replace(narrow, shard=32, data=8)
    below = count_work(replace(replicas, oversubscription=1.0), RATES)
    above = count_work(replicas, RATES)
    assert above.shard_network_s == below.shard_network_s
    assert above.sync_network_s == pytest.approx(4 * below.sync_network_s)


def test_parses_networks() -> None:
    assert parse_network("rail").hosts_per_switch == 32
    assert parse_network("fat-tree").hosts_per_switch == 4
    network = parse_network("fat-tree:16:2.5")
    assert (network.hosts_per_switch, network.oversubscription) == (16, 2.5)
    assert "1/2.5" in network.text()
    for text in ("ring", "rail:0", "rail:x", "fat-tree:4:0.5", "rail:1:2:3", "fat-tree:4:nan"):
        with raises_error(ConfigError, code="invalid-network"):
            parse_network(text)


def test_save_interval_follows_only_from_an_mtbf() -> None:
    from paceline.parallel.registry import layout
    from paceline.planner.machine.hardware import cpu_machine
    from paceline.planner.search.save_interval import with_save_interval

    machine = cpu_machine(2, None, measure=False, memory_bytes=1 << 30)

    def interval(**recovery: float) -> float | None:
        config = Config(
            model="builtin:qwen2-micro", dataset="builtin:python-docs", recovery=recovery
        )
        placed = layout(config.parallel, 2, "ddp")
        return with_save_interval(config, placed, machine).recovery.save_interval_s

    assert interval() is None
    assert interval(mtbf_hours=1000, save_interval_s=5) == 5
    often, seldom = interval(mtbf_hours=1), interval(mtbf_hours=10_000)
    assert often is not None
    assert seldom is not None
    assert 1 <= often < seldom
