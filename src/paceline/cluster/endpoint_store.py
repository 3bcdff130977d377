"""The store at the rendezvous endpoint: this host finds it, or serves it."""

import logging
import time
from datetime import timedelta
from typing import Any

from paceline.cluster.clock import ClockServer, check_clock
from paceline.cluster.endpoint import Endpoint, is_listening, resolve_endpoint
from paceline.cluster.exposure import public_address_warning, public_listener_warning
from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.core.log import CONSOLE_ONLY
from paceline.core.processes import host_name

logger = logging.getLogger(__name__)

_LOG_EVERY_S = 15.0
_STORE_WITHIN_S = 20.0


class EndpointStore:
    """The store at which the hosts meet.

    Attributes:
        is_host: whether this process serves it; None until that is known.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.is_host: bool | None = None
        self._announced: str | None = None
        self._store: Any = None
        self._clock: Any = None

    def close(self) -> None:
        if self._clock is not None:
            self._clock.close()

    def find(self, left_s: float, limit_s: float) -> Endpoint | None:
        """The endpoint once it answers, or once this host serves it; None where that takes too
        long. Its name is resolved anew each time: it may not be known yet, and it may get another
        address."""
        deadline, logged_at, problem = time.monotonic() + left_s, time.monotonic(), ""
        while True:
            try:
                endpoint = resolve_endpoint(self.config)
                is_host = self._opens_store(endpoint)
                self._announce(endpoint, is_host)
                if is_host or is_listening(endpoint.address, endpoint.port, timeout_s=2.0):
                    self.is_host = is_host
                    return endpoint
                problem = "does not answer"
            except OSError as error:
                problem = f"cannot be resolved or reached ({error.strerror or error})"
            now = time.monotonic()
            if now > deadline:
                return None
            if now - logged_at > _LOG_EVERY_S:
                logged_at = now
                waited_s = limit_s - (deadline - now)
                logger.info(
                    "the endpoint %s %s; waiting for it (%.0f of %.0f s)",
                    self.config.parallel.rdzv_endpoint,
                    problem,
                    waited_s,
                    limit_s,
                    extra=CONSOLE_ONLY,
                )
            time.sleep(0.3)

    def _opens_store(self, endpoint: Endpoint) -> bool:
        """Whether this process serves the rendezvous store; opens it the first time. Of two
        processes on one host the first one serves, or the one with `node_rank: 0`. That this host
        does not serve may change while the name of a host that came back still has the address that
        the host had before."""
        from torch.distributed import DistError, TCPStore

        if self.is_host is not None:
            return self.is_host
        node_rank = self.config.parallel.node_rank
        if not endpoint.is_local or node_rank not in ("auto", 0):
            return False
        if is_listening(endpoint.address, endpoint.port, timeout_s=1.0):
            if node_rank == 0:
                raise _in_use(endpoint)
            return False
        try:
            # Shared with elastic's own, which is opened at the same port in this process.
            self._store = TCPStore(
                endpoint.address, endpoint.port, is_master=True, wait_for_workers=False,
                multi_tenant=True, timeout=timedelta(seconds=60),
            )  # fmt: skip
        except (DistError, OSError, RuntimeError) as error:
            raise _in_use(endpoint) from error
        return True

    def _announce(self, endpoint: Endpoint, is_host: bool) -> None:
        """Log once which part this host has."""
        where = f"{endpoint.local_address} on {endpoint.interface}"
        role = (
            f"{'endpoint' if is_host else 'host'} {host_name()}: {where}; the rendezvous is at"
            f" {endpoint}"
        )
        if role == self._announced:
            return
        self._announced = role
        logger.info(role, extra=CONSOLE_ONLY)
        warnings = [public_address_warning(endpoint.address)]
        if is_host:
            warnings.append(public_listener_warning(endpoint.port))
        for warning in warnings:
            if warning is not None:
                logger.warning(warning, extra=CONSOLE_ONLY)

    def check_clock(self, endpoint: Endpoint) -> None:
        """Raise ConfigError where this host's clock differs from another's: elastic compares
        heartbeats with wall clocks."""
        from torch.distributed import TCPStore

        if self.is_host:
            self._clock = self._clock or ClockServer(self._store)
            return
        store = TCPStore(
            endpoint.address,
            endpoint.port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=_STORE_WITHIN_S),
        )
        check_clock(store, timeout_s=_STORE_WITHIN_S)


def _in_use(endpoint: Endpoint) -> ConfigError:
    return ConfigError(
        f"port {endpoint.port} of {endpoint.address} is in use: another run, or another program,"
        " listens there",
        fix=(
            "set another port, the same on every host:"
            f" `parallel.rdzv_endpoint={endpoint.name}:{endpoint.port + 1}`"
        ),
    )
