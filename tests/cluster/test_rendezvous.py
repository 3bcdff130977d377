"""Test the timeouts of the rendezvous with torchelastic's store and handler."""

from datetime import timedelta
from pathlib import Path

import pytest
from ranks import free_port
from torch.distributed.elastic.rendezvous import RendezvousParameters, RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from paceline.cluster.failures import AgentFolder
from paceline.cluster.rendezvous import BACKEND, register


def test_rejoin_has_separate_timeout(tmp_path: Path) -> None:
    register()
    register()  # called again on each rejoin
    folder = AgentFolder(tmp_path)
    handler = get_rendezvous_handler(
        RendezvousParameters(
            BACKEND, f"127.0.0.1:{free_port()}", "test", 2, 2, is_host=True, join_timeout=600,
            rejoin_timeout=1, last_call_timeout=3, keep_alive_interval=3, keep_alive_max_attempt=4,
            agent_folder=str(tmp_path),
        )
    )  # fmt: skip
    settings = handler.settings
    assert (settings.timeout.join, settings.timeout.last_call) == (
        timedelta(seconds=600),
        timedelta(seconds=3),
    )
    assert (settings.keep_alive_interval, settings.keep_alive_max_attempt) == (
        timedelta(seconds=3),
        4,
    )
    folder.write_state({"node_rank": 0})  # as the ranks of the first round would
    with pytest.raises(RendezvousTimeoutError):
        handler.next_rendezvous()
