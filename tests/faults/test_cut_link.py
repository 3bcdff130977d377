"""Two hosts in network namespaces train one run; the link between them is cut for a while."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import MICRO, digest, events, report, train, wait_for_step
from injector import EVERY
from lab import note
from namespaces import two_hosts
from test_hosts import THREADS, end, words

pytestmark = [pytest.mark.alone, pytest.mark.slow, pytest.mark.soak]

CUT_S = 15.0  # longer than a host may be silent
TIMES = 3


@pytest.fixture
def network(request: pytest.FixtureRequest) -> Iterator[Any]:
    with two_hosts(request.config) as found:
        yield found


def test_a_host_that_is_cut_off_comes_back_and_the_run_ends_with_the_same_bits(tmp_path: Path, network: Any) -> None:
    settings = {"max_steps": 40 * (TIMES + 1), "save_steps": EVERY}
    train(tmp_path / "whole", *words(parallel__num_gpus=2, **settings), env={**os.environ, **THREADS})
    folder = tmp_path / "run"
    given = words(parallel__nnodes=2, parallel__head=network.addresses[0], **settings)
    hosts = []
    for number, name in enumerate(network.hosts):
        command = ["ip", "netns", "exec", name, sys.executable, "-m", "paceline", "sft", *MICRO, f"output_dir={folder}", *given]
        environment = {**os.environ, **THREADS, "PACELINE_HOST": "ab"[number]}
        hosts.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )  # fmt: skip
    lost = 0
    for number in range(TIMES):
        wait_for_step(folder, 40 * number + 6, hosts[0])
        link = ["ip", "-n", network.switch, "link", "set", "p1"]
        subprocess.run([*link, "down"], check=True)
        time.sleep(CUT_S)
        last = events(folder, "step")[-1]["step"]
        subprocess.run([*link, "up"], check=True)
        wait_for_starts(folder, number + 2, hosts[0])
        lost = max(lost, last - (events(folder, "run_start")[-1]["resumed_from_step"] or 0))
    said = [end(one) for one in hosts]
    assert "host b" in said[0]
    assert "cut off from the head" in said[1]
    assert [one["world_size"] for one in events(folder, "run_start")] == [2] * (TIMES + 1)
    equal = digest(folder) == digest(tmp_path / "whole")
    note("a link between two hosts cut for 15 s and restored", "ddp", TIMES, lost=lost, equal=equal)
    assert equal
    assert lost <= 2 * EVERY
    assert report(folder)["status"] == "done"


def wait_for_starts(folder: Path, number: int, process: subprocess.Popen[str], timeout_s: float = 90.0) -> None:
    deadline = time.monotonic() + timeout_s
    while len(events(folder, "run_start")) < number:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, f"the run did not start for the time number {number}"
        time.sleep(0.1)
