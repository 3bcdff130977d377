"""Hosts as network namespaces of this machine, joined by links of a given rate, delay and loss.
Linux, root, iproute2.

Nothing outside these namespaces is changed, and they are gone with the :class:`Network`, whatever
ends it; those of a process that was killed are removed by the next one.
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
    """The network cannot be built here: what is missing and what to do. The usage is at fault, or
    the machine."""


@dataclass(frozen=True)
class Link:
    """What each host's connection does to all that it sends.

    Args:
        delay_s: one way; a round trip takes twice as long.
        loss: the chance of each packet to be lost, 0 to 1.
    """

    rate_bits_per_s: float
    delay_s: float = 0.0
    loss: float = 0.0

    @property
    def text(self) -> str:
        loss = f", {100 * self.loss:g} % lost" if self.loss else ""
        return f"{self.rate_bits_per_s / 1e6:g} Mbit/s, {1e3 * self.delay_s:g} ms each way{loss}"


def parse_rate(text: str) -> float:
    """``100mbit`` → bits a second.

    Raises:
        ValueError: with what is allowed.
    """
    return _parse(text, _UNITS, "a rate such as 100mbit, 1gbit or 800kbit", lowest=1e4)


def parse_delay(text: str) -> float:
    """``10ms`` → seconds; 0 needs no unit. ValueError as :func:`parse_rate`."""
    return (
        0.0 if text == "0" else _parse(text, _TIMES, "a time such as 10ms, 500us or 0", lowest=0.0)
    )


def parse_loss(text: str) -> float:
    """``0.5%`` or ``0.5``, in per cent as in tc → 0.005. ValueError as :func:`parse_rate`."""
    try:
        share = float(text.removesuffix("%")) / 100
    except ValueError:
        share = -1.0
    if not 0 <= share < 0.5:
        raise ValueError(
            f"{text!r}; allowed: per cent of the packets, from 0 to less than 50, such as 0 or 0.5%"
        )
    return share


def _parse(text: str, units: dict[str, float], allowed: str, lowest: float) -> float:
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([a-z]+)", text.strip().lower())
    value = float(match[1]) * units[match[2]] if match and match[2] in units else -1.0
    if value < lowest:
        raise ValueError(f"{text!r}; allowed: {allowed}")
    return value


def check_machine() -> None:
    """Raise NetworkError where this machine, or this user, cannot make namespaces."""
    if sys.platform != "linux":
        raise NetworkError(
            "hosts are network namespaces, which Linux alone has. To fix: run this on Linux"
        )
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise NetworkError(
            f"{' and '.join(missing)} not found. To fix: install iproute2 (on Debian and Ubuntu:"
            " apt install iproute2)"
        )
    if os.geteuid() != 0:
        raise NetworkError(
            "network namespaces need root to be made. To fix: run it as root (sudo .venv/bin/python"
            " benchmarks/slow_network.py)"
        )


class Network:
    """Hosts h0, h1, … each with one device and one address; a context manager.

    Where a packet shall be delayed or lost, the kernel's netem does it; where the kernel has none,
    a process that joins TUN devices (see link.py). The rate is always kept by tbf, on each host's
    device.
    """

    def __init__(self, num_hosts: int, link: Link) -> None:
        self.link = link
        self.hosts = [f"{_PREFIX}-{os.getpid()}-h{number}" for number in range(num_hosts)]
        self.switch = f"{_PREFIX}-{os.getpid()}-switch"
        # RFC 5737: nobody's
        self.addresses = [f"192.0.2.{number + 1}" for number in range(num_hosts)]
        self.how = ""
        self._stack = ExitStack()
        self._log: TextIO | None = None

    def __enter__(self) -> Network:
        check_machine()
        remove_left_overs()
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

    # -- building
    def _build(self) -> None:
        for name in (*self.hosts, self.switch):
            _ip("netns", "add", name)
            self._stack.callback(_remove, name)
            _ip("-n", name, "link", "set", "lo", "up")
        shaped = self.link.delay_s > 0 or self.link.loss > 0
        has_netem = shaped and self._has_netem()
        if shaped and not has_netem:
            self._join_by_process()
            self.how = "TUN devices and tbf; the delay by a process, for this kernel has no netem"
        else:
            self._join_by_bridge()
            self.how = "veth, a bridge, tbf" + (" and netem" if has_netem else "")
        for host, address in zip(self.hosts, self.addresses, strict=True):
            _ip("-n", host, "addr", "add", f"{address}/24", "dev", DEVICE)
            _ip("-n", host, "link", "set", DEVICE, "up")
            self._shape(host, has_netem)

    def _has_netem(self) -> bool:
        tried = (
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
        return subprocess.run(tried, capture_output=True).returncode == 0

    def _join_by_bridge(self) -> None:
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

    def _join_by_process(self) -> None:
        ends = [
            f"{host}:{address}" for host, address in zip(self.hosts, self.addresses, strict=True)
        ]
        command = [
            sys.executable,
            str(LINK),
            "forward",
            repr(self.link.delay_s),
            repr(self.link.loss),
            *ends,
        ]
        process = start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self._stack.callback(end, [process])
        if process.stdout.readline().strip() != "ready":
            end([process])
            why = process.stderr.read().strip().splitlines()[-1:]
            raise NetworkError(
                f"no TUN device could be made ({''.join(why)}), and this kernel has no netem. To"
                " fix: load one of them (modprobe tun, modprobe sch_netem), or leave out --delay"
                " and --loss"
            )

    def _shape(self, host: str, has_netem: bool) -> None:
        link = self.link
        # A millisecond at the full rate, but no less than the largest packets: then the queue is
        # short and the rate exact.
        burst = max(16 << 10, int(link.rate_bits_per_s / 8 * 1e-3))
        rate = ("rate", f"{link.rate_bits_per_s:.0f}bit", "burst", str(burst), "latency", "50ms")
        _run("tc", "-n", host, "qdisc", "add", "dev", DEVICE, "root", "handle", "1:", "tbf", *rate)
        if has_netem:
            loss = ("loss", f"{100 * link.loss:g}%") if link.loss else ()
            # What waits for its delay, twice over.
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
        """The command that runs ``command`` on a host."""
        return ["ip", "netns", "exec", self.hosts[host], *command]

    def sent_bytes(self) -> list[int]:
        """Bytes that each host's device has sent so far, with the headers of IP and TCP and with
        what was sent again."""
        shown = [_ip("-n", host, "-s", "-j", "link", "show", DEVICE) for host in self.hosts]
        return [int(json.loads(text)[0]["stats64"]["tx"]["bytes"]) for text in shown]

    def measure(self) -> dict[str, Any]:
        """The link from the last host to the first as it is: ``round_trip_s``,
        ``stream_bits_per_s`` of one TCP stream, how the link is made, and the kernel's settings
        that matter."""
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
            end([server])
        settings = ("tcp_congestion_control", "tcp_slow_start_after_idle")
        values = [
            _run(*self.on(0, ["cat", f"/proc/sys/net/ipv4/{setting}"])).strip()
            for setting in settings
        ]
        return {**result, "how": self.how, **dict(zip(settings, values, strict=True))}


# -- processes and namespaces


def start(command: list[str], **options: Any) -> Any:
    """A process that does not outlive this one and that a Ctrl-C in the terminal does not reach."""
    return subprocess.Popen(command, start_new_session=True, preexec_fn=end_with_parent, **options)


def end(processes: list[Any], grace_s: float = _GRACE_S) -> None:
    """End those that still run: politely, then by force."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    for process in processes:
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def remove_left_overs() -> None:
    """Remove the namespaces of processes that are gone without having done so."""
    for name in re.findall(rf"^{_PREFIX}-\d+-\w+", _ip("netns", "list"), re.MULTILINE):
        if not Path(f"/proc/{name.split('-')[1]}").exists():
            _remove(name)
            print(f"removed the namespace {name} of a process that is gone", file=sys.stderr)


def _remove(name: str) -> None:
    """A namespace, and what still runs in it."""
    with suppress(NetworkError):
        for pid in _ip("netns", "pids", name).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        _ip("netns", "del", name)


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise NetworkError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout
