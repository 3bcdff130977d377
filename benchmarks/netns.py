"""Create hosts as network namespaces, connected by links with a configurable rate, delay and loss.
Needs Linux, root and iproute2.

Nothing outside these namespaces is changed. Leaving :class:`Network` removes them. If a process is
killed, the next one removes its namespaces.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from paceline.core.processes import end_with_parent

LINK = Path(__file__).resolve().parent / "link.py"
DEVICE = "eth0"  # as in link.py
MAX_HOSTS = 16
_PREFIX = "paceline"
_PORT = 5201
_MEASURE_S = 3.0
_GRACE_S = 30.0
_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


class NetworkError(Exception):
    """The network cannot be created. The message states the reason and how to fix it."""


@dataclass(frozen=True)
class Link:
    """The properties of the connection of each host; they apply to the packets that it sends.

    Args:
        delay_s: delay in one direction; a round trip takes twice as long.
        loss: probability that a packet is lost, between 0 and 1.
    """

    rate_bits_per_s: float
    delay_s: float = 0.0
    loss: float = 0.0

    @property
    def text(self) -> str:
        loss = f", {100 * self.loss:g} % lost" if self.loss else ""
        return f"{self.rate_bits_per_s / 1e6:g} Mbit/s, {1e3 * self.delay_s:g} ms each way{loss}"


def parse_rate(text: str) -> float:
    """Return a rate such as ``100mbit`` in bits per second.

    Raises:
        ValueError: not a rate; the message states the accepted forms.
    """
    return _parse(text, _UNITS, "a rate such as 100mbit, 1gbit or 800kbit", lowest=1e4)


def parse_delay(text: str) -> float:
    """Return a time such as ``10ms`` in seconds; 0 needs no unit. Raise ValueError like
    :func:`parse_rate`."""
    return (
        0.0 if text == "0" else _parse(text, _TIMES, "a time such as 10ms, 500us or 0", lowest=0.0)
    )


def parse_loss(text: str) -> float:
    """Return the loss rate for a percentage such as ``0.5%`` or ``0.5``: 0.005. Raise ValueError
    like :func:`parse_rate`."""
    try:
        share = float(text.removesuffix("%")) / 100
    except ValueError:
        share = -1.0
    if not 0 <= share < 0.5:
        raise ValueError(
            f"{text!r}: expected a percentage of packets from 0 to less than 50, such as 0 or 0.5%"
        )
    return share


def _parse(text: str, units: dict[str, float], expected: str, lowest: float) -> float:
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([a-z]+)", text.strip().lower())
    value = float(match[1]) * units[match[2]] if match and match[2] in units else -1.0
    if value < lowest:
        raise ValueError(f"{text!r}: expected {expected}")
    return value


def check_machine() -> None:
    """Raise NetworkError if this machine or this user cannot create network namespaces."""
    if sys.platform != "linux":
        raise NetworkError(
            "network namespaces are only available on Linux. To fix: run this on Linux"
        )
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise NetworkError(
            f"{' and '.join(missing)} not found. To fix: install iproute2 (on Debian and Ubuntu:"
            " apt install iproute2)"
        )
    if os.geteuid() != 0:
        raise NetworkError(
            "creating network namespaces needs root. To fix: run this as root (sudo"
            " .venv/bin/python"
            " benchmarks/slow_network.py)"
        )


class Network:
    """A context manager that creates hosts h0, h1, …, each with one device and one address.

    Delay and loss use the kernel's netem. If the kernel has none, a process forwards packets
    between TUN devices (see link.py). The rate is always enforced by tbf on the device of each
    host.
    """

    def __init__(self, num_hosts: int, link: Link) -> None:
        self.link = link
        self.hosts = [f"{_PREFIX}-{os.getpid()}-h{number}" for number in range(num_hosts)]
        self.switch = f"{_PREFIX}-{os.getpid()}-switch"
        # reserved for documentation (RFC 5737)
        self.addresses = [f"192.0.2.{number + 1}" for number in range(num_hosts)]
        self.description = ""
        self._stack = ExitStack()
        self._log: TextIO | None = None

    def __enter__(self) -> Network:
        check_machine()
        remove_stale_namespaces()
        try:
            self._build()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    # -- setup
    def _build(self) -> None:
        for name in (*self.hosts, self.switch):
            _ip("netns", "add", name)
            self._stack.callback(_remove, name)
            _ip("-n", name, "link", "set", "lo", "up")
        needs_shaping = self.link.delay_s > 0 or self.link.loss > 0
        has_netem = needs_shaping and self._has_netem()
        if needs_shaping and not has_netem:
            self._connect_with_forwarder()
            self.description = (
                "TUN devices, tbf, and a forwarding process (the kernel has no netem)"
            )
        else:
            self._connect_with_bridge()
            self.description = "veth, a bridge and tbf" + (" with netem" if has_netem else "")
        for host, address in zip(self.hosts, self.addresses, strict=True):
            _ip("-n", host, "addr", "add", f"{address}/24", "dev", DEVICE)
            _ip("-n", host, "link", "set", DEVICE, "up")
            self._shape(host, has_netem)

    def _has_netem(self) -> bool:
        command = (
            "tc",
            "-n",
            self.switch,
            "qdisc",
            "add",
            "dev",
            "lo",
            "root",
            "netem",
            "delay",
            "1ms",
        )
        return subprocess.run(command, capture_output=True).returncode == 0

    def _connect_with_bridge(self) -> None:
        _ip("-n", self.switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", self.switch, "link", "set", "br0", "up")
        for number, host in enumerate(self.hosts):
            _ip(
                "link",
                "add",
                DEVICE,
                "netns",
                host,
                "type",
                "veth",
                "peer",
                "name",
                f"p{number}",
                "netns",
                self.switch,
            )
            _ip("-n", self.switch, "link", "set", f"p{number}", "master", "br0", "up")

    def _connect_with_forwarder(self) -> None:
        endpoints = [
            f"{host}:{address}" for host, address in zip(self.hosts, self.addresses, strict=True)
        ]
        command = [
            sys.executable,
            str(LINK),
            "forward",
            repr(self.link.delay_s),
            repr(self.link.loss),
            *endpoints,
        ]
        process = start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self._stack.callback(terminate, [process])
        if process.stdout.readline().strip() != "ready":
            terminate([process])
            reason = process.stderr.read().strip().splitlines()[-1:]
            raise NetworkError(
                f"cannot create a TUN device ({''.join(reason)}), and the kernel has no netem."
                " To fix:"
                " load one of the modules (modprobe tun, modprobe sch_netem), or omit --delay and"
                " --loss"
            )

    def _shape(self, host: str, has_netem: bool) -> None:
        link = self.link
        # A burst of one millisecond, but at least as large as the largest packet, keeps the queue
        # short and the rate exact.
        burst = max(16 << 10, int(link.rate_bits_per_s / 8 * 1e-3))
        rate = ("rate", f"{link.rate_bits_per_s:.0f}bit", "burst", str(burst), "latency", "50ms")
        _run("tc", "-n", host, "qdisc", "add", "dev", DEVICE, "root", "handle", "1:", "tbf", *rate)
        if has_netem:
            loss = ("loss", f"{100 * link.loss:g}%") if link.loss else ()
            # Twice the number of packets that can be in flight.
            packets = str(
                max(1000, int(2 * link.rate_bits_per_s * (link.delay_s + 0.05) / 8 / 1500))
            )
            netem = ("netem", "limit", packets, "delay", f"{1e6 * link.delay_s:.0f}us", *loss)
            _run(
                "tc",
                "-n",
                host,
                "qdisc",
                "add",
                "dev",
                DEVICE,
                "parent",
                "1:1",
                "handle",
                "10:",
                *netem,
            )

    # -- use
    def on(self, host: int, command: list[str]) -> list[str]:
        """Return the command line that runs ``command`` on a host."""
        return ["ip", "netns", "exec", self.hosts[host], *command]

    def sent_bytes(self) -> list[int]:
        """Return the bytes that the device of each host has sent so far, including IP and TCP
        headers and retransmissions."""
        outputs = [_ip("-n", host, "-s", "-j", "link", "show", DEVICE) for host in self.hosts]
        return [int(json.loads(text)[0]["stats64"]["tx"]["bytes"]) for text in outputs]

    def measure(self) -> dict[str, Any]:
        """Measure the link from the last host to the first.

        Returns ``round_trip_s``, ``stream_bits_per_s`` of one TCP stream, ``how`` the link is
        built, and the relevant kernel settings.
        """
        address = (self.addresses[0], str(_PORT))
        command = self.on(0, [sys.executable, str(LINK), "serve", *address])
        server = start(command, stdout=subprocess.PIPE, text=True)
        try:
            server.stdout.readline()
            client = self.on(
                len(self.hosts) - 1,
                [sys.executable, str(LINK), "measure", *address, str(_MEASURE_S)],
            )
            result = json.loads(_run(*client))
        finally:
            terminate([server])
        settings = ("tcp_congestion_control", "tcp_slow_start_after_idle")
        values = [
            _run(*self.on(0, ["cat", f"/proc/sys/net/ipv4/{setting}"])).strip()
            for setting in settings
        ]
        return {**result, "how": self.description, **dict(zip(settings, values, strict=True))}


# -- processes and namespaces


def start(command: list[str], **options: Any) -> Any:
    """Start a process that ends with this one and that does not receive Ctrl-C from the
    terminal."""
    return subprocess.Popen(command, start_new_session=True, preexec_fn=end_with_parent, **options)


def terminate(processes: list[Any], grace_s: float = _GRACE_S) -> None:
    """Terminate the processes that are still running, and kill them after the grace period."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    for process in processes:
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def remove_stale_namespaces() -> None:
    """Remove the namespaces of processes that no longer exist."""
    for name in re.findall(rf"^{_PREFIX}-\d+-\w+", _ip("netns", "list"), re.MULTILINE):
        if not Path(f"/proc/{name.split('-')[1]}").exists():
            _remove(name)
            print(
                f"removed the namespace {name} of a process that no longer exists", file=sys.stderr
            )


def _remove(name: str) -> None:
    """Remove a namespace and kill the processes in it."""
    with suppress(NetworkError):
        for pid in _ip("netns", "pids", name).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        _ip("netns", "del", name)


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _run(*command: str) -> str:
    completed = subprocess.run(command, capture_output=True, text=True)
    if completed.returncode != 0:
        raise NetworkError(f"`{' '.join(command)}` failed: {completed.stderr.strip()}")
    return completed.stdout
