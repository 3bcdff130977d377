"""From a schedule to what one rank does: a flat list of operations in which messages go in pieces
and overlap. No torch here.

The order of operations follows the schedule's steps, piece by piece. A piece is sent as soon as the
pieces that it is made of have come; receives are opened ahead, many at a time, so that data flows
while the rank adds up what came before. No rank ever waits for a message that stands later in the
schedule than what it still has to send, so no set of ranks can lock up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from paceline.distributed.collectives.schedules import Send, Step

#: operations: open receive n; wait for it and put its values in place; start send n; wait until
#: send n has left its buffer
RECEIVE, TAKE, SEND, SENT = range(4)


@dataclass(frozen=True)
class Piece:
    """A part of a message: elements ``start`` to ``stop``, to or from ``peer``."""

    peer: int
    start: int
    stop: int
    add: bool

    def overlaps(self, other: Piece) -> bool:
        return self.start < other.stop and other.start < self.stop


@dataclass(frozen=True)
class Program:
    """What a rank does, in order, and the pieces that the numbers in it stand for."""

    operations: tuple[tuple[int, int], ...]
    sends: tuple[Piece, ...]
    receives: tuple[Piece, ...]

    @cached_property
    def adds(self) -> int:
        """How many pieces are added: each needs room to arrive in."""
        return sum(piece.add for piece in self.receives)

    @cached_property
    def longest(self) -> int:
        """Elements of the longest piece that is added."""
        return max((piece.stop - piece.start for piece in self.receives if piece.add), default=0)


def compile_program(todo: Sequence[Step], rank: int, piece_numel: int, window: int) -> Program:
    """The operations of ``rank``.

    Args:
        piece_numel: most elements in a piece.
        window: receives that are open at a time.
    """
    sends: list[tuple[int, Piece]] = []
    receives: list[tuple[int, Piece]] = []
    for number, step in enumerate(todo):
        for one in step.sends:
            if one.source == rank:
                sends += [(number, piece) for piece in _pieces(one, one.target, piece_numel)]
            if one.target == rank:
                receives += [(number, piece) for piece in _pieces(one, one.source, piece_numel)]
    return _Compiler(sends, receives, window).run()


def _pieces(send: Send, peer: int, piece_numel: int) -> list[Piece]:
    many = -(-send.count // piece_numel)
    cuts = [send.start + send.count * number // many for number in range(many + 1)]
    return [Piece(peer, cuts[number], cuts[number + 1], send.add) for number in range(many)]


class _Compiler:
    def __init__(
        self, sends: list[tuple[int, Piece]], receives: list[tuple[int, Piece]], window: int
    ) -> None:
        self.sends, self.receives, self.window = sends, receives, window
        self.operations: list[tuple[int, int]] = []
        self.sent = 0  # sends started
        self.open: dict[int, Piece] = {}  # those not yet waited for
        self.opened = 0  # receives opened
        self.taken = 0  # receives done

    def run(self) -> Program:
        self._open_ahead()
        for number, (step, piece) in enumerate(self.sends):
            # What this piece is made of came in steps before: take all up to the last that has a
            # part in it.
            while self._needs_take(step, piece):
                self._take()
            self.operations.append((SEND, number))
            self.open[number] = piece
            self.sent = number + 1
        while self.taken < len(self.receives):
            self._take()
        for number in list(self.open):
            self.operations.append((SENT, number))
        return Program(
            tuple(self.operations),
            tuple(one for _, one in self.sends),
            tuple(one for _, one in self.receives),
        )

    def _needs_take(self, step: int, piece: Piece) -> bool:
        for at, other in self.receives[self.taken :]:
            if at >= step:
                return False
            if other.overlaps(piece):
                return True
        return False

    def _take(self) -> None:
        self._open_ahead()
        number = self.taken
        if self.opened == number:
            self._open()
        # a piece must not change while it is being sent
        self._wait_for_sends(self.receives[number][1])
        self.operations.append((TAKE, number))
        self.taken += 1

    def _open_ahead(self) -> None:
        # Many at once, when few are left: each one opened disturbs the sender.
        if self.opened - self.taken > self.window // 4:
            return
        while self.opened < min(self.taken + self.window, len(self.receives)):
            step, piece = self.receives[self.opened]
            if not piece.add and self._is_read_before(step, piece):
                return
            self._open()

    def _open(self) -> None:
        piece = self.receives[self.opened][1]
        if not piece.add:  # it arrives in place
            self._wait_for_sends(piece)
        self.operations.append((RECEIVE, self.opened))
        self.opened += 1

    def _is_read_before(self, step: int, piece: Piece) -> bool:
        """True where this rank has yet to send, or to add to, the elements in which the piece would
        arrive."""
        if any(other.overlaps(piece) for _, other in self.receives[self.taken : self.opened]):
            return True
        coming = (other for at, other in self.sends[self.sent :] if at <= step)
        return any(other.overlaps(piece) for other in coming)

    def _wait_for_sends(self, piece: Piece) -> None:
        for number in [number for number, other in self.open.items() if other.overlaps(piece)]:
            self.operations.append((SENT, number))
            del self.open[number]
