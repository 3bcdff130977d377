"""Assign ranks in a round that an elastic agent starts, and let them exchange values before they
train.

torch elastic numbers the hosts by (address, process ID) at every rendezvous, so rank 0 may move to
another host after a restart. That would change the order in which gradients are summed and the host
that writes the run's folder. Paceline therefore assigns the ranks itself: the endpoint host first,
then the others in the order of the previous round.
"""

import contextlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

from paceline.core.errors import RunError, first_line
from paceline.distributed.environment import RankEnv, from_environment

_POLL_S = 0.02
_STORE_TIMEOUT_S = 120.0
_LEAVE_WITHIN_S = 5.0


@dataclass(frozen=True)
class HostEntry:
    """A host in a round.

    Args:
        host: name of the host.
        group_rank: number that elastic assigned to the host.
        num_ranks: number of ranks on the host.
        is_endpoint: whether the host is the rendezvous endpoint, or None if unknown.
        node_rank: `parallel.node_rank`, or None for `auto`.
        previous: number of the host in the previous round, or None.
    """

    host: str
    group_rank: int
    num_ranks: int
    is_endpoint: bool | None = None
    node_rank: int | None = None
    previous: int | None = None


def ordered(hosts: Sequence[HostEntry]) -> list[HostEntry]:
    """Return the hosts in the order of their ranks. The endpoint host comes first. Other hosts get
    their `node_rank` or their previous number if it is free, and the remaining ones fill the gaps
    in elastic's order."""
    by_group = sorted(hosts, key=lambda host: host.group_rank)
    first = next((host for host in by_group if host.is_endpoint), None)
    rest = [host for host in by_group if host is not first]
    placed: dict[int, HostEntry] = {} if first is None else {0: first}
    unplaced = []
    for host in rest:
        number = host.node_rank if host.node_rank is not None else host.previous
        if number is None or number in placed:
            unplaced.append(host)
        else:
            placed[number] = host
    for number in range(len(hosts)):
        if number not in placed and unplaced:
            placed[number] = unplaced.pop(0)
    # If a host is missing, those after it move up.
    return [placed[number] for number in sorted(placed)]


@dataclass
class Round:
    """The ranks of one round, before a process group exists.

    Args:
        env: rank, local rank and world sizes of this rank.
        hosts: name of each rank's host, ordered by rank.
        node_rank: number of this host.
    """

    env: RankEnv
    hosts: list[str]
    node_rank: int
    store: Any

    @property
    def is_first(self) -> bool:
        return self.env.rank == 0

    def gather(self, name: str, value: Any) -> list[Any]:
        """Return the values (JSON) of all ranks, by rank. Every rank calls this once per
        ``name``."""
        self.store.set(f"{name}/{self.env.rank}", json.dumps(value))
        return [self._get(f"{name}/{rank}") for rank in range(self.env.world_size)]

    def broadcast(self, name: str, value: Any) -> Any:
        """Return rank 0's value (JSON) on every rank."""
        if self.is_first:
            self.store.set(name, json.dumps(value))
            return value
        return self._get(name)

    def leave(self) -> None:
        """Leave the round. The rank that serves the store waits until the others have read from
        it."""
        from torch.distributed import DistError

        with contextlib.suppress(DistError, RuntimeError):
            self.store.set(f"left/{self.env.rank}", "")
            if _server is None:
                return
            deadline = time.monotonic() + _LEAVE_WITHIN_S
            keys = [f"left/{rank}" for rank in range(self.env.world_size)]
            while not self.store.check(keys) and time.monotonic() < deadline:
                time.sleep(_POLL_S)

    def _get(self, key: str) -> Any:
        # `wait` would block signal handlers, and another rank may tokenize for a long time.
        while not self.store.check([key]):
            time.sleep(_POLL_S)
        return json.loads(self.store.get(key))


#: The store of this round if this process serves it. It is kept open until the process exits.
_server: Any = None


def enter_round(entry: HostEntry, call: int = 0) -> Round:
    """Assign the ranks of this round, and set them in the environment.

    Args:
        entry: entry of this process's host.
        call: number from :func:`~paceline.cluster.rounds.next_call`.

    Raises:
        RunError: if the store of the round cannot be reached.
    """
    env, store = from_environment(), _open_store(call)
    store.set(f"numbering/{env.rank}", json.dumps({**asdict(entry), "local_rank": env.local_rank}))
    unnumbered = Round(env, [], 0, store)
    hosts = {}
    for rank in range(env.world_size):
        fields = unnumbered._get(f"numbering/{rank}")
        if fields.pop("local_rank") == 0:
            hosts[fields["group_rank"]] = HostEntry(**fields)
    order = ordered(list(hosts.values()))
    names = [host.host for host in order for _ in range(host.num_ranks)]
    number = next(index for index, host in enumerate(order) if host.group_rank == entry.group_rank)
    first_rank = sum(host.num_ranks for host in order[:number])
    env = replace(env, rank=first_rank + env.local_rank)
    # Read by torch's own rendezvous (env://), DeepSpeed and the parameter server.
    os.environ.update(RANK=str(env.rank), GROUP_RANK=str(number))
    return Round(env, names, number, store)


def _open_store(call: int) -> Any:
    """Return a client of the store of this round at MASTER_ADDR. All ranks are clients, whichever
    process serves the store."""
    global _server
    from torch.distributed import DistError, PrefixStore, TCPStore, is_initialized

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = timedelta(seconds=_STORE_TIMEOUT_S)
    # The store is served by an agent, or a process group already uses it.
    is_served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or is_initialized()
    try:
        if not is_served and int(os.environ["RANK"]) == 0:
            _server = TCPStore(
                address, port, is_master=True, wait_for_workers=False, timeout=timeout
            )
        client = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)
    except (DistError, OSError, RuntimeError) as error:
        raise RunError(
            "the ranks cannot reach the store of this round at {address}:{port}: {reason}",
            code="store-unreachable",
            fix="check the ports between the hosts with `paceline doctor`",
            address=address,
            port=port,
            reason=first_line(error),
        ) from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if not is_served:
        # A host that joined later counts its restarts from 0. The store is used by this round only,
        # so one prefix suffices.
        os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
        attempt = "0"
    return PrefixStore(f"paceline/{attempt}/{call}", client)
