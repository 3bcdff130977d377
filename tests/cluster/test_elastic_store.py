"""Show why Paceline sets `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`: replace one of the two nodes of a
rendezvous, with and without the variable."""

import contextlib
import threading
from typing import Any

import pytest
from ranks import free_port
from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    create_handler,
)

WAIT_S = 8.0


def node(port: int, is_host: bool) -> DynamicRendezvousHandler:
    parameters = RendezvousParameters(
        "c10d", f"127.0.0.1:{port}", "run", 2, 2, "127.0.0.1", is_host=is_host, read_timeout=WAIT_S,
        join_timeout=WAIT_S, keep_alive_interval=1, keep_alive_max_attempt=2,
    )  # fmt: skip
    backend, store = create_backend(parameters)
    return create_handler(store, backend, parameters)


def rendezvous(nodes: list[DynamicRendezvousHandler]) -> list[Any]:
    """Return the rendezvous result of each node, or None if it still waits."""
    results: list[Any] = [None] * len(nodes)

    def enter(number: int) -> None:
        with contextlib.suppress(DistError):  # the rendezvous timed out
            results[number] = nodes[number].next_rendezvous()

    threads = [
        threading.Thread(target=enter, args=(number,), daemon=True) for number in range(len(nodes))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    return results


def addresses_after_a_replacement(monkeypatch: pytest.MonkeyPatch, value: str) -> list[Any]:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", value)
    port = free_port()
    first, second = node(port, True), node(port, False)
    assert all(rendezvous([first, second]))
    second._stop_heartbeats()  # as if its host were lost
    return rendezvous([first, node(port, False)])


@pytest.mark.soak
def test_replacement_node_receives_address(monkeypatch: pytest.MonkeyPatch) -> None:
    results = addresses_after_a_replacement(monkeypatch, "1")
    assert [result.bootstrap_store_info.master_addr for result in results] == ["127.0.0.1"] * 2


@pytest.mark.soak
@pytest.mark.xfail(
    strict=True,
    reason="torch 2.13: rank 0 does not publish its address again; see cluster/elastic.py",
)
def test_replacement_node_receives_address_with_shared_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once this passes, cluster/elastic.py need not set the variable."""
    assert all(addresses_after_a_replacement(monkeypatch, "0"))
