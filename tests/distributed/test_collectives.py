"""Paceline's own collectives on real ranks: the values of the backend's collectives, and the bytes
of the closed formulas."""

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from raised import raises_error
from ranks import run_ranks

from paceline.core.errors import ConfigError
from paceline.distributed.collective_bytes import all_reduce_bytes
from paceline.distributed.communicator import Communicator, init_communicator
from paceline.distributed.environment import RankEnv
from paceline.distributed.mesh import ParallelDims
from paceline.strategies.reducers.all_reduce.run import CollectiveTrace, all_reduce, broadcast
from paceline.strategies.reducers.all_reduce.schedules import ALGORITHMS, bounds, sent

SIZES = (0, 1, 2, 7, 64, 1001)
DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
)  # fmt: skip


def _make_values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return small integers, whose sums are exact in every dtype."""
    numbers = (torch.arange(numel) * (rank + 2) + rank) % 5
    return (numbers % 2 == 0 if dtype == torch.bool else numbers).to(dtype)


def _expected_sum(size: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    values_by_rank = [_make_values(rank, numel, dtype) for rank in range(size)]
    if dtype == torch.bool:
        return torch.stack(values_by_rank).any(dim=0)
    return torch.stack(values_by_rank).sum(dim=0).to(dtype)


def _assert_equal(tensor: torch.Tensor, other: torch.Tensor, case: object) -> None:
    assert torch.equal(tensor, other), f"{case}: {tensor} instead of {other}"


def sent_bytes(algorithm: str, world_size: int, rank: int, numel: int, element_size: int) -> int:
    """Return the bytes that a rank sends in an all-reduce, in closed form.

    - ring: all chunks but one in each phase, or 2(N-1)/N of the tensor if N divides it.
    - naive: the tensor N-1 times on rank 0, once on each other rank.
    - tree: once up (except on rank 0), and once down to each child in the binomial tree.
    - halving, N = 2^k: 2(N-1)/N of the tensor. If N is not a power of two, each rank beyond it
      also sends and receives the full tensor.
    """
    if world_size == 1:
        return 0
    return element_size * _SENT[algorithm](world_size, rank, numel)


def _ring_sent(size: int, rank: int, numel: int) -> int:
    def length(chunk: int) -> int:
        start, stop = bounds(chunk % size, size, numel)
        return stop - start

    return 2 * numel - length(rank + 1) - length(rank + 2)


def _naive_sent(size: int, rank: int, numel: int) -> int:
    return numel * (size - 1) if rank == 0 else numel


def _tree_sent(size: int, rank: int, numel: int) -> int:
    # A rank's children are rank + 2^k for each 2^k below its lowest set bit (for rank 0, below N).
    reach = rank & -rank if rank else size
    children = sum(
        1 for power in range(size.bit_length()) if 1 << power < reach and rank + (1 << power) < size
    )
    return numel * (children + (1 if rank else 0))


def _halving_sent(size: int, rank: int, numel: int) -> int:
    core = 1 << (size.bit_length() - 1)
    if rank >= core:
        return numel
    first, last = bounds(rank, core, numel)
    # Halving sends everything except the rank's own chunk. Doubling sends that chunk, and then each
    # doubled range except the last.
    total = numel - (last - first)
    span = 1
    while span < core:
        begin = rank // span * span
        total += bounds(begin + span - 1, core, numel)[1] - bounds(begin, core, numel)[0]
        span *= 2
    return total + (numel if rank + core < size else 0)


_SENT = {"ring": _ring_sent, "naive": _naive_sent, "tree": _tree_sent, "halving": _halving_sent}


def _check_values(world: Communicator) -> None:
    for algorithm in ALGORITHMS["all-reduce"]:
        for numel in SIZES:
            for dtype in DTYPES if numel in (7, 64) else (torch.float32,):
                tensor = _make_values(world.rank, numel, dtype)
                result = all_reduce(world, tensor, algorithm)
                _assert_equal(
                    tensor, _expected_sum(world.size, numel, dtype), (algorithm, numel, dtype)
                )
                assert result.bytes == sent_bytes(
                    algorithm, world.size, world.rank, numel, tensor.element_size()
                )
    for algorithm in ALGORITHMS["broadcast"]:
        for root in range(world.size):
            for numel in SIZES:
                tensor = _make_values(world.rank, numel, torch.bfloat16)
                broadcast(world, tensor, algorithm, root)
                _assert_equal(
                    tensor, _make_values(root, numel, torch.bfloat16), (algorithm, root, numel)
                )
    world.barrier()


def _check_against_backend(world: Communicator) -> None:
    torch.manual_seed(world.rank)
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
        for algorithm in ALGORITHMS["all-reduce"]:
            tensor = torch.randn(3001)
            native = tensor.clone()
            all_reduce(world, tensor, algorithm, op=op)
            dist.all_reduce(native, op)
            torch.testing.assert_close(tensor, native, msg=f"{algorithm} {op}")
            values_by_rank = world.gather_objects(tensor.tolist())
            assert all(values == values_by_rank[0] for values in values_by_rank), (
                "ranks end with different bits"
            )
    world.barrier()


@pytest.mark.parametrize("size", [2, 3, 5])
def test_values_for_each_algorithm_dtype_and_size(size: int) -> None:
    run_ranks(_check_values, size)


def _check_strides_and_gradients(world: Communicator) -> None:
    plain = _make_values(world.rank, 24, torch.float32).view(4, 6)
    total = _expected_sum(world.size, 24, torch.float32).view(4, 6)
    for algorithm in ALGORITHMS["all-reduce"]:
        # The strides differ between the ranks, and elements outside the view must not change.
        strided = plain.clone() if world.rank == 0 else plain.t().contiguous().t()
        all_reduce(world, strided, algorithm)
        _assert_equal(strided, total, algorithm)
        wide = torch.full((4, 12), -1.0)
        wide[:, ::2] = plain
        all_reduce(world, wide[:, ::2], algorithm)
        _assert_equal(wide[:, ::2], total, algorithm)
        assert (wide[:, 1::2] == -1).all()
    leaf = plain.clone().requires_grad_()
    all_reduce(world, leaf, "ring")
    _assert_equal(leaf.detach(), total, "a tensor that requires grad")
    scalar = torch.tensor(float(world.rank))
    all_reduce(world, scalar, "halving")
    assert float(scalar) == sum(range(world.size))
    with pytest.raises(ValueError, match="no order"):
        all_reduce(world, torch.zeros(3, dtype=torch.complex64), "ring", op=dist.ReduceOp.MAX)
    with pytest.raises(ValueError, match="root is rank 9"):
        broadcast(world, scalar, "tree", root=9)
    _check_against_backend(world)


def test_strides_reduce_ops_and_agreement_with_the_backend() -> None:
    run_ranks(_check_strides_and_gradients, 3)


def _check_counts(world: Communicator) -> dict[str, Any]:
    """Count the messages and bytes that are passed to the process group."""
    sent_sizes: list[int] = []
    start = dist.batch_isend_irecv

    def counting(calls: list[dist.P2POp]) -> list[dist.Work]:
        tensors = [call.tensor for call in calls if call.op is dist.isend]
        sent_sizes.extend(tensor.numel() * tensor.element_size() for tensor in tensors)
        return start(calls)

    dist.batch_isend_irecv = counting
    before = world.traffic.total
    sent_by_algorithm = {}
    for algorithm in ALGORITHMS["all-reduce"]:
        sent_sizes.clear()
        result = all_reduce(world, torch.ones(1000), algorithm)
        assert (sum(sent_sizes), len(sent_sizes)) == (result.bytes, result.messages)
        assert result == sent(algorithm, world.size, 1000, 4)[world.rank]
        sent_by_algorithm[algorithm] = result.bytes
    assert world.traffic.total - before == sum(sent_by_algorithm.values())
    world.barrier()
    return sent_by_algorithm


@pytest.mark.parametrize("size", [2, 4, 5, 8])
def test_bytes_sent_match_the_formulas(size: int) -> None:
    ranks = run_ranks(_check_counts, size)
    # With `ring`, each rank sends 2(N-1)/N of the tensor for any N. With `naive`, the bytes of rank
    # 0 grow with N.
    assert {rank["ring"] for rank in ranks} == {all_reduce_bytes(4000, size)}
    assert ranks[0]["naive"] == (size - 1) * 4000
    assert {rank["naive"] for rank in ranks[1:]} == {4000}


def _check_trace(world: Communicator) -> CollectiveTrace:
    trace = CollectiveTrace()
    tensor = torch.full((10,), 2.0**world.rank)
    all_reduce(world, tensor, "ring", trace)
    assert trace.values[0] == [2.0**world.rank] * 10
    assert trace.values[-1] == tensor.tolist()
    single_rank = Communicator(RankEnv(), world.device)
    assert all_reduce(single_rank, tensor, "ring", CollectiveTrace()).messages == 0
    world.barrier()
    return trace


def test_trace_records_each_step() -> None:
    ranks = run_ranks(_check_trace, 5)
    phases = [step.phase for step in ranks[0].steps]
    assert phases == ["scatter-reduce"] * 4 + ["all-gather"] * 4
    for rank, trace in enumerate(ranks):
        sends = [send for step in trace.steps for send in step.sends if send.source == rank]
        assert {send.target for send in sends} == {(rank + 1) % 5}
        # After the scatter-reduce, rank r has the complete sum of chunk r + 1 only.
        chunk = (rank + 1) % 5
        complete = [number for number, value in enumerate(trace.values[4]) if value == 31.0]
        assert complete == [2 * chunk, 2 * chunk + 1]


def _check_groups(world: Communicator) -> None:
    """Reduce persistent buckets of several dtypes in two threads at the same time, each with its
    own group."""
    groups = [Communicator(world.env, world.device, group=dist.new_group()) for _ in range(2)]
    buckets = [
        [torch.empty(5000 + 77 * number, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
        for number in range(2)
    ]
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for _ in range(10):
                for bucket in buckets[number]:
                    bucket.copy_(_make_values(world.rank, bucket.numel(), bucket.dtype))
                    all_reduce(groups[number], bucket, "ring" if number else "halving")
                    _assert_equal(
                        bucket, _expected_sum(world.size, bucket.numel(), bucket.dtype), number
                    )
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    world.barrier()


def test_concurrent_all_reduce_in_threads_with_separate_groups() -> None:
    run_ranks(_check_groups, 3)


def _check_subgroup(world: Communicator) -> None:
    """Reduce and broadcast in a subgroup of the mesh, whose ranks are numbered differently."""
    mesh = Communicator(world.env, world.device, ParallelDims(data=2, shard=2))
    group = mesh.subgroup("data")
    tensor = torch.full((9,), 10.0**world.rank)
    all_reduce(group, tensor, "ring")
    _assert_equal(tensor, torch.full((9,), sum(10.0**rank for rank in group.ranks)), group.ranks)
    broadcast(group, tensor.fill_(world.rank), "ring", root=1)
    _assert_equal(tensor, torch.full((9,), float(group.ranks[1])), group.ranks)
    world.barrier()


def test_collectives_in_a_mesh_subgroup() -> None:
    run_ranks(_check_subgroup, 4)


def _timeout_of_subgroup(env: RankEnv) -> float:
    world = init_communicator(env, "cpu", 77.0, ParallelDims(data=2, shard=2))
    group = world.subgroup("data").group
    assert group is not None
    timeout: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return timeout.total_seconds()


def test_time_limit_applies_to_subgroups() -> None:
    assert run_ranks(_timeout_of_subgroup, 4, init_process_group=False) == [77.0] * 4


def test_rejects_unknown_algorithm() -> None:
    world = Communicator(RankEnv(), torch.device("cpu"))
    with raises_error(ConfigError, code="unknown-name"):
        all_reduce(world, torch.zeros(1), "rign")
    with raises_error(ConfigError, code="unknown-name"):
        broadcast(world, torch.zeros(1), "halving")
