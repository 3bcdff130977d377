"""Elastic's c10d rendezvous with separate time limits for the first round and for hosts that rejoin
later."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)

from paceline.cluster.failures import AgentFolder

#: The ``rdzv_backend``. It requires ``join_timeout``, ``rejoin_timeout``, ``last_call_timeout``,
#: ``keep_alive_interval``, ``keep_alive_max_attempt`` and ``agent_folder`` in ``rdzv_configs``.
BACKEND = "paceline-c10d"


class TwoLimits(RendezvousTimeout):
    """Elastic's timeouts, with ``rejoin`` in place of ``join`` once ``has_run()`` is true."""

    def __init__(
        self, join: timedelta, rejoin: timedelta, last_call: timedelta, has_run: Callable[[], bool]
    ) -> None:
        super().__init__(join=join, last_call=last_call)
        self._rejoin, self._has_run = rejoin, has_run

    @property
    def join(self) -> timedelta:
        """How long this host currently waits for the other hosts."""
        return self._rejoin if self._has_run() else self._join


class _Handler(DynamicRendezvousHandler):
    def get_backend(self) -> str:
        """Return the name under which the handler is registered, as the registry requires."""
        return BACKEND


def has_run(folder: AgentFolder) -> bool:
    """Return whether ranks of this host have taken part in a round."""
    return "node_rank" in folder.read_state()


def register() -> None:
    """Register :data:`BACKEND` with elastic."""
    rendezvous_handler_registry.register(BACKEND, _create_handler)


def _create_handler(params: RendezvousParameters) -> RendezvousHandler:
    backend, store = create_backend(params)
    folder = AgentFolder(Path(params.get("agent_folder")))
    join, rejoin, last_call = (
        timedelta(seconds=float(params.get(name)))
        for name in ("join_timeout", "rejoin_timeout", "last_call_timeout")
    )
    return _Handler.from_backend(  # type: ignore[no-any-return]
        params.run_id,
        store,
        backend,
        params.min_nodes,
        params.max_nodes,
        params.local_addr,
        TwoLimits(join, rejoin, last_call, lambda: has_run(folder)),
        keep_alive_interval=int(params.get("keep_alive_interval")),
        keep_alive_max_attempt=int(params.get("keep_alive_max_attempt")),
    )
