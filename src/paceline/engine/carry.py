"""Checkpoints between hosts that share no folder. The run lies with the head of the hosts, in whose launcher a depot listens
(:mod:`paceline.launch.depot`); ranks elsewhere send what they own there, straight from memory.

A connection begins with a request: JSON in a frame (4 bytes of length, big-endian), with the run's token. The path of what is
asked for never stands in it: the depot makes it out of numbers. What a file holds follows as it is, of the length that was said
before, and its SHA-256 is compared at the other end. No torch here, but where there is a session.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.core.files import human_bytes
from paceline.engine.checkpoint_format import index_to_json, state_file
from paceline.engine.state_file import StateFile
from paceline.world.host import host_name

if TYPE_CHECKING:
    from paceline.engine.train import Session
    from paceline.parallel.parts import Part

#: A connection on which nothing moves for so long is given up. A disk may be slow; a link that is cut is noticed elsewhere.
SILENCE_S = 300.0
_CONNECT_S = 10.0
_MOST_REQUEST, MOST_FRAME = 1 << 16, 1 << 28
#: A part that arrived damaged is sent once more.
TRIES = 2
#: A save that takes longer than this on the link between the hosts is worth a warning.
_LONG_S = 60.0

Tick = Callable[[], None]


@dataclass(frozen=True)
class Carry:
    """Where the depot of a run listens, in one life of it.

    Args:
        sends: the ranks of this host do not see the run's folder and send what they own.
        link_bytes_s: what goes from here to the depot in a second; None where that is not known.
    """

    address: str
    port: int
    token: str
    sends: bool = False
    link_bytes_s: float | None = None


class Lost(Exception):
    """The other end was silent for too long, or closed the connection."""


# -- frames -----------------------------------------------------------------------------------------------------------------
def send_frame(link: socket.socket, value: Any) -> None:
    raw = json.dumps(value).encode()
    link.sendall(len(raw).to_bytes(4, "big") + raw)


def read_frame(link: socket.socket, most: int = _MOST_REQUEST) -> Any:
    """Raises Lost, or ValueError where it is too long or no JSON."""
    size = bytearray(4)
    read_into(link, memoryview(size))
    length = int.from_bytes(size, "big")
    if length > most:
        raise ValueError(f"a frame of {length:,} bytes")
    raw = bytearray(length)
    read_into(link, memoryview(raw))
    return json.loads(raw)


def read_into(link: socket.socket, memory: memoryview) -> None:
    """Fill ``memory``. Raises Lost."""
    while len(memory):
        memory = memory[read_some(link, memory) :]


def read_some(link: socket.socket, memory: memoryview) -> int:
    try:
        count = link.recv_into(memory)
    except TimeoutError as error:
        raise Lost(f"nothing came for {link.gettimeout():.0f} s") from error
    except OSError as error:
        raise Lost(error.strerror or str(error)) from error
    if not count:
        raise Lost("the connection was closed")
    return count


# -- the end that asks --------------------------------------------------------------------------------------------------------
def ask(carry: Carry, patience_s: float = 60.0, **request: Any) -> socket.socket:
    """A connection to the depot, tried for ``patience_s``, with a request on its way. Raises Lost."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            link = socket.create_connection((carry.address, carry.port), timeout=_CONNECT_S)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise Lost(f"{carry.address}:{carry.port} does not answer ({error.strerror or error})") from error
            time.sleep(0.5)
    link.settimeout(SILENCE_S)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        send_frame(link, {**request, "token": carry.token, "host": host_name()})
    except OSError as error:
        link.close()
        raise Lost(error.strerror or str(error)) from error
    return link


def send_part(
    carry: Carry, step: int, leader_pid: int, rank: int, num_ranks: int, parts: Sequence[Part], tick: Tick = lambda: None
) -> None:
    """Let the depot write what this rank owns, as :func:`~paceline.engine.checkpoint_write.write_part` does. Raises nothing:
    rank 0 hears from the depot what became of it."""
    about = {"do": "part", "step": step, "leader_pid": leader_pid, "rank": rank, "num_ranks": num_ranks}
    for number in range(1, TRIES + 1):
        try:
            answer = _send(carry, {**about, "last": number == TRIES}, parts, tick)
        except (OSError, Lost, ValueError) as error:
            where = f"{carry.address}:{carry.port}"
            text = f"the part of rank {rank} of the checkpoint of step {step} did not reach the head ({where}): {error}"
            print(f"warning: {text}", file=sys.stderr, flush=True)
            return
        if not answer.get("again"):
            return


def _send(carry: Carry, about: dict[str, Any], parts: Sequence[Part], tick: Tick) -> dict[str, Any]:
    try:
        file = StateFile(state_file(about["rank"], about["num_ranks"]), parts)
    except TypeError as error:
        with ask(carry, **about, problem=str(error)) as link:
            return dict(read_frame(link))
    with ask(carry, **about, size_bytes=file.size_bytes) as link:
        answer = dict(read_frame(link))
        if "go" not in answer:  # it says why by the mark of this rank
            return answer
        try:
            sha256 = file.write(_Out(link, tick))
            send_frame(link, {"sha256": sha256, "tensors": index_to_json(file.index)})
        except (BrokenPipeError, ConnectionResetError):  # it says why, as with a full disk
            pass
        return dict(read_frame(link))


class _Out:
    def __init__(self, link: socket.socket, tick: Tick) -> None:
        self.link, self.tick = link, tick

    def write(self, data: memoryview, /) -> int:
        self.link.sendall(data)
        self.tick()
        return len(data)


# -- what it will cost ------------------------------------------------------------------------------------------------------
def travels(session: Session, carry: Carry | None) -> list[tuple[str, str]]:
    """What of each save goes to the head, where hosts share no folder: (level, text) for a person. A collective."""
    if carry is None:
        return []
    from paceline.world.traffic import uncounted

    strategy, moments = session.strategy, session.shape.optimizer_bytes_per_element
    size_bytes = 0
    for part in strategy.parts():
        item = part.tensor.element_size()
        if part.owned or strategy.trains_apart:
            size_bytes += part.tensor.numel() * (item + (moments if part.key is not None else 0))
        elif session.config.compression.chain and part.key is not None:
            size_bytes += part.tensor.numel() * item  # what of the gradient it has not sent yet
    with uncounted():
        sent: list[Any] = session.world.gather_objects((size_bytes, carry.link_bytes_s) if carry.sends else None)
    return [travel_text(sent, session.config.parallel.timeout_s)]


def travel_text(sent: Sequence[tuple[int, float | None] | None], timeout_s: float) -> tuple[str, str]:
    """(level, text) of what travels to the head at each save.

    Args:
        sent: for each rank None where it sees the run's folder; else the bytes it will send, and its host's link.
        timeout_s: a save that the ranks wait for must end by then.
    """
    away = [one for one in sent if one is not None]
    size_bytes = sum(one for one, _ in away)
    if not size_bytes:
        return "info", "the hosts share no folder: checkpoints lie with the head alone, whose ranks own all that goes into them"
    rates = [rate for _, rate in away if rate]
    text = f"the hosts share no folder: at each save about {human_bytes(size_bytes)} travel to the head"
    if not rates:
        return "info", text
    wall_s = size_bytes / min(rates)
    text += f", which takes about {wall_s:.1f} s at {human_bytes(min(rates))}/s"
    if wall_s < _LONG_S:
        return "info", text
    text += (
        ". To save seldom: a larger `save_steps`; to send less: shards within a host (`parallel.shard` as many as its devices, "
        "`parallel.data` as many as hosts), or `mode: ddp`; to send nothing: an `output_dir` that all hosts share"
    )
    if 2 * wall_s > timeout_s:
        text += f". The last save must end within `parallel.timeout_s` ({timeout_s:.0f} s): set it to {4 * wall_s:.0f}"
    return "warning", text
