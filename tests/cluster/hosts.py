"""Hosts as network namespaces of this machine, and what befalls them: a rank or a whole host is
killed, paused, or cut off; a host comes back, under another address, or under a name that resolves
late."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from commands import MICRO, digest
from namespaces import network_of

#: One rank of a host has all cores, two ranks share them, and more threads add up in another order.
THREADS = {"OMP_NUM_THREADS": "1"}
PORT = 29500
_NAMES = "abcdefgh"
_TIMEOUT_S = 300.0
_ETC = Path("/etc/netns")


@dataclass
class Host:
    """One namespace. ``name``: what the host calls itself; ``disk``: what lies at the place of the
    cluster's folder there, None where it is shared."""

    number: int
    name: str
    namespace: str
    address: str
    disk: Path | None
    output_file: Path
    process: subprocess.Popen[bytes] | None = None

    # -- processes
    def processes(self) -> list[psutil.Process]:
        """All that runs on this host, whoever started it."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=True
        )
        processes = []
        for pid in listed.stdout.split():
            with contextlib.suppress(psutil.Error):
                processes.append(psutil.Process(int(pid)))
        return processes

    def ranks(self) -> list[psutil.Process]:
        """The ranks of this host in the order of their numbers: children of the command's fork
        server, or of torchrun."""
        ranks = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE and self._is_rank(process):
                    ranks.append(process)
        return sorted(ranks, key=lambda process: (process.create_time(), process.pid))

    def _is_rank(self, process: psutil.Process) -> bool:
        parent = process.parent()
        if parent is None or self.process is None:
            return False
        if parent.pid == self.process.pid:  # torchrun starts its ranks itself
            return "paceline" in process.cmdline()
        return parent.ppid() == self.process.pid and "multiprocessing.forkserver" in " ".join(
            parent.cmdline()
        )

    @property
    def output(self) -> str:
        return self.output_file.read_text(errors="replace")

    def kill(self) -> None:
        """As a power cut: every process at once, none of them asked. The kernel of the host still
        closes their connections."""
        while running := [
            process for process in self.processes() if process.status() != psutil.STATUS_ZOMBIE
        ]:
            for process in running:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            if self.process is not None:
                self.process.wait()
            time.sleep(0.02)

    def signal(self, number: signal.Signals) -> None:
        """To every process of this host."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)

    # -- waiting
    def end(self, expect: int = 0, timeout_s: float = _TIMEOUT_S) -> str:
        """What the command has said, when it has ended by itself."""
        assert self.process is not None
        code = self.process.wait(timeout_s)
        assert code == expect, (
            f"host {self.name}: exit code {code}, expected {expect}\n{self.output[-4000:]}"
        )
        return self.output


class Cluster:
    """Hosts on one network, and a run on them. ``folder``: where the run's files lie, as each host
    sees it.

    Args:
        shared: the hosts have one disk; else each has its own, at the same path. The endpoint's is
            then ``folder`` itself.
        endpoint: the number of the host at which all meet.
    """

    def __init__(self, network: Any, folder: Path, shared: bool, endpoint: int) -> None:
        self.network, self.folder, self.endpoint = network, folder / "disk", endpoint
        self.folder.mkdir()
        self.names: dict[str, str] = {}
        self.hosts = []
        for number, (namespace, address) in enumerate(
            zip(network.hosts, network.addresses, strict=True)
        ):
            name = _NAMES[number]
            disk = None if shared or number == endpoint else folder / f"disk-{name}"
            if disk is not None:
                disk.mkdir()
            self.hosts.append(Host(number, name, namespace, address, disk, folder / f"said-{name}"))
            etc = _ETC / namespace
            etc.mkdir(parents=True, exist_ok=True)
            # No name server: a name is either in the file, or unknown at once.
            (etc / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
        self._write_names()

    # -- starting
    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def endpoint_address(self) -> str:
        return self.hosts[self.endpoint].address

    def start(
        self,
        number: int,
        *args: str,
        nnodes: str = "2",
        endpoint: str | None = None,
        **environment: str,
    ) -> Host:
        """Give the command on a host. ``endpoint``: a name or an address, without a port."""
        place = (
            f"parallel.nnodes={nnodes}",
            f"parallel.rdzv_endpoint={endpoint or self.endpoint_address}:{PORT}",
        )
        command = [
            sys.executable,
            "-m",
            "paceline",
            "sft",
            *MICRO,
            "parallel.num_gpus=1",
            f"output_dir={self.run}",
            *place,
        ]
        return self.execute(number, [*command, *args], **environment)

    def execute(self, number: int, command: Sequence[str], **environment: str) -> Host:
        """Run any command as that of a host."""
        host = self.hosts[number]
        if host.disk is not None:
            bind = f'mount --bind {host.disk} {self.folder} && exec "$@"'
            command = ["unshare", "-m", "sh", "-c", bind, "sh", *command]
        with open(host.output_file, "ab") as output:
            host.process = subprocess.Popen(
                ["ip", "netns", "exec", host.namespace, *command],
                env={**os.environ, **THREADS, "PACELINE_HOST": host.name, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        return host

    # -- the network
    def set_name(self, name: str, address: str | None) -> None:
        """What a name resolves to from now on, on every host, also for processes that run. None: it
        is unknown."""
        self.names.pop(name, None)
        if address is not None:
            self.names[name] = address
        self._write_names()

    def _write_names(self) -> None:
        lines = [
            "127.0.0.1 localhost",
            *(f"{address} {name}" for name, address in self.names.items()),
        ]
        for host in self.hosts:
            # In place: what `ip netns exec` has bound over /etc/hosts is this very file.
            with open(_ETC / host.namespace / "hosts", "w") as file:
                file.write("\n".join(lines) + "\n")

    def set_link(self, number: int, up: bool) -> None:
        """Plug the cable of a host in or out; without a word to either end's connections."""
        link = (
            "ip",
            "-n",
            self.network.switch,
            "link",
            "set",
            f"p{number}",
            "up" if up else "down",
        )
        subprocess.run(link, check=True)

    def move(self, number: int, address: str) -> None:
        """Give a host another address."""
        host = self.hosts[number]
        for command in (("del", f"{host.address}/24"), ("add", f"{address}/24")):
            subprocess.run(
                ["ip", "-n", host.namespace, "addr", *command, "dev", "eth0"], check=True
            )
        host.address = address

    # -- the run's events
    def events(self, *types: str) -> list[dict[str, Any]]:
        """Whole lines of the log on the endpoint's disk; all, or those of some types."""
        try:
            lines = (self.run / "events.jsonl").read_bytes().splitlines(keepends=True)
        except OSError:
            return []
        events = [json.loads(line) for line in lines if line.endswith(b"\n")]
        return [event for event in events if not types or event["type"] in types]

    @property
    def last_step(self) -> int:
        """The last step that the attempt under way has logged; 0 where it has logged none."""
        log = self.events("run_start", "step")
        return 0 if not log or log[-1]["type"] == "run_start" else int(log[-1]["step"])

    def digest(self) -> str:
        """Of the newest checkpoint."""
        return digest(self.run)

    def losses(self) -> list[float]:
        """By step; of those that were made again, as they were made last."""
        losses = {event["step"]: event["loss"] for event in self.events("step")}
        return [losses[step] for step in sorted(losses)]

    def wait(
        self, condition: Callable[[], object], what: str, timeout_s: float = _TIMEOUT_S
    ) -> None:
        """Until it holds. Fails where it does not come to that, with what the hosts have said."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            ended = [
                host
                for host in self.hosts
                if host.process is not None and host.process.poll() not in (None, 0, -9)
            ]
            if ended or time.monotonic() > deadline:
                output = "\n".join(
                    f"--- host {host.name}\n{host.output[-3000:]}"
                    for host in self.hosts
                    if host.output_file.exists()
                )
                why = (
                    f"the command on host {ended[0].name} has ended"
                    if ended
                    else f"not within {timeout_s:.0f} s"
                )
                raise AssertionError(f"{what}: {why}\n{output}")
            time.sleep(0.05)

    def wait_for_step(self, step: int, attempt: int | None = None) -> None:
        """Until the run has logged this step; in its attempt number so much (from 1), or in any."""

        def reached() -> bool:
            return self.last_step >= step and (
                attempt is None or len(self.events("run_start")) >= attempt
            )

        self.wait(reached, f"step {step}" + (f" of attempt {attempt}" if attempt else ""))

    def wait_for_start(self, number: int, world_size: int | None = None) -> None:
        """Until the run has started for the time number so much (from 1), with so many ranks."""

        def started() -> bool:
            starts = self.events("run_start")
            return len(starts) >= number and (
                world_size is None or starts[-1]["world_size"] == world_size
            )

        self.wait(started, f"start {number}" + (f" with {world_size} ranks" if world_size else ""))

    def close(self) -> None:
        for host in self.hosts:
            host.signal(signal.SIGCONT)
            host.kill()
            shutil.rmtree(_ETC / host.namespace, ignore_errors=True)
        with contextlib.suppress(OSError):
            _ETC.rmdir()


@contextmanager
def cluster_of(
    config: pytest.Config,
    folder: Path,
    num_hosts: int = 2,
    *,
    shared: bool = False,
    endpoint: int = 0,
    loss: float = 0.0,
) -> Iterator[Cluster]:
    """Hosts that are gone, with all that runs on them, at the end. A test that cannot have them is
    skipped, loudly."""
    with ExitStack() as stack:
        network = stack.enter_context(network_of(config, num_hosts, loss=loss))
        cluster = Cluster(network, folder, shared, endpoint)
        stack.callback(cluster.close)
        yield cluster
