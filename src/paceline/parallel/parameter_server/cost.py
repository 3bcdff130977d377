"""What a parameter server costs: bytes on the fullest process, and bytes that the busiest one sends
in a step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from paceline.config.schema import Config
from paceline.distributed.collectives.schedules import all_reduce_bytes
from paceline.distributed.mesh import ParallelDims
from paceline.models.shape.record import TensorShape
from paceline.parallel.cost import Cost, ModelShape, Workload, total_bytes


def tables_of(shape: ModelShape) -> tuple[list[TensorShape], list[TensorShape]]:
    """(the tables, the other trained parameters). By name: a shape says no more."""
    tables = [
        parameter
        for parameter in shape.trained
        if len(parameter.shape) == 2 and parameter.name.startswith("tables.")
    ]
    return tables, [parameter for parameter in shape.trained if parameter not in tables]


def deal(sizes: Sequence[int], servers: int) -> list[int]:
    """Which server gets each of these, by size: the largest first, each to the one with the least
    so far (LPT; Graham 1969)."""
    loads, owners = [0] * servers, [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda place: (-sizes[place], place)):
        owners[number] = loads.index(min(loads))
        loads[owners[number]] += sizes[number]
    return owners


def server_bytes(tables: list[TensorShape], config: Config) -> tuple[int, int]:
    """Bytes of (rows, their optimizer's state) on the fullest server."""
    elements, numbers = STATE[config.parameter_server.optimizer]
    most = [
        (math.ceil(table.shape[0] / config.parameter_server.num_servers), table.shape[1])
        for table in tables
    ]
    return sum(4 * count * dim for count, dim in most), sum(
        4 * count * (dim * elements + numbers) for count, dim in most
    )


@dataclass(frozen=True)
class RowTraffic:
    """Bytes in a step for the rows: 8 an id, 4 an element.

    Args:
        asked, pushed: that a worker sends.
        answered: that a server sends.
    """

    asked: int
    pushed: int
    answered: int


def row_traffic(
    tables: list[TensorShape], workers: int, servers: int, work: Workload
) -> RowTraffic:
    """From the distinct ids of a micro-batch where they were counted in the data
    (``work.distinct``). Else at most so much, with one id a column and row of the batch, none of
    them twice, and as many on each server."""
    counts = work.distinct or tuple(
        (min(work.positions, table.shape[0]) / servers,) * servers for table in tables
    )
    dims = [table.shape[1] for table in tables]
    rows = [work.micro_batches * sum(each) for each in counts]
    each_server = [
        sum(4 * dim * each[server] for each, dim in zip(counts, dims, strict=True))
        for server in range(len(counts[0]))
    ]
    return RowTraffic(
        asked=round(sum(8 * count for count in rows)),
        pushed=round(sum((8 + 4 * dim) * count for count, dim in zip(rows, dims, strict=True))),
        answered=round(workers * work.micro_batches * max(each_server)),
    )


def distinct_ids(
    batches: Sequence[Sequence[np.ndarray]], tables: Sequence[int], servers: int
) -> tuple[tuple[float, ...], ...]:
    """For each table how many distinct ids a micro-batch has, by the server that has their rows:
    means over ``batches``, each of which has one array of ids for each table of so many rows."""
    result = np.zeros((len(tables), servers))
    for batch in batches:
        for place, (ids, rows) in enumerate(zip(batch, tables, strict=True)):
            ends = np.searchsorted(np.unique(ids), [end for _, end in row_ranges(rows, servers)])
            result[place] += np.diff(ends, prepend=0)
    return tuple(tuple(row) for row in (result / max(1, len(batches))).tolist())


#: name → tensors of state an element of a row, and numbers of state a row; beside the step counts
#: of Adam and Adagrad.
STATE = {"sgd": (0, 0), "adagrad": (1, 0), "row_wise_adagrad": (0, 1), "adam": (2, 0)}


def row_ranges(rows: int, servers: int) -> list[tuple[int, int]]:
    """[start, end) of each server's rows: even parts, the first ones a row longer where they do not
    divide."""
    each, more = divmod(rows, servers)
    starts = [number * each + min(number, more) for number in range(servers + 1)]
    return list(pairwise(starts))


def estimate(shape: ModelShape, axes: ParallelDims, work: Workload, config: Config) -> Cost:
    """What the fuller of a worker and a server holds.

    A worker has the parameters without tables and their gradients; a server has its rows and their
    state. With dense parameters on servers, a server also has its share of them and of their state,
    and sends it to every worker. Traffic is an upper bound, a batch without a repeated id, unless
    the distinct ids of a micro-batch were counted in the data.
    """
    num_servers = config.parameter_server.num_servers
    tables, dense = tables_of(shape)
    gradients = total_bytes(dense)
    weights = shape.parameter_bytes - total_bytes(tables) + shape.buffer_bytes
    rows, server_state = server_bytes(tables, config)
    sent = row_traffic(tables, axes.data, num_servers, work)
    if config.parameter_server.dense_on_servers:
        share = _largest_share(dense, num_servers)
        worker_state = 0
        server_state += _state_bytes(share, shape)
        worker_traffic = {"pull": sent.asked, "push": sent.pushed + gradients}
    else:
        share = []
        worker_state = _state_bytes(dense, shape)
        reduced = all_reduce_bytes(gradients, axes.data)
        worker_traffic = {"all_reduce": reduced, "pull": sent.asked, "push": sent.pushed}
    held = rows + total_bytes(share)
    answered = sent.answered + axes.data * total_bytes(share)
    is_server_fuller = held + server_state > weights + gradients + worker_state
    return Cost(
        parameters=held if is_server_fuller else weights,
        gradients=0 if is_server_fuller else gradients,
        optimizer=server_state if is_server_fuller else worker_state,
        activations=0 if is_server_fuller else work.activation_bytes,
        traffic=worker_traffic if sum(worker_traffic.values()) >= answered else {"pull": answered},
        traffic_is_bound=not work.distinct,
    )


def _largest_share(dense: list[TensorShape], num_servers: int) -> list[TensorShape]:
    """What the server with the most bytes of them has."""
    shares: list[list[TensorShape]] = [[] for _ in range(num_servers)]
    for tensor, server in zip(
        dense, deal([each.numel for each in dense], num_servers), strict=True
    ):
        shares[server].append(tensor)
    return max(shares, key=total_bytes)


def _state_bytes(tensors: list[TensorShape], shape: ModelShape) -> int:
    return sum(tensor.numel for tensor in tensors) * shape.optimizer_bytes_per_element
