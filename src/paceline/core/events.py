"""The event log: rank 0 appends one JSON line for each thing that happens; everything else only
reads it.

Types and their fields (every line also has ``time``, seconds since the epoch, and ``type``):

- ``run_start``: ``config`` (resolved), ``derived`` (see
  :class:`paceline.config.derive.ResolvedValues`), ``world_size``, ``device``, ``precision``,
  ``strategy``, ``model`` {name, parameters, trainable_parameters}, ``data`` {read, kept, truncated,
  dropped, and excluded_turns where the loss is switched off for turns}, ``versions``; ``mesh``
  {axes: {name: size}, ranks: [{rank, host, device, coordinates: {axis: n}}]} (no coordinates and a
  ``role`` where a rank only serves others); ``predicted`` {memory_bytes: {parameters, gradients,
  optimizer, activations, total}, traffic_bytes_per_step, traffic_bytes: {collective: bytes},
  traffic_is_bound}, as the strategy declares it: memory of the fullest rank, traffic of the
  busiest. ``total`` is the sum of what is known.
- ``resume``: ``step``, ``path``. Steps logged after that step by an earlier attempt no
  longer count.
- ``fault``: ``step`` (the last one logged), ``ranks``, ``hosts``, ``reason``, ``restart`` (how
  often since the newest checkpoint), ``seen_at``: an attempt ended, and this one goes on
  from the checkpoint that ``resume`` names.
- ``skipped``: ``step``, ``updates``, ``ranks``, ``hosts``, ``cause`` (loss | gradient | overflow,
  null where not known): a gradient was not finite, on these ranks, and its update was not made.
  Where ranks train on their own: so many updates by each of these at most, since the last ``step``
  line.
- ``drift``: ``step``, ``ranks``, ``hosts``, ``parameter`` (the first that differs), ``tensors`` (so
  many differ): replicas that should hold the same bits do not.
- ``rewind``: ``step`` (at which the loss jumped), ``to_step``, ``loss``, ``median``: the run goes
  back, and the batch of that step is left out. A ``resume`` follows where a checkpoint was loaded.
- ``worker_lost``: ``step``, ``rank``, ``pid``, ``reason``, ``samples_unseen``: a rank ended, and
  the others went on.
- ``hang``: ``rank`` (null: the ranks wait for one another), ``host``, ``phase``, ``step``,
  ``since_s``, ``why``, ``stack`` (lines, innermost first), ``mismatch`` (where the ranks have
  issued different collectives), ``text``: a rank holds up the others. ``hang_end``: ``rank``,
  ``since_s``, ``text``: it goes on again. Where rank 0 itself hangs, the others print it alone.
- ``straggler``: ``rank``, ``host``, ``step``, ``slower_by_s`` (a step, than the median of the
  others), ``share`` {data_s, compute_s, communication_s}, ``steps`` (that were looked at),
  ``text``; ``straggler_end``: ``rank``, ``host``, ``step``, ``text``: it is even with the others
  again. A rank whose process was paused in a step is reported by the first of these alone, with
  ``steps`` 1.
- ``link``: ``rank``, ``host``, ``step``, ``resent_share`` (0 to 1), ``segments``, ``seconds``,
  ``text``: this rank had to send that share of the last TCP segments to other hosts again.
  ``link_end``: the same fields: the link has recovered.
- ``balance``: ``step``, ``shares`` (micro-batches per step, by rank), ``reason``, ``text``: the
  shares of the ranks with ``parallel.balance``. ``reason``: ``weights`` (configured),
  ``checkpoint`` (stored in it), ``measured`` (with ``seconds`` per micro-batch, by rank, and the
  predicted ``gain``; equal shares may be kept), ``withdrawn`` (new shares made steps longer, and
  the previous ones are restored), ``reset`` (those of the checkpoint are not used).
- ``notice``: ``level`` (info | warning), ``text``.
- ``step``: ``step, epoch, loss, grad_norm, learning_rate, tokens, step_time_s, data_wait_s,
  comm_wait_s, memory_bytes, ranks`` (null where not known). ``tokens`` is the number of tokens of
  the global batch, ``step_time_s`` the mean over the steps since the last such line. Each of
  ``ranks`` has ``rank, data_wait_s, comm_wait_s, memory_bytes`` and the parts that its step is made
  of, means likewise: ``data_s, forward_s, backward_s, optimizer_s``, out of each of which the waits
  for other ranks are taken, that no computing hid: these are ``communication_s``; ``other_s`` is
  the rest. With ``recovery.watchdog: false`` only the waits of Paceline's own collectives are seen,
  and those of FSDP and pipelines stay in the phase. Where micro-batches run in threads (``dp``),
  time is of the phase that any of them entered last. On an accelerator all of these are times of
  the host, which hands work to the device and goes on: a phase is what it took to queue its
  kernels, ``communication_s`` what the host waited, and ``other_s`` mostly the device's work that
  was waited for at the line. ``traffic`` {collective: bytes}: sent in a step by the rank that sends
  most, a mean over the same steps; where traffic has a period (``local_sgd``, ``diloco``) over the
  last whole one, null before there was one; collectives are counted as an algorithm optimal in
  bandwidth sends them. ``devices`` [{rank, utilisation (0 to 1), temperature_c, power_w}] where
  NVML tells of them, read every few seconds.
- ``memory``, once, after the second step of an attempt: ``step``, ``ranks`` [{parameters,
  gradients, optimizer, activations, total}] in rank order: bytes measured at the fullest moment of
  a step, each storage once, of what is cut over ranks the local part. ``activations``: the device's
  peak in that step less the others, work space among them; null on a CPU.
- ``eval``: ``step``, ``loss``, ``count``, ``wall_s``, ``metrics``.
- ``sample``, at each evaluation of a language task: ``step``, ``samples`` [{prompt, text,
  reference}], ``wall_s``: what the model answers by greedy decoding, the same held-out prompts each
  time.
- ``checkpoint``: ``step``, ``path``, ``size_bytes``, ``wall_s``, ``blocked_s`` (how long training
  stood still for it; it is written in the background); or with ``error`` where it could not be
  written. ``url``: its place in ``checkpoint_dir``.
- ``run_end``: ``status`` (done | stopped | failed), ``step``, ``reason``, ``wall_s`` (since the
  command was given); ``network`` where there is something to say of the time that communication
  took.
"""

import errno
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

Event = dict[str, Any]


class EventLog:
    """Appends events to a file and hands each to the listeners (the console). A listener must not
    raise. Threads may emit.

    A write that fails (full disk) never stops the training: it is counted in ``lost`` and said once
    by the listeners.
    """

    def __init__(
        self, path: Path | None, listeners: list[Callable[[Event], None]] | None = None
    ) -> None:
        self.listeners = listeners or []
        self.lost = 0
        self.path: Path | None = None
        self._cut = False
        self._lock = threading.RLock()
        self._handle: IO[bytes] | None = None
        if path is not None:
            self.open(path, self.listeners)

    def open(self, path: Path, listeners: list[Callable[[Event], None]]) -> None:
        """Begin to write; also where another process wrote before."""
        self.path, self.listeners = path, listeners
        _end_cut_line(path)
        self._handle = open(path, "ab", buffering=0)  # noqa: SIM115  (kept open until the end of the run)

    def emit(self, type: str, file_only: bool = False, **fields: Any) -> Event:
        """Append one event. ``file_only``: the listeners do not get it, because a person has seen
        it already."""
        event: Event = {"time": time.time(), "type": type, **fields}
        with self._lock:
            self._tell(event, file_only)
        return event

    def _tell(self, event: Event, file_only: bool) -> None:
        for listener in [] if file_only else self.listeners:
            listener(event)
        if self._handle is not None:
            try:
                self._append(json.dumps(_finite(event), ensure_ascii=False).encode() + b"\n")
            except OSError as error:
                self.lost += 1
                if self.lost == 1:
                    text = (
                        f"{self.path} cannot be written ({error.strerror}); training goes on,"
                        " events are lost."
                    )
                    for listener in self.listeners:
                        listener(
                            {
                                "time": time.time(),
                                "type": "notice",
                                "level": "warning",
                                "text": text,
                            }
                        )

    def _append(self, line: bytes) -> None:
        # A disk that fills takes a part of a line; the next one that fits must not be glued to it.
        assert self._handle is not None
        whole = b"\n" + line if self._cut else line
        written = self._handle.write(whole)
        self._cut = (written or 0) < len(whole) and (self._cut or bool(written))
        if (written or 0) < len(whole):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def notice(self, text: str, level: str = "info", file_only: bool = False) -> None:
        self.emit("notice", file_only=file_only, level=level, text=text)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.close()
            self._handle = None


def _end_cut_line(path: Path) -> None:
    # A run killed in the middle of a write leaves half a line; the next line must not be glued to
    # it.
    if not path.exists() or path.stat().st_size == 0:
        return
    with open(path, "rb+") as handle:
        handle.seek(-1, os.SEEK_END)
        if handle.read(1) != b"\n":
            handle.write(b"\n")


def _finite(value: Any) -> Any:
    """JSON has no NaN or infinity: they become the strings "nan", "inf", "-inf"."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def read_events(path: Path) -> list[Event]:
    """All whole lines of an event log, in order. A line cut off by a crash is passed over."""
    if not path.exists():
        return []
    with open(path, "rb") as handle:
        return [event for line in handle if (event := parse_event(line)) is not None]


def tail_events(path: Path, size_bytes: int = 1 << 18) -> list[Event]:
    """The last whole lines of an event log, of so many bytes."""
    if not path.exists():
        return []
    with open(path, "rb") as handle:
        handle.seek(0, os.SEEK_END)
        start = max(0, handle.tell() - size_bytes)
        handle.seek(start)
        lines = handle.read().split(b"\n")[1 if start else 0 :]
    return [event for line in lines if (event := parse_event(line)) is not None]


def follow_events(
    path: Path, poll_s: float = 0.3, stop: Callable[[], bool] | None = None
) -> Iterator[Event]:
    """Yield the events that are there, then each new one, until ``stop()`` is true."""
    while not path.exists():
        if stop is not None and stop():
            return
        time.sleep(poll_s)
    rest = b""
    with open(path, "rb") as handle:
        while True:
            chunk = handle.read()
            if chunk:
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    event = parse_event(line)
                    if event is not None:
                        yield event
                continue
            if stop is not None and stop():
                return
            time.sleep(poll_s)


def parse_event(line: bytes) -> Event | None:
    """The event of a line; None where it is cut off, or no event."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and "type" in event else None


def effective_steps(events: list[Event]) -> list[Event]:
    """The ``step`` events that count, as :func:`effective_events`."""
    return effective_events(events, "step")


def effective_events(events: Sequence[Event], type: str) -> list[Event]:
    """The events of a type that count: where a run went back to a checkpoint, those of the
    later attempt replace the earlier ones."""
    counted: list[Event] = []
    for event in events:
        if event["type"] == "resume":
            counted = [earlier for earlier in counted if earlier["step"] <= event["step"]]
        elif event["type"] == "run_start" and not event.get("resumed_from_step"):
            counted = []
        elif event["type"] == type:
            counted.append(event)
    return counted
