"""`parallel.all_reduce_algorithm`: training through our own all-reduce, beside backward, has the
losses of the backend's."""

import pytest
import torch
from communicating import train
from ranks import run_ranks
from training import Net, Plain

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.distributed.comm_thread import CommThread
from paceline.distributed.mesh import ParallelDims
from paceline.parallel.registry import check_strategy

ALGORITHMS = ("native", "ring", "tree", "halving", "naive")


def train_by_each(world):
    results = {}
    for algorithm in ALGORITHMS:
        result = train(world, Net, 5, parallel={"all_reduce_algorithm": algorithm})
        results[algorithm] = {
            key: result[key] for key in ("losses", "norms", "weights", "traffic", "cost")
        }
    world.barrier()
    return results


@pytest.mark.soak
@pytest.mark.parametrize("world_size", [2, 3])
def test_losses_and_weights_are_those_of_the_backends_all_reduce(world_size):
    results = run_ranks(train_by_each, world_size)
    native = results[0]["native"]
    for algorithm in ALGORITHMS[1:]:
        ours = results[0][algorithm]
        torch.testing.assert_close(ours["losses"], native["losses"], rtol=1e-6, atol=0)
        torch.testing.assert_close(ours["norms"], native["norms"], rtol=1e-5, atol=0)
        for name, weight in ours["weights"].items():
            # The place of a sum's parts may differ, and AdamW makes much of the last bit of a small
            # gradient.
            torch.testing.assert_close(weight, native["weights"][name], rtol=0, atol=1e-4)
            for other in results[1:]:
                assert torch.equal(weight, other[algorithm]["weights"][name]), (algorithm, name)
        sent = [result[algorithm]["traffic"]["send"] for result in results]
        assert ours["cost"].traffic["send"] == max(sent), algorithm
        if algorithm == "ring":
            assert max(sent) <= 1.02 * native["traffic"]["all_reduce"]
        if algorithm == "naive":
            assert max(sent) == sent[0]


def hybrid_data_axis(world):
    axes = ParallelDims(data=2, tensor=2)
    plan = {"1": "colwise", "3": "rowwise"}
    return [
        train(
            world,
            Plain,
            3,
            mode="hybrid",
            axes=axes,
            parallel={
                "all_reduce_algorithm": algorithm,
                "data": 2,
                "tensor": 2,
                "tensor_plan": plan,
            },
        )["losses"]
        for algorithm in ("native", "ring")
    ]


@pytest.mark.soak
def test_the_data_axis_of_a_hybrid_too():
    native, ring = run_ranks(hybrid_data_axis, 4)[0]
    torch.testing.assert_close(ring, native, rtol=1e-6, atol=0)


def in_order(world):
    """Work runs in the order given, beside what the main thread does on the world's own group;
    after an error nothing runs."""
    thread = CommThread(world, "data", timeout_s=30.0)
    tensors = [torch.full((1000,), float(number + world.rank)) for number in range(20)]
    pending = [
        thread.submit(lambda line, tensor=tensor: line.wait(line.all_reduce(tensor)))
        for tensor in tensors
    ]
    summed = [world.sum(1.0)[0] for _ in range(20)]
    for work in pending:
        work.wait()
    ran = []

    def fail(line):
        raise ValueError("wrong in the thread")

    bad, after = thread.submit(fail), thread.submit(lambda line: ran.append(1))
    messages = []
    for work in (bad, after):
        try:
            work.wait()
        except ValueError as error:
            messages.append(str(error))
    world.barrier()
    return (
        [float(tensor[0]) for tensor in tensors],
        summed,
        messages,
        ran,
        thread.world.waits is not world.waits,
    )


def test_a_lane_runs_in_order_and_hands_errors_on():
    for values, summed, messages, ran, is_separate in run_ranks(in_order, 2):
        assert values == [2.0 * number + 1 for number in range(20)]
        assert summed == [2.0] * 20
        assert messages == ["wrong in the thread"] * 2
        assert not ran
        assert is_separate


@pytest.mark.parametrize(
    ("mode", "axes"),
    [
        ("zero1", ParallelDims(data=2)),
        ("zero3", ParallelDims(shard=2)),
        ("hybrid", ParallelDims(data=2, shard=2)),
        ("dp", ParallelDims(data=2)),
    ],
)
def test_modes_that_sum_otherwise_refuse(mode, axes):
    config = Config(model="m", dataset="d", parallel={"mode": mode, "all_reduce_algorithm": "ring"})
    with pytest.raises(ConfigError, match="all_reduce_algorithm: ring") as caught:
        check_strategy(mode, config, axes)
    assert "ddp" in caught.value.allowed


def test_modes_that_can_do_not():
    config = Config(model="m", dataset="d", parallel={"all_reduce_algorithm": "ring"})
    for mode, axes in (
        ("ddp", ParallelDims(data=2)),
        ("single", ParallelDims()),
        ("hybrid", ParallelDims(data=2, pipeline=2)),
    ):
        check_strategy(mode, config, axes)
