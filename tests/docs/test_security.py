"""Test the firewall rules of the security page in network namespaces."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from namespaces import create_network
from not_run import skip_with_summary

PAGE = Path(__file__).parents[2] / "docs" / "security.md"
_LISTEN = """
import socket, sys
listeners = [socket.create_server(("0.0.0.0", int(port))) for port in sys.argv[1:]]
print("ready", flush=True)
sys.stdin.read()
"""
_TRY_PORTS = """
import sys
from paceline.doctor.host_probe import try_port
print(*[try_port("192.0.2.1", int(port), timeout_s=0.5) for port in sys.argv[1:]], sep=",")
"""


@pytest.fixture
def network(pytestconfig: pytest.Config) -> Iterator[Any]:
    if shutil.which("nft") is None:
        skip_with_summary(
            pytestconfig,
            "nft",
            "with a firewall between namespaces: nft not found (apt install nftables)",
        )
    with create_network(pytestconfig, 3) as network:
        yield network


@contextmanager
def _open_ports(network: Any, *ports: int) -> Iterator[None]:
    command = network.on(0, [sys.executable, "-c", _LISTEN, *map(str, ports)])
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield
        process.communicate()


def _try_ports(network: Any, host: int, *ports: int) -> list[str]:
    command = network.on(host, [sys.executable, "-c", _TRY_PORTS, *map(str, ports)])
    return (
        subprocess.run(command, capture_output=True, text=True, check=True)
        .stdout.strip()
        .split(",")
    )


def _load_rules(network: Any, rules: str) -> None:
    subprocess.run(
        network.on(0, ["nft", "-f", "-"]), input=f"flush ruleset\n{rules}", text=True, check=True
    )


@pytest.mark.slow
def test_rules_admit_only_the_hosts_of_the_run(network: Any) -> None:
    by_address, by_interface = re.findall(
        r"^```nft\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    ports = (29500, 40000, 8080)
    with _open_ports(network, *ports):
        _load_rules(
            network, by_address.replace("10.0.0.1", "192.0.2.1").replace("10.0.0.2", "192.0.2.2")
        )
        assert _try_ports(network, 0, *ports) == ["open", "open", "open"]
        assert _try_ports(network, 1, *ports) == ["open", "open", "open"]
        assert _try_ports(network, 2, *ports) == ["no answer", "no answer", "open"]
        _load_rules(network, by_interface)
        assert _try_ports(network, 1, *ports) == ["no answer", "no answer", "open"]
        _load_rules(network, by_interface.replace("wg0", "eth0"))
        assert _try_ports(network, 1, *ports) == ["open", "open", "open"]
