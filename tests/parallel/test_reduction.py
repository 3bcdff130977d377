"""`parallel.all_reduce_algorithm`: training with Paceline's own all-reduce, overlapped with
backward, matches training with the backend's."""

import pytest
import torch
from raised import raises_error
from ranks import run_ranks
from reducer_training import train
from strategy_training import Net, Plain

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.distributed.comm_thread import CommThread
from paceline.distributed.mesh import ParallelDims
from paceline.parallel.registry import check_strategy

ALGORITHMS = ("native", "ring", "tree", "halving", "naive")


def train_with_each_algorithm(world):
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
def test_all_reduce_algorithms_match_the_backend(world_size):
    results = run_ranks(train_with_each_algorithm, world_size)
    native = results[0]["native"]
    for algorithm in ALGORITHMS[1:]:
        ours = results[0][algorithm]
        torch.testing.assert_close(ours["losses"], native["losses"], rtol=1e-6, atol=0)
        torch.testing.assert_close(ours["norms"], native["norms"], rtol=1e-5, atol=0)
        for name, weight in ours["weights"].items():
            # The order of summation may differ, and AdamW amplifies rounding of small gradients.
            torch.testing.assert_close(weight, native["weights"][name], rtol=0, atol=1e-4)
            for other in results[1:]:
                assert torch.equal(weight, other[algorithm]["weights"][name]), (algorithm, name)
        sent = [result[algorithm]["traffic"]["send"] for result in results]
        assert ours["cost"].traffic["send"] == max(sent), algorithm
        if algorithm == "ring":
            assert max(sent) <= 1.02 * native["traffic"]["all_reduce"]
        if algorithm == "naive":
            assert max(sent) == sent[0]


def train_hybrid(world):
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
def test_hybrid_data_dimension_matches_the_backend():
    native, ring = run_ranks(train_hybrid, 4)[0]
    torch.testing.assert_close(ring, native, rtol=1e-6, atol=0)


def submit_work(world):
    """Submit work to a CommThread while the main thread uses the world's group, and then work that
    fails. Return the results."""
    thread = CommThread(world, "data", timeout_s=30.0)
    tensors = [torch.full((1000,), float(number + world.rank)) for number in range(20)]
    pending = [
        thread.submit(lambda group, tensor=tensor: group.wait(group.all_reduce(tensor)))
        for tensor in tensors
    ]
    summed = [world.sum(1.0)[0] for _ in range(20)]
    for work in pending:
        work.wait()
    completed = []

    def fail(group):
        raise ValueError("wrong in the thread")

    failing, after = thread.submit(fail), thread.submit(lambda group: completed.append(1))
    messages = []
    for work in (failing, after):
        try:
            work.wait()
        except ValueError as error:
            messages.append(str(error))
    world.barrier()
    return (
        [float(tensor[0]) for tensor in tensors],
        summed,
        messages,
        completed,
        thread.world.waits is not world.waits,
    )


def test_comm_thread_runs_in_order_and_propagates_errors():
    for values, summed, messages, completed, is_separate in run_ranks(submit_work, 2):
        assert values == [2.0 * number + 1 for number in range(20)]
        assert summed == [2.0] * 20
        assert messages == ["wrong in the thread"] * 2
        assert not completed
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
def test_rejects_unsupported_modes(mode, axes):
    config = Config(model="m", dataset="d", parallel={"mode": mode, "all_reduce_algorithm": "ring"})
    with raises_error(
        ConfigError, code="all-reduce-with-mode", naming="parallel.all_reduce_algorithm"
    ) as caught:
        check_strategy(mode, config, axes)
    assert "ddp" in caught.value.allowed


def test_accepts_supported_modes():
    config = Config(model="m", dataset="d", parallel={"all_reduce_algorithm": "ring"})
    for mode, axes in (
        ("ddp", ParallelDims(data=2)),
        ("single", ParallelDims()),
        ("hybrid", ParallelDims(data=2, pipeline=2)),
    ):
        check_strategy(mode, config, axes)
