"""The orders in which the ranks issue collectives. NCCL can hang if ranks issue collectives of
several communicators in different orders, because a collective occupies the device until all its
ranks have started it."""

import itertools
import json
import os
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

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
_numbers = itertools.count()  # of the comparisons, the same on all ranks


class OrderError(RuntimeError):
    """The ranks issued different collectives, or in different orders."""


def check_orders(comm: Any) -> None:
    """Compare the orders in which this rank and the others issued their collectives. A collective.

    Raises:
        OrderError: see :func:`compare_orders`.
    """
    store = dist.PrefixStore(f"orders/{next(_numbers)}", comm.store)
    store.set(str(comm.rank()), json.dumps(LOG.records))
    logs = {rank: json.loads(store.get(str(rank))) for rank in range(comm.size())}
    if store.add("compared", 1) == comm.size():
        store.set("done", "yes")
    store.wait(["done"])  # the store may be in the process of rank 0
    compare_orders(logs)


def read_logs(folder: Path) -> dict[int, list[Record]]:
    """Return the records of each rank in a folder of :data:`LOGS`."""
    return {
        int(path.stem): [json.loads(line) for line in path.read_text().splitlines()]
        for path in folder.glob("*.jsonl")
    }


def compare_orders(logs: Mapping[int, Sequence[Record]]) -> None:
    """Raise OrderError if the ranks would hang or differ if each of them ran one call of its log at
    a time, in the order of the log, and a collective or message when all its ranks have come to it.
    The operations of a batch have no order."""
    calls = {rank: _calls(logs[rank], rank, logs.keys()) for rank in logs}
    position = dict.fromkeys(logs, -1)
    num_left = dict.fromkeys(logs, 0)  # operations of the call at the position
    arrived: dict[_Name, dict[int, str]] = defaultdict(dict)
    ready = deque(logs)
    while ready:
        rank = ready.popleft()
        position[rank] += 1
        if position[rank] == len(calls[rank]):
            continue
        call = calls[rank][position[rank]]
        num_left[rank] = len(call)
        for name, (text, ranks) in call.items():
            arrived[name][rank] = text
            if len(arrived[name]) < len(ranks):
                continue
            if len(set(arrived[name].values())) > 1:
                raise OrderError(f"{name} differs between the ranks: {arrived[name]}")
            for each in ranks:
                num_left[each] -= 1
                if num_left[each] == 0:
                    ready.append(each)
    stuck = [rank for rank in logs if position[rank] < len(calls[rank])]
    if stuck:
        texts = [_following(rank, calls[rank], position[rank]) for rank in sorted(stuck)]
        raise OrderError(
            "the ranks issued their collectives in different orders, which can hang NCCL:\n"
            + "\n".join(texts)
        )


#: What identifies a collective or message on all its ranks.
_Name = str
#: Operations that a rank runs together → what must be the same on all ranks, and these ranks.
_Call = dict[_Name, tuple[str, list[int]]]


def _calls(log: Sequence[Record], rank: int, known: Collection[int]) -> list[_Call]:
    counts: Counter[str] = Counter()
    calls = []
    for record in log:
        call: _Call = {}
        for name, numel, dtype, peer in record["operations"]:
            if peer is None:
                ranks, kind = record["ranks"], name
                stream = f"group {record['group']} of ranks {ranks}, collective"
            else:
                ranks, kind = [rank, peer], "message"
                source, target = ranks if name == "send" else reversed(ranks)
                stream = f"group {record['group']}, message from rank {source} to {target}"
            each = f"{stream} {counts[stream]}"
            counts[stream] += 1
            call[each] = f"{kind} {numel} {dtype}", [other for other in ranks if other in known]
        calls.append(call)
    return calls


def _following(rank: int, calls: list[_Call], position: int, num_calls: int = 12) -> str:
    lines = [f"rank {rank}, from its call {position} of {len(calls)}:"]
    for call in calls[position : position + num_calls]:
        lines.append("  " + "; ".join(f"{name}: {text}" for name, (text, _) in call.items()))
    return "\n".join(lines)
