"""`paceline explain hybrid`: the device mesh of several axes, and the process groups that
communicate along each of them."""

from collections.abc import Iterator

import torch
import torch.distributed as dist

from paceline.distributed.call_log import CountedCall
from paceline.distributed.communicator import Communicator
from paceline.distributed.mesh import ParallelDims
from paceline.distributed.traffic import log_calls
from paceline.explain.rank_topic import RankFrame, RankTopic
from paceline.explain.record import Cell, Check, DrawnRow, Tone
from paceline.explain.topics.collective import holders, ranks_of
from paceline.messages.pages import PageText

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


class MeshTopic(RankTopic):
    """All-reduce along each axis of a mesh of real ranks; with a pipeline axis, also send along it.

    The figures: ``ranks, axes`` (size of each axis), ``coordinates`` (of each rank) and ``groups``
    (axis → groups of ranks).

    Attributes:
        values: value of this rank after the collective of each axis, by axis; ``start`` before all
            of them.
        members: global ranks of this rank's group on each axis; ``groups``: all groups.
    """

    about = _ABOUT
    columns = 2

    def run(self) -> None:
        world, ranks = self.world, self.options.ranks
        pipeline = 2 if ranks % 8 == 0 else 1
        self.axes = ParallelDims(data=ranks // (2 * pipeline), tensor=2, pipeline=pipeline)
        mesh = Communicator(
            world.env, world.device, self.axes, world.group, world.ranks, world.waits
        )
        tensor = torch.full((_ELEMENTS,), 2.0**world.rank)
        self.values = {"start": int(tensor[0])}
        self.members: dict[str, tuple[int, ...]] = {}
        self.calls: dict[str, list[CountedCall]] = {}
        for name in ("tensor", "data", "pipeline"):
            if getattr(self.axes, name) == 1:
                continue
            group = mesh.subgroup(name)
            self.members[name] = tuple(group.ranks)
            with self.count_traffic(), log_calls() as self.calls[name]:
                if name == "pipeline":
                    _send_on(group, tensor)
                else:
                    group.wait(group.all_reduce(tensor))
            self.values[name] = int(tensor[0])
        self.groups = {
            name: sorted(set(self.gather(members))) for name, members in self.members.items()
        }
        self.title = PageText(
            "Device mesh of {ranks:rank}: {axes}", ranks=ranks, axes=self.axes.text()
        )

    def rank_frames(self) -> Iterator[RankFrame]:
        yield RankFrame(
            "Each rank has a coordinate on each axis. The last axis, tensor, varies fastest.",
            self._rows("start", ""),
            is_key=True,
        )
        for name, calls in self.calls.items():
            if name == "pipeline":
                text = "Axis pipeline: the first stage sends to the second, which adds the values."
            else:
                text = PageText(
                    "Axis {name}: {purpose}. Here, each group all-reduces its values.",
                    name=name,
                    purpose=_PURPOSES[name],
                )
            yield RankFrame(text, self._rows(name, "new"), calls, "values", name, is_key=True)

    def _rows(self, after: str, tone: Tone) -> tuple[DrawnRow, ...]:
        places = self.axes.coordinates(self.world.rank)
        shown = [axis for axis in ("pipeline", "data", "tensor") if axis in self.members]
        value, size = self.values[after], self.world.size
        return (
            DrawnRow("place", tuple(Cell(f"{axis} {places[axis]}") for axis in shown)),
            DrawnRow("sum of", (Cell(holders(value, size), ranks_of(value, size), tone=tone),)),
        )

    def checks(self) -> list[Check]:
        *_, last = self.values.values()
        return [
            Check.equal(
                "each value sums the ranks of its groups",
                self.gather(last),
                [_expected(self.axes, rank) for rank in range(self.world.size)],
            ),
            Check.equal(
                "ranks of a group differ only on its axis",
                True,
                all(
                    _differ_only_on(name, self.axes, group)
                    for name, groups in self.groups.items()
                    for group in groups
                ),
            ),
        ]

    def facts(self) -> dict[str, str]:
        return {
            PageText("{name} groups", name=name): " ".join(
                f"{{{', '.join(map(str, group))}}}" for group in groups
            )
            for name, groups in self.groups.items()
        }

    def add_figures(self) -> None:
        axes = self.axes
        self.figures.update(
            axes={"data": axes.data, "tensor": axes.tensor, "pipeline": axes.pipeline},
            coordinates=[axes.coordinates(rank) for rank in range(self.world.size)],
            groups=self.groups,
        )


def _send_on(group: Communicator, tensor: torch.Tensor) -> None:
    """Send the tensor from the first stage to the second, which adds it."""
    received = torch.zeros(_ELEMENTS)
    if group.rank == 0:
        operation = dist.P2POp(dist.isend, tensor, group.ranks[1], group.group)
    else:
        operation = dist.P2POp(dist.irecv, received, group.ranks[0], group.group)
    for work in dist.batch_isend_irecv([operation]):
        group.wait(work)
    tensor += received


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
