"""The hosts that take part in a life of a run: their order, their ranks, and whose account of a fault counts."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Member:
    number: int
    info: dict[str, Any]
    beat: int = 0
    heard_at: float = field(default_factory=time.monotonic)

    @property
    def name(self) -> str:
        return f"{self.info['host']} ({self.info['address']})"


@dataclass
class Round:
    """A life of the run: the same hosts from its start to its end."""

    number: int
    members: list[Member]
    state: str = "planning"  # after sharing; then running, closing
    reason: dict[str, Any] | None = None  # the outcome for which it is closed
    regroup: bool = False
    store: Any = None  # at which its ranks meet
    apart: list[Member] = field(default_factory=list)  # who do not see the run's folder

    def ranks_of(self, member: Member) -> list[int]:
        first = 0
        for one in self.members:
            if one is member:
                return list(range(first, first + one.info["devices"]))
            first += one.info["devices"]
        return []


def in_order(members: list[Member]) -> list[Member]:
    """By node rank where given; the others fill what is free, in the order of their coming."""
    given = {one.info["node_rank"]: one for one in members if one.info["node_rank"] is not None}
    rest = [one for one in members if one.info["node_rank"] is None]
    found: list[Member] = []
    number = 0
    while len(found) < len(members):
        if number in given:
            found.append(given.pop(number))
        elif rest:
            found.append(rest.pop(0))
        else:  # a node is missing: the next ones move up
            found.append(given.pop(min(given)))
        number += 1
    return found


def first_of(failed: list[dict[str, Any]]) -> dict[str, Any]:
    """Of several accounts of one fault, that of the rank that was gone first, before those that only noticed."""
    return min(failed, key=lambda one: (not one.get("of_all"), not one.get("gone"), one.get("time", 0.0)))


def span(ranks: list[int]) -> str:
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}" if ranks else "none"
