"""The schedules of Paceline's collectives: which rank sends which elements when. Imports no torch.

A schedule is a list of :class:`Step`. The messages of a step are sent at the same time and contain
the values from before the step. :mod:`.run` runs schedules, and the page of
``paceline explain`` shows them.

Sources: ring, Patarasuk & Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations" (2009), section 3; halving-doubling and the binomial tree, Thakur, Rabenseifner &
Gropp, "Optimization of collective communication operations in MPICH" (2005), sections 4.1 and 4.5.
"""

from dataclasses import dataclass, replace

from paceline.core.errors import unknown_name

#: The algorithms of each collective.
ALGORITHMS = {
    "all-reduce": ("ring", "tree", "halving", "naive"),
    "broadcast": ("ring", "tree", "naive"),
}


@dataclass(frozen=True)
class Send:
    """A message: elements ``start`` to ``stop`` of the flattened tensor, from ``source`` to
    ``target`` (ranks of the group).

    Args:
        chunk: number of the first chunk in the message.
        add: whether the target adds the values to its own instead of replacing them.
    """

    source: int
    target: int
    chunk: int
    start: int
    stop: int
    add: bool

    @property
    def count(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Step:
    """Messages that are sent at the same time. ``step`` is numbered from 0 within its ``phase``."""

    phase: str
    step: int
    sends: tuple[Send, ...]


@dataclass(frozen=True)
class Sent:
    """The amount that one rank sends in a collective."""

    bytes: int
    messages: int


def check_algorithm(algorithm: str, collective: str = "all-reduce") -> None:
    """Raise ConfigError if ``algorithm`` is unknown for a collective."""
    known = ALGORITHMS[collective]
    if algorithm not in known:
        raise unknown_name(f"{collective} algorithm", algorithm, known, allowed=", ".join(known))


def sent(
    algorithm: str, world_size: int, numel: int, element_size: int, collective: str = "all-reduce"
) -> list[Sent]:
    """Return the amount that each rank sends in all of the :func:`steps`. ``element_size`` is in
    bytes."""
    ranks: list[list[Send]] = [[] for _ in range(world_size)]
    for step in steps(algorithm, world_size, numel, collective):
        for send in step.sends:
            ranks[send.source].append(send)
    return [Sent(sum(send.count for send in sends) * element_size, len(sends)) for sends in ranks]


def steps(
    algorithm: str, world_size: int, numel: int, collective: str = "all-reduce", root: int = 0
) -> list[Step]:
    """Return the steps of a collective over ``numel`` elements, without empty messages.

    Args:
        root: rank whose values are broadcast.

    Raises:
        ConfigError: if the algorithm is unknown.
    """
    check_algorithm(algorithm, collective)
    if world_size == 1 or numel == 0:
        return []
    make = _ALL_REDUCE[algorithm] if collective == "all-reduce" else _BROADCAST[algorithm]
    rounds = [
        Step(phase, number, tuple(_rotated(send, root, world_size) for send in sends if send.count))
        for phase, number, sends in make(world_size, numel)
    ]
    return [step for step in rounds if step.sends]


def bounds(chunk: int, num_chunks: int, numel: int) -> tuple[int, int]:
    """Return the half-open range of a chunk's elements. Chunk sizes differ by at most one."""
    return numel * chunk // num_chunks, numel * (chunk + 1) // num_chunks


_Rounds = list[tuple[str, int, list[Send]]]


def _ring(size: int, numel: int) -> _Rounds:
    def send(rank: int, chunk: int, add: bool) -> Send:
        return Send(rank, (rank + 1) % size, chunk, *bounds(chunk, size, numel), add)

    rounds: _Rounds = []
    for step in range(size - 1):
        sends = [send(rank, (rank - step) % size, True) for rank in range(size)]
        rounds.append(("scatter-reduce", step, sends))
    for step in range(size - 1):
        sends = [send(rank, (rank + 1 - step) % size, False) for rank in range(size)]
        rounds.append(("all-gather", step, sends))
    return rounds


def _naive(size: int, numel: int) -> _Rounds:
    return [
        ("gather", 0, [Send(rank, 0, 0, 0, numel, True) for rank in range(1, size)]),
        *_naive_broadcast(size, numel),
    ]


def _tree(size: int, numel: int) -> _Rounds:
    up = [
        [Send(rank + span, rank, 0, 0, numel, True) for rank in range(0, size - span, 2 * span)]
        for span in _powers(size)
    ]
    return [
        *(("reduce", step, sends) for step, sends in enumerate(up)),
        *_tree_broadcast(size, numel),
    ]


def _halving(size: int, numel: int) -> _Rounds:
    core = 1 << (size.bit_length() - 1)  # the largest power of two that is at most `size`
    extra = range(core, size)
    rounds: _Rounds = [("fold", 0, [Send(rank, rank - core, 0, 0, numel, True) for rank in extra])]

    def part(source: int, target: int, holder: int, span: int, add: bool) -> Send:
        begin = holder // span * span
        start, stop = bounds(begin, core, numel)[0], bounds(begin + span - 1, core, numel)[1]
        return Send(source, target, begin, start, stop, add)

    spans = _powers(core)
    for step, span in enumerate(reversed(spans)):
        sends = [part(rank, rank ^ span, rank ^ span, span, True) for rank in range(core)]
        rounds.append(("halving", step, sends))
    for step, span in enumerate(spans):
        rounds.append(
            ("doubling", step, [part(rank, rank ^ span, rank, span, False) for rank in range(core)])
        )
    rounds.append(("unfold", 0, [Send(rank - core, rank, 0, 0, numel, False) for rank in extra]))
    return rounds


def _ring_broadcast(size: int, numel: int) -> _Rounds:
    rounds: _Rounds = []
    for step in range(2 * size - 2):  # chunk c leaves rank r at step r + c
        sends = [
            Send(rank, rank + 1, step - rank, *bounds(step - rank, size, numel), False)
            for rank in range(size - 1)
            if 0 <= step - rank < size
        ]
        rounds.append(("pipeline", step, sends))
    return rounds


def _naive_broadcast(size: int, numel: int) -> _Rounds:
    return [("broadcast", 0, [Send(0, rank, 0, 0, numel, False) for rank in range(1, size)])]


def _tree_broadcast(size: int, numel: int) -> _Rounds:
    rounds: _Rounds = []
    for step, span in enumerate(reversed(_powers(size))):
        sends = [
            Send(rank, rank + span, 0, 0, numel, False) for rank in range(0, size - span, 2 * span)
        ]
        rounds.append(("broadcast", step, sends))
    return rounds


_ALL_REDUCE = {"ring": _ring, "tree": _tree, "halving": _halving, "naive": _naive}
_BROADCAST = {"ring": _ring_broadcast, "tree": _tree_broadcast, "naive": _naive_broadcast}


def _rotated(send: Send, root: int, size: int) -> Send:
    """Return the message with ranks rotated so that ``root`` takes the place of rank 0."""
    return replace(send, source=(send.source + root) % size, target=(send.target + root) % size)


def _powers(size: int) -> list[int]:
    """Return 1, 2, 4 … below ``size``."""
    return [1 << power for power in range(size.bit_length()) if 1 << power < size]
