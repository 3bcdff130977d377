"""What a parameter server costs: bytes on the fullest process, and bytes that the busiest one sends
in a step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from paceline.config.schema import Config
from paceline.distributed.collectives.schedules import all_reduce_bytes
from paceline.distributed.mesh import ParallelDims
from paceline.models.shape.record import TensorShape
from paceline.parallel.cost import Cost, ModelShape, Workload, total_bytes


def tables_of(shape: ModelShape) -> tuple[list[TensorShape], list[TensorShape]]:
    """(the tables, the other trained parameters). By name: a shape says no more."""
    tables = [
        one for one in shape.trained if len(one.shape) == 2 and one.name.startswith("tables.")
    ]
    return tables, [one for one in shape.trained if one not in tables]


def deal(sizes: Sequence[int], servers: int) -> list[int]:
    """Which server gets each of these, by size: the largest first, each to the one with the least
    so far (LPT; Graham 1969)."""
    loads, owners = [0] * servers, [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda one: (-sizes[one], one)):
        owners[number] = loads.index(min(loads))
        loads[owners[number]] += sizes[number]
    return owners


def cost_of_ddp(shape: ModelShape, axes: ParallelDims, work: Workload, config: Config) -> Cost:
    """A worker has the parameters without tables, as under ``ddp``; a server its rows and their
    state; the fuller of both."""
    tables, dense = tables_of(shape)
    others = shape.parameter_bytes - total_bytes(tables) + shape.buffer_bytes
    gradients = total_bytes(dense)
    state = sum(one.numel for one in dense) * shape.optimizer_bytes_per_element
    rows, row_state = server_bytes(tables, config)
    sent = row_traffic(tables, axes.data, config.parameter_server.servers, work)
    worker = {
        "all_reduce": all_reduce_bytes(gradients, axes.data),
        "pull": sent.asked,
        "push": sent.pushed,
    }
    traffic = worker if sum(worker.values()) >= sent.answered else {"pull": sent.answered}
    more: dict[str, Any] = {"traffic": traffic, "traffic_is_bound": not work.distinct}
    if rows + row_state > others + gradients + state:
        return Cost(parameters=rows, gradients=0, optimizer=row_state, activations=0, **more)
    return Cost(
        parameters=others,
        gradients=gradients,
        optimizer=state,
        activations=work.activation_bytes,
        **more,
    )


def cost_of_servers(shape: ModelShape, axes: ParallelDims, work: Workload, config: Config) -> Cost:
    """A worker has the parameters without tables and their gradients; a server its rows, its share
    of the others, and the state of both; the fuller of the two. A worker sends its gradients, the
    servers every worker's copy of the parameters."""
    servers = config.parameter_server.servers
    tables, dense = tables_of(shape)
    rows, state = server_bytes(tables, config)
    owners = deal([one.numel for one in dense], servers)
    shares = [
        [one for one, owner in zip(dense, owners, strict=True) if owner == number]
        for number in range(servers)
    ]
    most = max(shares, key=total_bytes)
    state += sum(one.numel for one in most) * shape.optimizer_bytes_per_element
    found = row_traffic(tables, axes.data, servers, work)
    worker = {"pull": found.asked, "push": found.pushed + total_bytes(dense)}
    server = {"pull": found.answered + axes.data * total_bytes(most)}
    sent = worker if sum(worker.values()) >= server["pull"] else server
    others = shape.parameter_bytes - total_bytes(tables) + shape.buffer_bytes
    more: dict[str, Any] = {"traffic": sent, "traffic_is_bound": not work.distinct}
    if rows + total_bytes(most) + state > others + total_bytes(dense):
        return Cost(
            parameters=rows + total_bytes(most), gradients=0, optimizer=state, activations=0, **more
        )
    gradients = total_bytes(dense)
    return Cost(
        parameters=others,
        gradients=gradients,
        optimizer=0,
        activations=work.activation_bytes,
        **more,
    )


def server_bytes(tables: list[TensorShape], config: Config) -> tuple[int, int]:
    """Bytes of (rows, their optimizer's state) on the fullest server."""
    elements, numbers = STATE[config.parameter_server.optimizer]
    most = [
        (math.ceil(one.shape[0] / config.parameter_server.servers), one.shape[1]) for one in tables
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
        (min(work.positions, one.shape[0]) / servers,) * servers for one in tables
    )
    dims = [one.shape[1] for one in tables]
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
    found = np.zeros((len(tables), servers))
    for batch in batches:
        for place, (ids, rows) in enumerate(zip(batch, tables, strict=True)):
            ends = np.searchsorted(np.unique(ids), [end for _, end in row_ranges(rows, servers)])
            found[place] += np.diff(ends, prepend=0)
    return tuple(tuple(one) for one in (found / max(1, len(batches))).tolist())


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
    """What the fuller of a worker and a server holds. Traffic is an upper bound, a batch without a
    repeated id, unless the distinct ids of a micro-batch were counted in the data."""
    settings = config.parameter_server
    by_servers = settings.mode != "sync" or settings.dense_on_servers
    return (cost_of_servers if by_servers else cost_of_ddp)(shape, axes, work, config)
