"""Simulated hosts in network namespaces, to inject faults: kill or pause a rank or a whole host,
cut its network link, and restart it under another address or a host name that resolves late."""

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
from namespaces import create_network

#: The order of floating-point sums depends on the number of threads, and the default number depends
#: on the ranks of the host.
THREADS = {"OMP_NUM_THREADS": "1"}
PORT = 29500
_NAMES = "abcdefgh"
_TIMEOUT_S = 300.0
_ETC = Path("/etc/netns")


@dataclass
class Host:
    """A host in a network namespace.

    Args:
        name: the host name that Paceline reports.
        disk: the folder mounted at the cluster's folder on this host; None if that is shared.
    """

    number: int
    name: str
    namespace: str
    address: str
    disk: Path | None
    output_file: Path
    process: subprocess.Popen[bytes] | None = None

    # -- processes
    def processes(self) -> list[psutil.Process]:
        """Return all processes that run on this host."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=True
        )
        processes = []
        for pid in listed.stdout.split():
            with contextlib.suppress(psutil.Error):
                processes.append(psutil.Process(int(pid)))
        return processes

    def ranks(self) -> list[psutil.Process]:
        """Return the ranks of this host in rank order: the children of the command's fork server or
        of torchrun."""
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
        """Kill all processes of this host at once, as a power failure would, except that the kernel
        still closes their connections."""
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
        """Send a signal to every process of this host."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)

    # -- waiting
    def wait_for_exit(self, expect: int = 0, timeout_s: float = _TIMEOUT_S) -> str:
        """Wait until the command exits with the expected code; return its output."""
        assert self.process is not None
        code = self.process.wait(timeout_s)
        assert code == expect, (
            f"host {self.name}: exit code {code}, expected {expect}\n{self.output[-4000:]}"
        )
        return self.output


class Cluster:
    """Hosts on one network, and the training run on them.

    Args:
        folder: the folder of the run's files, at the same path on each host.
        shared: whether all hosts share one disk. Otherwise each host has a separate disk mounted at
            ``folder``, except that the endpoint host uses ``folder`` itself.
        endpoint: the number of the host that is the rendezvous endpoint.
    """

    def __init__(self, network: Any, folder: Path, shared: bool, endpoint: int) -> None:
        self.network, self.folder, self.endpoint = network, folder / "disk", endpoint
        self.folder.mkdir()
        self.names: dict[str, str] = {}
        self.names_by_host: dict[int, dict[str, str]] = {}
        self.hosts = []
        for number, (namespace, address) in enumerate(
            zip(network.hosts, network.addresses, strict=True)
        ):
            name = _NAMES[number]
            disk = None if shared or number == endpoint else folder / f"disk-{name}"
            if disk is not None:
                disk.mkdir()
            output_file = folder / f"output-{name}"
            self.hosts.append(Host(number, name, namespace, address, disk, output_file))
            etc = _ETC / namespace
            etc.mkdir(parents=True, exist_ok=True)
            # Without a name server, a name that is not in /etc/hosts fails to resolve immediately.
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
        """Start training on a host. ``endpoint``: a host name or an address, without a port."""
        rendezvous = (
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
            *rendezvous,
        ]
        return self.execute(number, [*command, *args], **environment)

    def execute(self, number: int, command: Sequence[str], **environment: str) -> Host:
        """Start a command on a host."""
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
    def set_name(self, name: str, address: str | None, *, only_on: int | None = None) -> None:
        """Change the address that a name resolves to on every host, including for running
        processes. None makes the name unknown.

        Args:
            only_on: number of the host on which the name has this address.
        """
        names = self.names if only_on is None else self.names_by_host.setdefault(only_on, {})
        names.pop(name, None)
        if address is not None:
            names[name] = address
        self._write_names()

    def _write_names(self) -> None:
        for host in self.hosts:
            names = self.names | self.names_by_host.get(host.number, {})
            lines = [
                "127.0.0.1 localhost",
                *(f"{address} {name}" for name, address in names.items()),
            ]
            # Written in place, because `ip netns exec` has bind-mounted this file over /etc/hosts.
            with open(_ETC / host.namespace / "hosts", "w") as file:
                file.write("\n".join(lines) + "\n")

    def set_link(self, number: int, up: bool) -> None:
        """Connect or disconnect the network cable of a host. Neither end's connections are
        closed."""
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
        """Change the address of a host."""
        host = self.hosts[number]
        for command in (("del", f"{host.address}/24"), ("add", f"{address}/24")):
            subprocess.run(
                ["ip", "-n", host.namespace, "addr", *command, "dev", "eth0"], check=True
            )
        host.address = address

    # -- the run's events
    def events(self, *types: str) -> list[dict[str, Any]]:
        """Return the events of these types, or all, from the event log on the endpoint's disk."""
        try:
            lines = (self.run / "events.jsonl").read_bytes().splitlines(keepends=True)
        except OSError:
            return []
        events = [json.loads(line) for line in lines if line.endswith(b"\n")]
        return [event for event in events if not types or event["type"] in types]

    @property
    def last_step(self) -> int:
        """The last step that the current attempt has logged; 0 if it has logged none."""
        log = self.events("run_start", "step")
        return 0 if not log or log[-1]["type"] == "run_start" else int(log[-1]["step"])

    def digest(self) -> str:
        """Return the digest of the latest checkpoint."""
        return digest(self.run)

    def losses(self) -> list[float]:
        """Return the losses in step order; of a repeated step, the last one."""
        losses = {event["step"]: event["loss"] for event in self.events("step")}
        return [losses[step] for step in sorted(losses)]

    def wait(
        self, condition: Callable[[], object], what: str, timeout_s: float = _TIMEOUT_S
    ) -> None:
        """Wait until the condition holds. Fail with the output of the hosts on a timeout, or if a
        command exits unexpectedly."""
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
        """Wait until the run has logged this step, in the given attempt (from 1) or in any."""

        def reached() -> bool:
            return self.last_step >= step and (
                attempt is None or len(self.events("run_start")) >= attempt
            )

        self.wait(reached, f"step {step}" + (f" of attempt {attempt}" if attempt else ""))

    def wait_for_start(self, number: int, world_size: int | None = None) -> None:
        """Wait for the start of attempt ``number`` (from 1), with the given number of ranks."""

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
def start_cluster(
    config: pytest.Config,
    folder: Path,
    num_hosts: int = 2,
    *,
    shared: bool = False,
    endpoint: int = 0,
    loss: float = 0.0,
) -> Iterator[Cluster]:
    """Create a cluster of hosts; at the end, kill their processes and remove them. Skips the test
    if this machine does not allow network namespaces."""
    with ExitStack() as stack:
        network = stack.enter_context(create_network(config, num_hosts, loss=loss))
        cluster = Cluster(network, folder, shared, endpoint)
        stack.callback(cluster.close)
        yield cluster
