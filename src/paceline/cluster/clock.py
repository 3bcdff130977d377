"""Measure the clock skew between hosts through the rendezvous store, before the rendezvous.

torch elastic compares the heartbeat times of other hosts with the local wall clock, and removes a
host whose last heartbeat seems too old. If clocks differ by more than a few seconds, it removes
healthy hosts.

The endpoint host runs a :class:`ClockServer`; every other host calls :func:`check_clock`. Messages
are JSON in queues of the store (TCPStore and HashStore have queues, FileStore does not).
"""

from __future__ import annotations

import atexit
import json
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from pydantic import JsonValue

from paceline.core.errors import ConfigError, RunError
from paceline.core.formatting import finite
from paceline.core.processes import host_name

if TYPE_CHECKING:
    from torch.distributed import Store

#: Below keep_alive_interval × keep_alive_max_attempt, so that elastic does not mistake skew for a
#: lost host.
MAX_SKEW_S = 5.0
_NUM_ROUND_TRIPS = 5
_REQUESTS = "paceline/clock/requests"
_ANSWERS = "paceline/clock/answers/"
#: The server waits for a request or for its own stop message. (A queue read that times out makes
#: torch log warnings.)
_FOREVER = timedelta(days=365)

Clock = Callable[[], float]


@dataclass(frozen=True)
class ClockSkew:
    """The measured difference of two clocks.

    Args:
        host: name of the host that measured the skew.
        endpoint_host: name of the host that answered.
        skew_s: seconds by which the clock of ``host`` is ahead of the clock of ``endpoint_host``.
        round_trip_s: shortest round trip in seconds. The error of the skew is at most half of it.
    """

    host: str
    endpoint_host: str
    skew_s: float
    round_trip_s: float


class ClockServer:
    """A thread on the endpoint host that answers requests for its wall time.

    Args:
        store: the rendezvous store; the thread uses a clone of it.
        limit_s: as for :func:`check_clock`; the hosts are also compared with each other.
        clock: replaces the system's wall clock in tests.
    """

    def __init__(
        self, store: Store, *, limit_s: float = MAX_SKEW_S, clock: Clock = time.time
    ) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._stop_token = uuid.uuid4().hex
        self._accepted: dict[str, ClockSkew] = {}
        self._control = store.clone()  # type: ignore[attr-defined]
        self._store = store.clone()  # type: ignore[attr-defined]
        self._store.set_timeout(_FOREVER)
        self._thread = threading.Thread(target=self._serve, name="clock server", daemon=True)
        self._thread.start()
        # A daemon thread inside a C++ call can abort the process when the interpreter ends.
        atexit.register(self.close)

    def close(self) -> None:
        """Stop the thread. Closing twice is allowed."""
        atexit.unregister(self.close)
        if self._thread.is_alive():
            with suppress(RuntimeError):  # the store was closed, so the thread ends by itself
                self._control.queue_push(_REQUESTS, json.dumps({"stop": self._stop_token}))
                self._thread.join(timeout=5.0)

    def _serve(self) -> None:
        while True:
            try:
                request = _parse(self._store.queue_pop(_REQUESTS))
                received_at = self._clock()
                if request.get("stop") == self._stop_token:
                    return
                identifier = request.get("id")
                if isinstance(identifier, str):
                    answer = {"host": host_name(), "time": received_at, **self._compare(request)}
                    self._store.queue_push(_ANSWERS + identifier, json.dumps(answer))
            except RuntimeError:  # torch's DistError: the store is closed
                return

    def _compare(self, request: dict[str, JsonValue]) -> dict[str, JsonValue]:
        """Accept the measured skew of a host, or return an accepted host that conflicts with it."""
        host, skew_s = request.get("host"), finite(request.get("skew_s"))
        round_trip_s = finite(request.get("round_trip_s"))
        if not isinstance(host, str) or skew_s is None or round_trip_s is None:
            return {}
        for other in self._accepted.values():
            if other.host != host and _exceeds(
                skew_s - other.skew_s, round_trip_s + other.round_trip_s, self._limit_s
            ):
                return {"conflict": {"host": other.host, "skew_s": other.skew_s}}
        self._accepted[host] = ClockSkew(host, host_name(), skew_s, round_trip_s)
        return {}


def check_clock(
    store: Store, limit_s: float = MAX_SKEW_S, *, timeout_s: float = 60.0, clock: Clock = time.time
) -> ClockSkew:
    """Compare the clock of this host with the clocks of the endpoint host and of the hosts that
    were checked before.

    Args:
        store: a client of the rendezvous store; a clone of it is used.
        timeout_s: how long to wait for each answer.
        clock: replaces the system's wall clock in tests.

    Raises:
        ConfigError: if two clocks differ by more than ``limit_s``.
        RunError: if no :class:`ClockServer` answered within ``timeout_s``.
        torch.distributed.DistNetworkError: if the connection to the store was lost.
    """
    client = store.clone()  # type: ignore[attr-defined]
    client.set_timeout(timedelta(seconds=timeout_s))
    skew = min(
        (_round_trip(client, clock, timeout_s) for _ in range(_NUM_ROUND_TRIPS)),
        key=lambda trip: trip.round_trip_s,
    )
    if _exceeds(skew.skew_s, skew.round_trip_s, limit_s):
        raise _too_far(skew.host, skew.endpoint_host, skew.skew_s, limit_s, endpoint=True)
    report: dict[str, JsonValue] = {
        "host": skew.host,
        "skew_s": skew.skew_s,
        "round_trip_s": skew.round_trip_s,
    }
    conflict = _ask(client, report, timeout_s).get("conflict")
    if isinstance(conflict, dict):
        difference_s = skew.skew_s - (finite(conflict.get("skew_s")) or 0.0)
        raise _too_far(skew.host, str(conflict.get("host")), difference_s, limit_s)
    return skew


def _round_trip(store: Store, clock: Clock, timeout_s: float) -> ClockSkew:
    """Measure the skew once: as in NTP (RFC 5905, section 8), the other clock is compared with the
    midpoint between request and answer."""
    sent_at, start = clock(), time.monotonic()
    answer = _ask(store, {}, timeout_s)
    round_trip_s = time.monotonic() - start
    endpoint_time = finite(answer.get("time"))
    if endpoint_time is None:
        raise RunError(
            "the rendezvous store contains an answer that is not from Paceline's clock server",
            code="unexpected-rendezvous-answer",
        )
    return ClockSkew(
        host_name(),
        str(answer.get("host")),
        sent_at + round_trip_s / 2 - endpoint_time,
        round_trip_s,
    )


def _ask(store: Store, request: dict[str, JsonValue], timeout_s: float) -> dict[str, JsonValue]:
    from torch.distributed import DistStoreError

    identifier = uuid.uuid4().hex
    store.queue_push(_REQUESTS, json.dumps({"id": identifier, **request}))
    try:
        return _parse(store.queue_pop(_ANSWERS + identifier))
    except DistStoreError as error:  # the timeout; a lost connection is a DistNetworkError
        raise RunError(
            "the rendezvous store accepted a connection, but no clock server answered within"
            " {timeout_s} s",
            code="no-clock-server",
            fix="check that the host at `parallel.rdzv_endpoint` runs the same version of"
            " Paceline, and that no other program uses that port",
            timeout_s=f"{timeout_s:g}",
        ) from error


def _parse(message: bytes) -> dict[str, JsonValue]:
    try:
        parsed = json.loads(message)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _exceeds(skew_s: float, round_trip_s: float, limit_s: float) -> bool:
    """Return whether the clocks differ by more than the limit, even if the measurement has the
    largest possible error."""
    return abs(skew_s) - round_trip_s / 2 > limit_s


def _too_far(
    host: str, other: str, skew_s: float, limit_s: float, *, endpoint: bool = False
) -> ConfigError:
    direction = "ahead of" if skew_s > 0 else "behind"
    whose = "the rendezvous endpoint's host" if endpoint else "host"
    return ConfigError(
        "the clock of host {host} is {skew_s} s {direction} the clock of {whose} {other}",
        code="clock-skew",
        allowed="at most {limit_s} s, because the hosts detect a lost host by comparing heartbeat"
        " times",
        fix="synchronize the clocks of all hosts with NTP (chrony or systemd-timesyncd); `chronyc"
        " makestep` corrects a clock at once",
        host=host,
        skew_s=f"{abs(skew_s):.1f}",
        direction=direction,
        whose=whose,
        other=other,
        limit_s=f"{limit_s:g}",
    )
