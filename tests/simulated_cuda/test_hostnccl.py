"""Test the backend with NCCL's rules: its values, what it refuses, and what it detects."""

import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hostnccl import host_nccl_of
from nccl_orders import LOG, OrderError, compare_orders
from ranks import run_ranks
from simulated import BACKEND, simulate_values

pytestmark = pytest.mark.slow


def connect(env, timeout_s=60.0):
    """Simulate devices, and join a process group of the backend."""
    simulate_values()
    os.environ[BACKEND] = "hostnccl"
    device = torch.device("cuda", env.rank)
    torch.accelerator.set_device_index(env.rank)
    dist.init_process_group(
        dist.get_default_backend_for_device(device), rank=env.rank, world_size=env.world_size,
        timeout=timedelta(seconds=timeout_s), device_id=device,
    )  # fmt: skip
    return device


def on_two_ranks(function, *args):
    return run_ranks(function, 2, *args, init_process_group=False)


def errors_of(calls):
    """Return the type and text of the error of each call."""
    errors = {}
    for name, call in calls.items():
        try:
            call()
        except (RuntimeError, TypeError, ValueError) as error:
            errors[name] = f"{type(error).__name__}: {error}"
    return errors


# -- values
def reduce_values(env):
    device = connect(env)
    values = torch.arange(4.0, device=device) + 10 * env.rank
    results = {}
    for op in ("SUM", "AVG", "MAX", "MIN", "PRODUCT"):
        tensor = values.clone()
        dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
        results[op] = tensor.tolist()
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8):
        tensor = values.to(dtype)
        dist.all_reduce(tensor)
        results[dtype] = tensor.tolist()
    flags = values > 10
    dist.all_reduce(flags)
    results["bool"] = flags.tolist()
    dist.destroy_process_group()
    return results


def test_reductions():
    first, second = on_two_ranks(reduce_values)
    assert first == second
    total = [10, 12, 14, 16]
    assert first == {
        "SUM": total,
        "AVG": [5, 6, 7, 8],
        "MAX": [10, 11, 12, 13],
        "MIN": [0, 1, 2, 3],
        "PRODUCT": [0, 11, 24, 39],
        torch.bfloat16: total,
        torch.float16: total,
        torch.float64: total,
        torch.int64: total,
        torch.int8: total,
        "bool": [False, True, True, True],
    }


def exchange_values(env):
    device, rank, size = connect(env), env.rank, env.world_size
    values = torch.arange(4.0, device=device) + 10 * rank
    halves = list(values.chunk(size))
    results = {}

    def collect(name, *tensors):
        results[name] = [tensor.tolist() for tensor in tensors]

    tensor = values.clone()
    dist.reduce(tensor, 1)
    collect("reduce", tensor)
    tensor = values.clone()
    dist.broadcast(tensor, 1)
    collect("broadcast", tensor)
    gathered = values.new_empty(size * 4)
    dist.all_gather_single(gathered, values)
    collect("all_gather_single", gathered)
    parts = [torch.empty_like(values) for _ in range(size)]
    dist.all_gather(parts, values)
    collect("all_gather", *parts)
    half = values.new_empty(2)
    dist.reduce_scatter_single(half, values)
    collect("reduce_scatter_single", half)
    dist.reduce_scatter(half, halves)
    collect("reduce_scatter", half)
    exchanged = torch.empty_like(values)
    dist.all_to_all_single(exchanged, values)
    collect("all_to_all_single", exchanged)
    uneven = values.new_empty((2, 6)[rank])
    dist.all_to_all_single(uneven, values, [(1, 3)[rank]] * 2, [1, 3])
    collect("uneven all_to_all_single", uneven)
    received = [torch.empty_like(each) for each in halves]
    dist.all_to_all(received, halves)
    collect("all_to_all", *received)
    parts = [torch.zeros_like(values) for _ in range(size)]
    dist.gather(values, parts if rank == 0 else None, 0)
    collect("gather", *parts)
    dist.scatter(half, halves if rank == 1 else None, 1)
    collect("scatter", half)
    if rank == 0:
        dist.send(values, 1)
    else:
        dist.recv(tensor, 0)
    collect("send", tensor)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, values, 1 - rank), dist.P2POp(dist.irecv, tensor, 1 - rank)]
    )
    for work in works:
        work.wait()
    collect("batch_isend_irecv", tensor)
    objects = [None] * size
    dist.all_gather_object(objects, f"object {rank}")
    results["objects"] = objects
    dist.barrier()
    dist.destroy_process_group()
    return results


def test_exchanges():
    first, second = on_two_ranks(exchange_values)
    low, high = [0, 1, 2, 3], [10, 11, 12, 13]
    same = {
        "broadcast": [high],
        "all_gather_single": [low + high],
        "all_gather": [low, high],
        "objects": ["object 0", "object 1"],
    }
    assert first == same | {
        "reduce": [low],
        "reduce_scatter_single": [[10, 12]],
        "reduce_scatter": [[10, 12]],
        "all_to_all_single": [[0, 1, 10, 11]],
        "uneven all_to_all_single": [[0, 10]],
        "all_to_all": [[0, 1], [10, 11]],
        "gather": [low, high],
        "scatter": [[10, 11]],
        "send": [high],
        "batch_isend_irecv": [high],
    }
    assert second == same | {
        "reduce": [[10, 12, 14, 16]],
        "reduce_scatter_single": [[14, 16]],
        "reduce_scatter": [[14, 16]],
        "all_to_all_single": [[2, 3, 12, 13]],
        "uneven all_to_all_single": [[1, 2, 3, 11, 12, 13]],
        "all_to_all": [[2, 3], [12, 13]],
        "gather": [[0, 0, 0, 0]] * 2,
        "scatter": [[12, 13]],
        "send": [low],
        "batch_isend_irecv": [low],
    }


# -- asynchrony
def wait_late(env):
    device = connect(env)
    results = {}
    first, second = (torch.full((2,), value, device=device) for value in (1.0, 2.0))
    works = [dist.all_reduce(each, async_op=True) for each in (first, second)]
    time.sleep(0.2)  # longer than the delays
    results["before"] = first.isnan().all().item(), second.isnan().all().item()
    works[1].wait()  # of the collectives of a communicator, the earlier one ends first
    results["after"] = first.tolist(), second.tolist()
    works[0].wait()
    # The second reads what the first wrote, without a wait between them.
    works = [dist.all_reduce(first, async_op=True) for _ in range(2)]
    works[1].wait()
    results["chain"] = first.tolist()

    def overwrite():
        with host_nccl_of(dist.group.WORLD)._lock:  # not before the block ends
            work = dist.all_reduce(second, async_op=True)
            second.add_(1)
        work.wait()

    def free():
        group = dist.new_group()
        sent, gathered = torch.ones(2, device=device), torch.empty(4, device=device)
        with host_nccl_of(group)._lock:  # the collective does not start before the block ends
            work = dist.all_gather_single(gathered, sent, group=group, async_op=True)
            sent.untyped_storage().resize_(0)
        work.wait()

    def forget():
        dist.all_reduce(first, async_op=True)
        dist.destroy_process_group()

    return results, errors_of({"overwrite": overwrite, "free": free, "forget": forget})


def test_results_appear_with_the_wait():
    for results, errors in on_two_ranks(wait_late):
        assert results == {
            "before": (True, True),
            "after": ([2, 2], [4, 4]),
            "chain": [8, 8],
        }
        modified = "a tensor of a collective was modified between its issue and the wait"
        assert modified in errors["overwrite"]
        assert "no stream waited for SeqNum=6, all_reduce(2, float32)" in errors["forget"]
        assert "memory of a collective was freed before it ended" in errors["free"]


# -- what NCCL refuses
def try_refused(env):
    device = connect(env)
    square = torch.ones(2, 2, device=device)
    short = torch.ones(2, dtype=torch.int16, device=device)
    flags = torch.ones(2, dtype=torch.bool, device=device)
    mixed = torch.ones(2, dtype=torch.complex64, device=device)
    halves = [torch.empty(2, device=device), torch.empty(2, device=device)]
    errors = errors_of(
        {
            "CPU": lambda: dist.all_reduce(torch.ones(2)),
            "other device": lambda: dist.all_reduce(square.to(f"cuda:{1 - env.rank}")),
            "strides": lambda: dist.all_reduce(square[:, 0]),
            "strides of an output": lambda: dist.all_gather([square[:, 0], halves[0]], halves[1]),
            "strides of a message": lambda: dist.send(square.t(), 1 - env.rank),
            "int16": lambda: dist.broadcast(short, 0),
            "bitwise": lambda: dist.all_reduce(flags, dist.ReduceOp.BOR),
            "mean of bool": lambda: dist.all_reduce(flags, dist.ReduceOp.AVG),
            "any source": lambda: dist.recv(halves[0]),
            "sizes": lambda: dist.all_gather_single(halves[0], halves[1]),
        }
    )
    dist.all_reduce(mixed)  # as real numbers
    dist.all_reduce(torch.ones(1, 2, 3, 3, device=device).to(memory_format=torch.channels_last))
    dist.destroy_process_group()
    return errors, mixed.tolist()


def test_tensors_and_operations_that_nccl_refuses():
    dtype = "TypeError: Input tensor data type is not supported for NCCL process group: "
    for errors, mixed in on_two_ranks(try_refused):
        assert mixed == [2, 2]
        assert "No backend type associated with device type cpu" in errors.pop("CPU")
        assert "not on device passed to init_process_group" in errors.pop("other device")
        assert "output tensor size must be" in errors.pop("sizes")
        assert errors == {
            "strides": "ValueError: Tensors must be contiguous",
            "strides of an output": "ValueError: Tensors must be contiguous",
            "strides of a message": "ValueError: Tensors must be contiguous",
            "int16": f"{dtype}int16",
            "bitwise": "ValueError: Cannot use ReduceOp.BOR with NCCL",
            "mean of bool": "TypeError: Cannot use ReduceOp.AVG with boolean inputs",
            "any source": "RuntimeError: Backend nccl does not support recvAnysource",
        }


# -- splits, time limits, and orders
def split(env):
    connect(env)
    dist.new_group([1])
    child = dist.split_group(split_ranks=[[0], [1]])
    dist.destroy_process_group()
    return child != dist.GroupMember.NON_GROUP_MEMBER, LOG.records


def test_split_is_a_collective_of_the_parent():
    for is_member, records in on_two_ranks(split):
        assert is_member
        operation = ("split", None, None, None)
        assert records == [{"group": "0", "ranks": [0, 1], "operations": [operation]}] * 2


def split_alone(env, path):
    """Rank 0 creates a group, which rank 1 does not."""
    connect(env, timeout_s=1.0)
    if env.rank == 0:
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), 2)
        dist.new_group([0])
    time.sleep(10)


def test_collective_that_takes_too_long_aborts_the_process(tmp_path: Path):
    path = tmp_path / "stderr"
    with pytest.raises(AssertionError, match="rank 0 died"):
        on_two_ranks(split_alone, path)
    text = path.read_text()
    assert "[rank 0, communicator 0 of ranks [0, 1]] Watchdog caught collective operation" in text
    assert "SeqNum=0, split(None, None), Timeout(ms)=1000" in text


def issue_in_other_order(env):
    device = connect(env)
    groups = [dist.new_group(), dist.new_group()]
    tensors = [torch.ones(3, device=device), torch.ones(5, device=device)]
    works = [
        dist.all_reduce(tensors[number], group=groups[number], async_op=True)
        for number in ((0, 1) if env.rank == 0 else (1, 0))
    ]
    for work in works:
        work.wait()
    return errors_of({"destroy": dist.destroy_process_group})["destroy"]


def test_orders_that_differ_between_ranks():
    texts = on_two_ranks(issue_in_other_order)
    assert texts[0] == texts[1]
    assert "the ranks issued their collectives in different orders" in texts[0]
    first, second = texts[0].split("rank 1, from its call")
    assert first.index("all_reduce 3 float32") < first.index("all_reduce 5 float32")
    assert second.index("all_reduce 5 float32") < second.index("all_reduce 3 float32")


def record(group, *operations):
    return {"group": group, "ranks": [0, 1], "operations": list(operations)}


SUM, SEND, RECEIVE = ("all_reduce", 4, "float32", None), ("send", 4, "int8"), ("recv", 4, "int8")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([record("a", SUM), record("b", SUM)], [record("b", SUM), record("a", SUM)]),
        ([record("a", SUM), record("a", SUM)], [record("a", SUM)]),
        ([record("a", SUM)], [record("a", ("all_reduce", 5, "float32", None))]),
        ([record("a", SUM)], [record("a", ("broadcast", 4, "float32", None))]),
        # Both send first.
        (
            [record("a", (*SEND, 1)), record("a", (*RECEIVE, 1))],
            [record("a", (*SEND, 0)), record("a", (*RECEIVE, 0))],
        ),
        (
            [record("a", (*SEND, 1)), record("b", SUM)],
            [record("b", SUM), record("a", (*RECEIVE, 0))],
        ),
    ],
    ids=["groups", "missing", "size", "operation", "messages", "message and group"],
)
def test_different_orders(first, second):
    with pytest.raises(OrderError, match=r"in different orders|differs between"):
        compare_orders({0: first, 1: second})


def test_orders_that_form_a_cycle():
    """No two ranks share two communicators."""

    def log(*ranks):
        return [{"group": str(each), "ranks": each, "operations": [SUM]} for each in ranks]

    logs = {0: log([0, 1], [0, 2]), 2: log([0, 2], [2, 3]), 3: log([2, 3], [1, 3])}
    compare_orders({**logs, 1: log([0, 1], [1, 3])})
    with pytest.raises(OrderError, match="in different orders"):
        compare_orders({**logs, 1: log([1, 3], [0, 1])})


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([record("a", SUM), record("b", SUM)], [record("a", SUM), record("b", SUM)]),
        # The order within a batch is free, and messages to others do not matter.
        (
            [record("a", (*SEND, 1), (*RECEIVE, 1)), record("a", (*SEND, 2))],
            [record("a", (*SEND, 0), (*RECEIVE, 0))],
        ),
        (
            [record("a", (*SEND, 1), (*RECEIVE, 1)), record("b", SUM)],
            [record("a", (*RECEIVE, 0)), record("a", (*SEND, 0)), record("b", SUM)],
        ),
    ],
    ids=["same", "batch", "two batches"],
)
def test_orders_that_agree(first, second):
    compare_orders({0: first, 1: second})
