"""`paceline explain hybrid`: the device mesh of several axes, and the process groups that
communicate along each of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.errors import ConfigError
from paceline.core.formatting import counted
from paceline.distributed.call_log import CountedCall
from paceline.distributed.mesh import ParallelDims
from paceline.explain.calls import collectives_of, messages_of
from paceline.explain.catalog import ExplainOptions
from paceline.explain.record import Cell, Check, DrawnRow, Frame, Recording, Tone, check_traffic
from paceline.explain.topics.collective import holders
from paceline.launch.rank_pool import run_on_ranks

if TYPE_CHECKING:
    from paceline.distributed.communicator import Communicator

PRELOAD = ("paceline.distributed.communicator",)
_ELEMENTS = 256
_ABOUT = (
    "Several kinds of parallelism are combined on one mesh: each rank has a coordinate on each"
    " axis. Ranks that differ only in one coordinate form a process group, and the collectives of"
    " that kind of parallelism run within it. Ranks next to each other on the tensor axis"
    " communicate most and should share a host; pipeline stages communicate least. Rank r starts"
    " with 2^r, so each value shows whose values it sums."
)
_PURPOSES = {
    "tensor": "the ranks of a tensor group split each layer and sum its activations",
    "shard": "the ranks of a shard group each store a part of the training state",
    "data": "the replicas of a data group sum their gradients",
}


@dataclass(frozen=True)
class RankMesh:
    """The recording of one rank.

    Args:
        coordinates: coordinate on each axis.
        values: value after the collective of each axis, by axis; ``start`` before all of them.
        groups: global ranks of its group on each axis.
        calls: counted calls of each axis.
    """

    coordinates: dict[str, int]
    values: dict[str, int]
    groups: dict[str, list[int]]
    calls: dict[str, list[CountedCall]]
    counted_bytes: int


def record(options: ExplainOptions) -> Recording:
    """All-reduce along each axis of a mesh of real ranks; with a pipeline axis, also send along it.

    The figures: ``ranks, axes`` (size of each axis), ``coordinates`` (of each rank) and ``groups``
    (axis → groups of ranks).

    Raises:
        ConfigError: the number of ranks is not divisible by 4.
    """
    ranks = options.ranks
    if ranks % 4:
        raise ConfigError(
            f"`--ranks {ranks}` does not form a mesh",
            allowed="4, 8, 12 or 16",
            fix="use `--ranks 4`, which is data 2 × tensor 2",
        )
    pipeline = 2 if ranks % 8 == 0 else 1
    axes = ParallelDims(data=ranks // (2 * pipeline), tensor=2, pipeline=pipeline)
    results: list[RankMesh] = run_on_ranks(_record_rank, ranks, axes)
    names = list(results[0].calls)
    frames = _frames(results, names)
    groups = {name: sorted({tuple(rank.groups[name]) for rank in results}) for name in names}
    return Recording(
        topic="hybrid",
        title=f"Device mesh of {counted(ranks, 'rank')}: {axes.text()}",
        about=_ABOUT,
        actors=tuple(f"rank {rank}" for rank in range(ranks)),
        frames=frames,
        checks=(
            check_traffic(frames, [rank.counted_bytes for rank in results]),
            Check.equal(
                "each value sums the ranks of its groups",
                [rank.values[names[-1]] for rank in results],
                [_expected(axes, rank) for rank in range(ranks)],
            ),
            Check.equal(
                "ranks of a group differ only on its axis",
                True,
                all(_differ_only_on(name, axes, group) for name in names for group in groups[name]),
            ),
        ),
        facts=tuple(
            (f"{name} groups", " ".join(f"{{{', '.join(map(str, group))}}}" for group in members))
            for name, members in groups.items()
        ),
        figures={
            "ranks": ranks,
            "axes": {"data": axes.data, "tensor": axes.tensor, "pipeline": axes.pipeline},
            "coordinates": [rank.coordinates for rank in results],
            "groups": groups,
        },
        columns=2,
    )


def _expected(axes: ParallelDims, rank: int) -> int:
    """Return the sum over the ranks of its tensor and data groups; on later pipeline stages, also
    the sum of the stages before."""
    place = axes.coordinates(rank)
    return sum(
        2**other
        for other in range(axes.size)
        if axes.coordinates(other)["pipeline"] <= place["pipeline"]
    )


def _differ_only_on(name: str, axes: ParallelDims, group: tuple[int, ...]) -> bool:
    places = [axes.coordinates(rank) for rank in group]
    return all(place[axis] == places[0][axis] for place in places for axis in place if axis != name)


def _frames(results: list[RankMesh], names: list[str]) -> tuple[Frame, ...]:
    frames = [
        Frame(
            "Each rank has a coordinate on each axis. The last axis, tensor, varies fastest.",
            _rows(results, "start", ""),
            is_key=True,
        )
    ]
    for name in names:
        calls = [rank.calls[name] for rank in results]
        if name == "pipeline":
            text = "Axis pipeline: the first stage sends to the second, which adds the values."
        else:
            text = f"Axis {name}: {_PURPOSES[name]}. Here, each group all-reduces its values."
        frames.append(
            Frame(
                text,
                _rows(results, name, "new"),
                phase=name,
                messages=messages_of(calls, "values"),
                collectives=collectives_of(calls, "values"),
                is_key=True,
            )
        )
    return tuple(frames)


def _rows(results: list[RankMesh], after: str, tone: Tone) -> tuple[tuple[DrawnRow, ...], ...]:
    size = len(results)
    rows = []
    for result in results:
        names = [axis for axis in ("pipeline", "data", "tensor") if axis in result.groups]
        value = result.values[after]
        owners = tuple(rank for rank in range(size) if value >> rank & 1)
        rows.append(
            (
                DrawnRow(
                    "place",
                    tuple(Cell(f"{name} {result.coordinates[name]}") for name in names),
                ),
                DrawnRow("sum of", (Cell(holders(value, size), ranks=owners, tone=tone),)),
            )
        )
    return tuple(rows)


def _record_rank(world: Communicator, axes: ParallelDims) -> RankMesh:
    import torch
    import torch.distributed as dist

    from paceline.distributed.communicator import Communicator
    from paceline.distributed.traffic import log_calls

    mesh = Communicator(world.env, world.device, axes, world.group, world.ranks, world.waits)
    names = [name for name in ("tensor", "data") if getattr(axes, name) > 1]
    values = torch.full((_ELEMENTS,), 2.0**world.rank)
    recorded, groups, calls = {"start": int(values[0])}, {}, {}
    before = world.traffic.total
    for name in names:
        group = mesh.subgroup(name)
        groups[name] = group.ranks
        with log_calls() as calls[name]:
            group.wait(group.all_reduce(values))
        recorded[name] = int(values[0])
    if axes.pipeline > 1:
        group = mesh.subgroup("pipeline")
        groups["pipeline"] = group.ranks
        received = torch.zeros(_ELEMENTS)
        with log_calls() as calls["pipeline"]:
            if group.rank == 0:
                operation = dist.P2POp(dist.isend, values, group.ranks[1], group.group)
            else:
                operation = dist.P2POp(dist.irecv, received, group.ranks[0], group.group)
            for work in dist.batch_isend_irecv([operation]):
                group.wait(work)
        recorded["pipeline"] = int((values + received)[0])
    return RankMesh(mesh.coordinates, recorded, groups, calls, world.traffic.total - before)
