"""What a parameter server costs: bytes of the process with the most, and bytes per step of the one
that sends most. Imports no torch."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from paceline.config.schema import Config
from paceline.distributed.collective_bytes import all_reduce_bytes
from paceline.distributed.mesh import ParallelDims
from paceline.models.shape.record import TensorShape
from paceline.parallel.cost import Cost, ModelShape, Workload, total_bytes

#: Optimizer → (state per element of a row, state per row), without the step counts of Adam and
#: Adagrad.
STATE = {"sgd": (0, 0), "adagrad": (1, 0), "row_wise_adagrad": (0, 1), "adam": (2, 0)}


def estimate(shape: ModelShape, axes: ParallelDims, work: Workload, config: Config) -> Cost:
    """Return the cost of a worker or a server, whichever has more. In a run on accelerators, only a
    worker needs their memory.

    A worker has the parameters without tables and their gradients; a server has its rows and their
    optimizer state. With dense parameters on servers, a server also has its share of them and of
    their state, and sends it to every worker. Traffic is an upper bound for batches without
    repeated ids, unless the distinct ids of a micro-batch were counted in the data.
    """
    num_servers = config.parameter_server.num_servers
    # Tables are recognized by name: a shape has no other information.
    tables = [
        tensor
        for tensor in shape.trained
        if len(tensor.shape) == 2 and tensor.name.startswith("tables.")
    ]
    dense = [tensor for tensor in shape.trained if tensor not in tables]
    gradients = total_bytes(dense)
    weights = shape.parameter_bytes - total_bytes(tables) + shape.buffer_bytes
    rows, server_state = _server_bytes(tables, config)
    requested, pushed, answered = _row_traffic(tables, axes.data, num_servers, work)
    if config.parameter_server.dense_on_servers:
        share = _largest_share(dense, num_servers)
        worker_state = 0
        server_state += _state_bytes(share, shape)
        worker_traffic = {"pull": requested, "push": pushed + gradients}
    else:
        share = []
        worker_state = _state_bytes(dense, shape)
        reduced = all_reduce_bytes(gradients, axes.data)
        worker_traffic = {"all_reduce": reduced, "pull": requested, "push": pushed}
    server_weights = rows + total_bytes(share)
    answered += axes.data * total_bytes(share)
    worker_sends_more = sum(worker_traffic.values()) >= answered
    worker = Cost(
        parameters=weights,
        gradients=gradients,
        optimizer=worker_state,
        activations=work.activation_bytes(shape),
        traffic=worker_traffic if worker_sends_more else {"pull": answered},
        traffic_is_bound=not work.distinct,
    )
    server = replace(
        worker,
        parameters=server_weights,
        gradients=0,
        optimizer=server_state,
        activations=0,
        on_accelerator=worker,
    )
    return server if server.state > worker.state else worker


def row_ranges(rows: int, servers: int) -> list[tuple[int, int]]:
    """Return [start, end) of each server's rows: even ranges, the first ones one row longer if the
    rows do not divide evenly."""
    size, rest = divmod(rows, servers)
    starts = [server * size + min(server, rest) for server in range(servers + 1)]
    return list(pairwise(starts))


def assign_servers(sizes: Sequence[int], servers: int) -> list[int]:
    """Return the server of each tensor: the largest tensor first, each to the server with the least
    so far (LPT; Graham 1969)."""
    loads, owners = [0] * servers, [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda place: (-sizes[place], place)):
        owners[number] = loads.index(min(loads))
        loads[owners[number]] += sizes[number]
    return owners


def distinct_ids(
    batches: Sequence[Sequence[np.ndarray]], tables: Sequence[int], servers: int
) -> tuple[tuple[float, ...], ...]:
    """Return for each table the mean number of distinct ids of a micro-batch, by the server that
    has their rows.

    Args:
        batches: micro-batches, each with one array of ids per table.
        tables: number of rows of each table.
    """
    counts = np.zeros((len(tables), servers))
    for batch in batches:
        for place, (ids, rows) in enumerate(zip(batch, tables, strict=True)):
            ends = np.searchsorted(np.unique(ids), [end for _, end in row_ranges(rows, servers)])
            counts[place] += np.diff(ends, prepend=0)
    return tuple(tuple(row) for row in (counts / max(1, len(batches))).tolist())


def count_distinct(
    config: Config, dataset: Any, micro_batches: Iterable[np.ndarray]
) -> tuple[tuple[float, ...], ...]:
    """Return :func:`distinct_ids` of some micro-batches of a run; empty if the data have no ids.

    Args:
        micro_batches: keys of the samples of each, int [samples, 2]: epoch and index.
    """
    count_ids = getattr(dataset, "distinct_ids", None)
    if count_ids is None:
        return ()
    counts = [count_ids(batch[:, 1]) for batch in micro_batches if len(batch)]
    return distinct_ids(counts, dataset.tables, config.parameter_server.num_servers)


def _server_bytes(tables: list[TensorShape], config: Config) -> tuple[int, int]:
    """Return bytes of (rows, their optimizer state) on the server with the most."""
    per_element, per_row = STATE[config.parameter_server.optimizer]
    weights = state = 0
    for table in tables:
        rows, dim = math.ceil(table.shape[0] / config.parameter_server.num_servers), table.shape[1]
        weights += 4 * rows * dim
        state += 4 * rows * (dim * per_element + per_row)
    return weights, state


def _row_traffic(
    tables: list[TensorShape], workers: int, servers: int, work: Workload
) -> tuple[int, int, int]:
    """Return the bytes per step that a worker sends to request rows and to push gradients, and that
    a server answers: 8 per id, 4 per element.

    They follow from the distinct ids of a micro-batch if they were counted in the data
    (``work.distinct``). Otherwise they are an upper bound: one id per column and row of the batch,
    all distinct, and equally many on each server.
    """
    counts = work.distinct or tuple(
        (min(work.positions, table.shape[0]) / servers,) * servers for table in tables
    )
    dims = [table.shape[1] for table in tables]
    rows = [work.micro_batches * sum(by_server) for by_server in counts]
    answers = [
        sum(4 * dim * by_server[server] for by_server, dim in zip(counts, dims, strict=True))
        for server in range(servers)
    ]
    return (
        round(8 * sum(rows)),
        round(sum((8 + 4 * dim) * count for count, dim in zip(rows, dims, strict=True))),
        round(workers * work.micro_batches * max(answers)),
    )


def _largest_share(dense: list[TensorShape], num_servers: int) -> list[TensorShape]:
    """Return the tensors of the server with the most bytes of them."""
    shares: list[list[TensorShape]] = [[] for _ in range(num_servers)]
    owners = assign_servers([tensor.numel for tensor in dense], num_servers)
    for tensor, server in zip(dense, owners, strict=True):
        shares[server].append(tensor)
    return max(shares, key=total_bytes)


def _state_bytes(tensors: list[TensorShape], shape: ModelShape) -> int:
    return sum(shape.optimizer.moment_bytes(tensor.name, tensor.numel) for tensor in tensors)
