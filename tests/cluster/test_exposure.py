"""Test the warnings about a rendezvous that is reachable from the internet."""

import psutil
import pytest

from paceline.cluster.endpoint import is_public, public_address_warning, public_listener_warning


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "2001:4860:4860::8888", "::ffff:8.8.8.8", "[2001:4860:4860::8888]"]
)
def test_public_address_is_warned_about(address: str) -> None:
    assert is_public(address)
    warning = public_address_warning(address)
    assert warning is not None
    assert address in warning
    assert "run code" in warning


_NOT_PUBLIC = (
    "10.0.0.1 172.16.3.4 192.168.1.1 100.64.0.1 127.0.0.1 169.254.1.1 0.0.0.0 224.0.1.5 ::1 fd00::1"
    " fe80::1%eth0 ::ffff:10.0.0.1 2001:db8::1 ff0e::1 node-0.trainer"
)


@pytest.mark.parametrize("address", ["", *_NOT_PUBLIC.split()])
def test_private_address_is_not_warned_about(address: str) -> None:
    assert not is_public(address)
    assert public_address_warning(address) is None


def test_warns_about_public_address_of_endpoint_host() -> None:
    warning = public_listener_warning(
        29500, ["127.0.0.1", "10.0.0.1", "8.8.4.4", "00:16:3e:00:00:01"]
    )
    assert warning is not None
    assert "port 29500 of all addresses of this host, including the public 8.8.4.4." in warning
    assert public_listener_warning(29500, ["127.0.0.1", "10.0.0.1", "00:16:3e:00:00:01"]) is None


def test_reads_local_interfaces() -> None:
    addresses = [entry.address for entries in psutil.net_if_addrs().values() for entry in entries]
    assert (public_listener_warning(29500) is not None) == any(
        is_public(address) for address in addresses
    )
