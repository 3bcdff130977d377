"""The link between ranks: what is measured is what was set, nothing of it counts as training, and
the model's arithmetic."""

from dataclasses import asdict
from pathlib import Path

import pytest
from links import SlowCommunicator
from ranks import run_ranks

from paceline.distributed.link import Link, fit, measure_link
from paceline.distributed.mesh import ParallelDims


def test_the_model_is_found_again() -> None:
    points = [
        (messages, size, 40e-6 * messages + 2e-9 * size)
        for messages in (2, 8)
        for size in (1e3, 1e5, 1e7)
    ]
    model = fit(points)
    assert model is not None
    assert model["alpha_s"] == pytest.approx(40e-6)
    assert model["beta_s_per_byte"] == pytest.approx(2e-9)
    assert model["residual"] == pytest.approx(0, abs=1e-9)


def test_a_model_that_does_not_hold_says_so_and_has_no_negative_part() -> None:
    falling = fit([(2, 1e3, 3e-3), (2, 1e6, 1e-3)])  # larger is faster: no such model
    assert falling is not None
    assert falling["alpha_s"] >= 0
    assert falling["beta_s_per_byte"] >= 0
    assert falling["residual"] > 0.1
    assert fit([(2, 1e3, 1e-3)]) is None


def measure(world, rate, latency):
    """Over a link of its own speed and over a shaped one."""
    links = []
    for group in (world, SlowCommunicator.wrap(world, rate, latency)):
        before = (world.traffic.total, world.wait_s)
        links.append(measure_link(group))
        assert (world.traffic.total, world.wait_s) == before
    world.barrier()
    return links


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_shaped_link_is_seen_and_counts_for_nothing(world_size):
    rate, latency = 2e6, 3e-3
    ranks = run_ranks(measure, world_size, rate, latency)
    for number in range(2):
        seen = [links[number] for links in ranks]
        assert (
            len(
                {
                    (link.latency_s, link.bandwidth_bytes_s, link.residual, link.sent_bytes)
                    for link in seen
                }
            )
            == 1
        )
    fast, shaped = ranks[0]
    assert fast.num_ranks == shaped.num_ranks == world_size
    # What is shaped takes at least so long; a busy machine adds to it, more to one size than to
    # another.
    assert shaped.all_reduce_s(1 << 20) > 0.7 * (2 * (world_size - 1)) * (
        latency + (1 << 20) / world_size / rate
    )
    assert shaped.bandwidth_bytes_s < 1.5 * rate < fast.bandwidth_bytes_s
    assert 0 < shaped.sent_bytes < fast.sent_bytes  # a slow link is not filled for long


def of_lines(world):
    lines = type(world)(world.env, world.device, ParallelDims(data=2, shard=2))
    return [
        measure_link(lines.subgroup("data")),
        measure_link(lines.subgroup("shard")),
        measure_link(world),
    ]


def test_lines_are_measured_at_the_same_time():
    ranks = run_ranks(of_lines, 4)
    assert [link.num_ranks for link in ranks[0]] == [2, 2, 4]
    for number, lines in enumerate(([(0, 2), (1, 3)], [(0, 1), (2, 3)], [(0, 1, 2, 3)])):
        for line in lines:
            assert len({ranks[rank][number].latency_s for rank in line}) == 1


def alone(world):
    return measure_link(world)


def test_one_rank_has_no_link():
    assert run_ranks(alone, 1) == [None]


def test_seconds_of_an_all_reduce():
    link = Link(0.01, 1e6, num_ranks=4)
    assert link.all_reduce_s(2e6) == pytest.approx(6 * 0.01 + 3.0)
    assert Link(0.01, None, num_ranks=2).all_reduce_s(2e6) == pytest.approx(0.02)
    assert asdict(link) == {
        "latency_s": 0.01, "bandwidth_bytes_s": 1e6, "num_ranks": 4, "residual": 0.0,
        "sent_bytes": 0, "wall_s": 0.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("buckets", "backward_s", "waits"),
    [
        ([1000, 1000], 0.0, 2.0),  # nothing to hide behind
        ([1000], 100.0, 1.0),  # full when backward is over
        ([1000, 1000], 100.0, 1.0),  # all but the last
        # the first begins at half of backward, and the second when that is done
        ([1000, 1000], 1.0, 1.5),
        ([3000, 1000], 1.0, 3.75),
        ([], 1.0, 0.0),
    ],
)
def test_what_backward_does_not_hide(buckets, backward_s, waits):
    assert Link(0.0, 1000.0, num_ranks=2).exposed_s(buckets, backward_s) == pytest.approx(waits)


def test_the_module_does_without_torch():
    import subprocess
    import sys

    code = "import sys, paceline.distributed.link; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], cwd=Path(__file__).parent, check=False
        ).returncode
        == 0
    )
