"""The link between ranks: measurements of shaped links, which do not count as training, and the
arithmetic of the cost model."""

from dataclasses import asdict
from pathlib import Path

import pytest
from links import SlowCommunicator
from ranks import run_ranks

from paceline.distributed.link import Link, fit, measure_link
from paceline.distributed.mesh import ParallelDims


def test_fit_recovers_alpha_and_beta() -> None:
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


def test_poor_fit_has_a_residual_and_no_negative_parameters() -> None:
    falling = fit([(2, 1e3, 3e-3), (2, 1e6, 1e-3)])  # larger messages are faster
    assert falling is not None
    assert falling["alpha_s"] >= 0
    assert falling["beta_s_per_byte"] >= 0
    assert falling["residual"] > 0.1
    assert fit([(2, 1e3, 1e-3)]) is None


def measure(world, rate, latency):
    """Measure the unshaped link and one with the given rate and latency."""
    links = []
    for group in (world, SlowCommunicator.wrap(world, rate, latency)):
        before = (world.traffic.total, world.wait_s)
        links.append(measure_link(group))
        assert (world.traffic.total, world.wait_s) == before
    world.barrier()
    return links


@pytest.mark.parametrize("world_size", [2, 4])
def test_shaped_link_is_measured_and_not_counted_as_traffic(world_size):
    rate, latency = 2e6, 3e-3
    ranks = run_ranks(measure, world_size, rate, latency)
    for number in range(2):
        links_of_ranks = [links[number] for links in ranks]
        assert (
            len(
                {
                    (link.latency_s, link.bandwidth_bytes_s, link.residual, link.sent_bytes)
                    for link in links_of_ranks
                }
            )
            == 1
        )
    fast, shaped = ranks[0]
    assert fast.num_ranks == shaped.num_ranks == world_size
    # Shaping is a lower bound; load on the machine adds to it, by different amounts for each size.
    assert shaped.all_reduce_s(1 << 20) > 0.7 * (2 * (world_size - 1)) * (
        latency + (1 << 20) / world_size / rate
    )
    assert shaped.bandwidth_bytes_s < 1.5 * rate
    # On a busy machine, larger messages may take no longer than small ones over the fast link.
    assert fast.bandwidth_bytes_s is None or fast.bandwidth_bytes_s > 1.5 * rate
    assert 0 < shaped.sent_bytes < fast.sent_bytes  # a slow link is measured with fewer bytes


def measure_subgroups(world):
    mesh = type(world)(world.env, world.device, ParallelDims(data=2, shard=2))
    return [
        measure_link(mesh.subgroup("data")),
        measure_link(mesh.subgroup("shard")),
        measure_link(world),
    ]


def test_subgroups_are_measured_concurrently():
    ranks = run_ranks(measure_subgroups, 4)
    assert [link.num_ranks for link in ranks[0]] == [2, 2, 4]
    for number, groups in enumerate(([(0, 2), (1, 3)], [(0, 1), (2, 3)], [(0, 1, 2, 3)])):
        for group in groups:
            assert len({ranks[rank][number].latency_s for rank in group}) == 1


def measure_on_one_rank(world):
    return measure_link(world)


def test_single_rank_has_no_link():
    assert run_ranks(measure_on_one_rank, 1) == [None]


def test_time_of_an_all_reduce():
    link = Link(0.01, 1e6, num_ranks=4)
    assert link.all_reduce_s(2e6) == pytest.approx(6 * 0.01 + 3.0)
    assert Link(0.01, None, num_ranks=2).all_reduce_s(2e6) == pytest.approx(0.02)
    assert asdict(link) == {
        "latency_s": 0.01, "bandwidth_bytes_s": 1e6, "num_ranks": 4, "residual": 0.0,
        "sent_bytes": 0, "wall_s": 0.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("buckets", "backward_s", "exposed_s"),
    [
        ([1000, 1000], 0.0, 2.0),  # no backward to overlap with
        ([1000], 100.0, 1.0),  # the bucket is full at the end of backward
        ([1000, 1000], 100.0, 1.0),  # all buckets but the last are hidden
        # the first bucket is sent from half of backward on, the second after it
        ([1000, 1000], 1.0, 1.5),
        ([3000, 1000], 1.0, 3.75),
        ([], 1.0, 0.0),
    ],
)
def test_exposed_communication_after_backward(buckets, backward_s, exposed_s):
    assert Link(0.0, 1000.0, num_ranks=2).exposed_s(buckets, backward_s) == pytest.approx(exposed_s)


def test_module_does_not_import_torch():
    import subprocess
    import sys

    code = "import sys, paceline.distributed.link; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], cwd=Path(__file__).parent, check=False
        ).returncode
        == 0
    )
