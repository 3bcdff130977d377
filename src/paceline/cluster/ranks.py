"""One round of a run that an elastic agent starts: the ranks' numbers, and what the ranks tell each
other before they train.

torch elastic numbers the hosts by (address, process id) at every rendezvous, so that rank 0 may
move to another host after a restart. That would change the order in which gradients are summed, and
the host that writes the run's folder. The ranks therefore number themselves: the endpoint host
first, then the others in the order of the round before.
"""

import contextlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

from paceline.core.errors import RunError
from paceline.distributed.environment import RankEnv, from_environment

_POLL_S = 0.02
_STORE_TIMEOUT_S = 120.0
_LEAVE_WITHIN_S = 5.0


@dataclass(frozen=True)
class HostEntry:
    """A host in a round.

    Args:
        host: its name.
        group_rank: its number as elastic gave it.
        num_ranks: of this host.
        is_endpoint: whether the rendezvous endpoint is this host; None where that is not known.
        node_rank: `parallel.node_rank`, or None for `auto`.
        previous: its number in the round before, or None.
    """

    host: str
    group_rank: int
    num_ranks: int
    is_endpoint: bool | None = None
    node_rank: int | None = None
    previous: int | None = None


def ordered(hosts: Sequence[HostEntry]) -> list[HostEntry]:
    """The hosts in the order of their ranks: the endpoint host first, then each at its `node_rank`
    or its previous number where that is free; the others fill the gaps in elastic's order."""
    by_group = sorted(hosts, key=lambda host: host.group_rank)
    first = next((host for host in by_group if host.is_endpoint), None)
    rest = [host for host in by_group if host is not first]
    wanted: dict[int, HostEntry] = {} if first is None else {0: first}
    unplaced = []
    for host in rest:
        number = host.node_rank if host.node_rank is not None else host.previous
        if number is None or number in wanted:
            unplaced.append(host)
        else:
            wanted[number] = host
    result: list[HostEntry] = []
    number = 0
    while len(result) < len(hosts):
        if number in wanted:
            result.append(wanted.pop(number))
        elif unplaced:
            result.append(unplaced.pop(0))
        else:  # a host is missing: those after it move up
            result.append(wanted.pop(min(wanted)))
        number += 1
    return result


@dataclass
class Round:
    """The ranks of one round, before a process group exists.

    Args:
        env: this rank's numbers.
        hosts: name of each rank's host, in the order of the ranks.
        node_rank: this host's number.
    """

    env: RankEnv
    hosts: list[str]
    node_rank: int
    store: Any

    @property
    def is_first(self) -> bool:
        return self.env.rank == 0

    def gather(self, name: str, value: Any) -> list[Any]:
        """Each rank's value (JSON), in the order of the ranks. Every rank calls this, once for each
        ``name``."""
        self.store.set(f"{name}/{self.env.rank}", json.dumps(value))
        return [self._get(f"{name}/{rank}") for rank in range(self.env.world_size)]

    def broadcast(self, name: str, value: Any) -> Any:
        """Rank 0's value (JSON), on every rank."""
        if self.is_first:
            self.store.set(name, json.dumps(value))
            return value
        return self._get(name)

    def leave(self) -> None:
        """Called last, by every rank that can: the rank that serves the store waits until the
        others have read from it."""
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
        # Not `wait`, which holds the interpreter: a signal would not be seen, and a rank may
        # tokenize for long.
        while not self.store.check([key]):
            time.sleep(_POLL_S)
        return json.loads(self.store.get(key))


# the store of this round, where this process serves it; it lives as long as the process
_server: Any = None


def enter_round(entry: HostEntry, call: int = 0) -> Round:
    """Number the ranks of this round, put the numbers into the environment, and return what the
    ranks share.

    Args:
        entry: of this process's host.
        call: how often this process has entered one before in the same round of its agent.

    Raises:
        RunError: the store of the round cannot be reached.
    """
    env, store = from_environment(), _open_store(call)
    store.set(f"numbering/{env.rank}", json.dumps({**asdict(entry), "local_rank": env.local_rank}))
    unnumbered = Round(env, [], 0, store)
    posted = [unnumbered._get(f"numbering/{rank}") for rank in range(env.world_size)]
    hosts = [
        HostEntry(**{key: value for key, value in entry_fields.items() if key != "local_rank"})
        for entry_fields in posted
    ]
    distinct = list(
        {
            host.group_rank: host
            for host, entry_fields in zip(hosts, posted, strict=True)
            if entry_fields["local_rank"] == 0
        }.values()
    )
    order = ordered(distinct)
    names = [host.host for host in order for _ in range(host.num_ranks)]
    number = next(index for index, host in enumerate(order) if host.group_rank == entry.group_rank)
    first_rank = sum(host.num_ranks for host in order[:number])
    env = replace(env, rank=first_rank + env.local_rank)
    # From here on everything reads these: torch's own rendezvous (env://), DeepSpeed, the parameter
    # server.
    os.environ.update(RANK=str(env.rank), GROUP_RANK=str(number))
    return Round(env, names, number, store)


def _open_store(call: int) -> Any:
    """The store of this round, at MASTER_ADDR. All ranks are its clients from here on, whichever
    process serves it."""
    global _server
    from torch.distributed import DistError, PrefixStore, TCPStore, is_initialized

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = timedelta(seconds=_STORE_TIMEOUT_S)
    # An agent serves it, or the process group that exists already was formed at it.
    is_served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or is_initialized()
    try:
        if not is_served and int(os.environ["RANK"]) == 0:
            _server = TCPStore(
                address, port, is_master=True, wait_for_workers=False, timeout=timeout
            )
        client = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)
    except (DistError, OSError, RuntimeError) as error:
        raise RunError(
            f"the ranks cannot reach the store of this round at {address}:{port}:"
            f" {str(error).splitlines()[0]}",
            fix="see `paceline doctor` for what blocks the ports between the hosts",
        ) from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if not is_served:
        # A host that has joined later counts its restarts from 0. The store is of this round alone,
        # so one prefix does.
        os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
        attempt = "0"
    return PrefixStore(f"paceline/{attempt}/{call}", client)
