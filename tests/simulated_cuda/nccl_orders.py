"""The order in which the ranks issue collectives. NCCL can hang if two ranks issue collectives of two
communicators in different orders, because a collective occupies the device until all its ranks have
started it."""

import itertools
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

#: Environment variable: a folder that receives the log of each rank.
LOGS = "PACELINE_TEST_NCCL_LOGS"
#: A call in the log of a rank: its communicator, and (operation, elements, dtype, other rank).
Record = dict[str, Any]


class CallLog:
    """The calls of this process in the order of issue. A folder in :data:`LOGS` receives them."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self._file: Any = None

    def start(self, rank: int) -> None:
        if self._file is None and LOGS in os.environ:
            path = Path(os.environ[LOGS]) / f"{rank}.jsonl"
            self._file = open(path, "w", buffering=1)  # noqa: SIM115

    def add(self, record: Record) -> None:
        self.records.append(record)
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")


#: The log of this process.
LOG = CallLog()


class OrderError(RuntimeError):
    """Two ranks issued different collectives, or in different orders."""


def check_orders(comm: Any) -> None:
    """Compare the order in which this rank and the others issued their collectives. A collective.

    Raises:
        OrderError: the order over the communicators that two ranks share differs.
    """
    rank = comm.rank()
    comm.store.set(f"orders/{rank}", json.dumps(LOG.records))
    logs = {each: json.loads(comm.store.get(f"orders/{each}")) for each in range(comm.size())}
    if comm.store.add("orders/compared", 1) == comm.size():
        comm.store.set("orders/done", "yes")
    compare_orders(logs)
    comm.store.wait(["orders/done"])  # the store may be in the process of rank 0


def read_logs(folder: Path) -> dict[int, list[Record]]:
    """Return the records of each rank in a folder of :data:`LOGS`."""
    return {
        int(path.stem): [json.loads(line) for line in path.read_text().splitlines()]
        for path in folder.glob("*.jsonl")
    }


def compare_orders(logs: Mapping[int, Sequence[Record]]) -> None:
    """Raise OrderError if the logs of two ranks differ in what concerns both: the collectives of
    communicators that they share, and their messages to each other."""
    for first, second in itertools.combinations(sorted(logs), 2):
        one = _shared_calls(logs[first], first, second)
        other = _shared_calls(logs[second], second, first)
        at = _first_difference(one, other)
        if at is not None:
            raise OrderError(
                f"ranks {first} and {second} issued their collectives in different orders, which"
                f" can hang NCCL: {at}\nrank {first}:\n{_around(one, at)}"
                f"\nrank {second}:\n{_around(other, at)}"
            )


#: What identifies a collective or message on both ranks → its position in the log, and its text.
_Calls = dict[str, tuple[int, str]]


def _shared_calls(log: Sequence[Record], rank: int, peer: int) -> _Calls:
    counts: Counter[str] = Counter()
    calls: _Calls = {}
    for position, record in enumerate(log):
        for name, numel, dtype, other in record["operations"]:
            if peer not in record["ranks"] or other not in (None, peer):
                continue
            ends = (rank, peer) if name == "send" else (peer, rank)
            what = "collective" if other is None else f"message {ends[0]} → {ends[1]}"
            key = f"group {record['group']} {what}"
            text = f"{name if other is None else 'message'} {numel} {dtype}"
            calls[f"{key} {counts[key]}"] = position, text
            counts[key] += 1
    return calls


def _first_difference(one: _Calls, other: _Calls) -> str | None:
    """Return the first call that is missing in the other log, differs from it, or is behind a call
    that the other rank issued later. The calls of a batch have no order."""
    latest = position = batch_latest = -1
    for key, (at, text) in one.items():
        if key not in other or other[key][1] != text:
            return key
        if at != position:
            latest, position = max(latest, batch_latest), at
        if other[key][0] < latest:
            return key
        batch_latest = max(batch_latest, other[key][0])
    return next((key for key in other if key not in one), None)


def _around(calls: _Calls, key: str, num_calls: int = 8) -> str:
    keys = list(calls)
    at = keys.index(key) if key in calls else len(keys)
    part = keys[max(0, at - num_calls) : at + num_calls]
    return "\n".join(f"  {calls[each][0]}: {each}: {calls[each][1]}" for each in part)
