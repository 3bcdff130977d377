"""Links that lose packets, and ranks that stood still for a while: both slow all ranks down and end
none of them. No thread."""

from collections import deque
from dataclasses import dataclass

#: A share is taken over at least so many seconds
WINDOW_S = 10.0
#: and so many segments.
_LEAST_SENT = 200
#: A link that sends this share again is named; TCP slows down markedly from about there on.
_LOSSY = 0.005
#: A link is sound again from here on.
_SOUND = 0.001


@dataclass(frozen=True)
class LossyLink:
    """What one rank had to send again, over the last ``seconds``. ``is_sound``: the link was named
    before and has recovered."""

    rank: int
    share: float
    sent: int
    seconds: float
    is_sound: bool

    def text(self, host: str) -> str:
        """Return one line for the terminal."""
        who = f"rank {self.rank} on {host}"
        if self.is_sound:
            return (
                f"the network connection of {who} is sound again: {100 * self.share:.2g} % of its"
                " packets were sent twice"
            )
        return (
            f"{who} had to send {100 * self.share:.2g} % of its packets again in the last"
            f" {self.seconds:.0f} s: its network connection loses packets, which slows down every"
            " rank. `paceline doctor` measures the links between the hosts"
        )


class LinkJudge:
    """Names ranks whose connections lose packets, each once until it has recovered."""

    def __init__(self) -> None:
        self._totals: dict[int, deque[tuple[float, int, int]]] = {}
        self._named: set[int] = set()

    def add(self, rank: int, now_s: float, sent: int, resent: int) -> LossyLink | None:
        """``sent``, ``resent``: segments since the rank started."""
        totals = self._totals.setdefault(rank, deque())
        if totals and sent < totals[-1][1]:
            totals.clear()  # another process
        totals.append((now_s, sent, resent))
        while len(totals) > 1 and now_s - totals[1][0] >= WINDOW_S:
            totals.popleft()
        since_s, sent_before, resent_before = totals[0]
        seconds, sent, resent = now_s - since_s, sent - sent_before, resent - resent_before
        if seconds < WINDOW_S or sent < _LEAST_SENT:
            return None
        share = resent / sent
        is_named = rank in self._named
        if not is_named and share >= _LOSSY:
            self._named.add(rank)
        elif is_named and share <= _SOUND:
            self._named.discard(rank)
        else:
            return None
        return LossyLink(rank, share, sent, seconds, is_sound=is_named)


@dataclass(frozen=True)
class Pause:
    """A process that did not run for a while in the middle of a step."""

    step: int
    seconds: float

    def text(self, rank: int, host: str) -> str:
        """Return one line for the terminal."""
        return (
            f"rank {rank} on {host} did not run for {self.seconds:.0f} s at step {self.step:,}: its"
            " process or its whole host was paused, or one of its threads kept the others from"
            " running; the other ranks waited for it"
        )
