"""A worker's side: the connection to the servers, and the rows of their tables. A worker may
compute on an accelerator; rows and gradients are sent from and to the memory of the host."""

import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch.distributed import rpc

from paceline.distributed.communicator import Communicator
from paceline.distributed.torch_compat import tcp_rpc_options
from paceline.distributed.traffic import TRAFFIC, uncounted
from paceline.strategies.parameter_server.server import Rows, pull

_THREADS = 4


def connect(world: Communicator, timeout_s: float) -> None:
    """Open ``torch.distributed.rpc`` among all ranks. A collective."""
    # Plain TCP works everywhere; the other transports need shared memory or InfiniBand.
    options = tcp_rpc_options(_THREADS, timeout_s)
    with uncounted(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="You are using a Backend")
        rpc.init_rpc(
            rank_name(world.rank),
            rank=world.rank,
            world_size=world.size,
            rpc_backend_options=options,
        )
        world.barrier()  # no worker pulls before all servers have their rows


class RemoteEmbedding:
    """The rows of one table on the servers. Rows that were pulled for a backward are kept until
    their gradient is pushed."""

    def __init__(
        self,
        number: int,
        ranges: list[tuple[int, int]],
        first_server: int,
        dim: int,
        world: Communicator,
    ) -> None:
        self.number = number
        self.dim = dim
        self.first_server = first_server
        self.starts = torch.tensor([start for start, _ in ranges] + [ranges[-1][1]])
        self.world = world
        self.pulled: list[tuple[torch.Tensor, torch.Tensor]] = []  # (ids on the CPU, rows)

    def fetch(self, ids: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Request the rows of sorted ``ids``. Returns a function that waits for them and returns
        them on the device of ``ids``."""
        device, ids = ids.device, ids.cpu()
        if len(ids) and (int(ids[0]) < 0 or int(ids[-1]) >= int(self.starts[-1])):  # sorted
            raise IndexError(
                f"ids {int(ids[0])} to {int(ids[-1])} are out of range for a table of"
                f" {int(self.starts[-1])} rows"
            )
        wants_gradient = torch.is_grad_enabled()
        calls = [
            rpc.rpc_async(
                rank_name(self.first_server + server),
                pull,
                args=(self.number, rows, wants_gradient),
            )
            for server, rows in self._by_server(ids)
        ]
        self.world.traffic.add("pull", ids.nbytes)

        def wait() -> torch.Tensor:
            rows = torch.cat([call.wait() for call in calls]) if calls else torch.zeros(0, self.dim)
            vectors = rows.to(device)
            if wants_gradient:
                vectors.requires_grad_()
                self.pulled.append((ids, vectors))
            return vectors

        return wait

    def _by_server(self, ids: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (server, places of the rows there) for each server that has some of the sorted
        ``ids``."""
        ends = torch.searchsorted(ids, self.starts).tolist()
        for server, (low, high) in enumerate(pairwise(ends)):
            if high > low:
                yield server, ids[low:high] - self.starts[server]

    def gradients(self) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Yield (server's rank, places there, gradients) of the rows pulled since the last call, on
        the CPU."""
        for ids, vectors in self.pulled:
            if vectors.grad is None:
                continue
            gradients, start = vectors.grad.cpu(), 0
            for server, rows in self._by_server(ids):
                yield self.first_server + server, rows, gradients[start : start + len(rows)]
                start += len(rows)
        self.pulled.clear()


def send_gradients(
    server: int,
    function: Callable[..., None],
    worker: int,
    number: int,
    rows: Rows,
    dense: dict[str, torch.Tensor],
    *options: float,
) -> Any:
    """Call ``function`` on a server with a worker's gradients. Their bytes are counted."""
    tensors = [*dense.values(), *(tensor for pair in rows.values() for tensor in pair)]
    TRAFFIC.add("push", sum(tensor.nbytes for tensor in tensors))
    args = (worker, number, rows, dense, *options)
    return rpc.rpc_async(rank_name(server), function, args=args)


def rank_name(rank: int) -> str:
    """Return the name of a rank in ``torch.distributed.rpc``."""
    return f"rank{rank}"
