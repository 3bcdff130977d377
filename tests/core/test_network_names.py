"""Addresses of this host."""

import ipaddress

import pytest

from paceline.core.network import is_local_address, names_loopback, network_address


@pytest.mark.parametrize(
    ("name", "address", "expected"),
    [
        ("gpu001", "127.0.1.1", True),
        ("gpu001", "10.0.0.1", False),
        ("localhost", "127.0.0.1", False),
        ("127.0.0.1", "127.0.0.1", False),
        ("::1", "::1", False),
    ],
)
def test_names_of_this_host_that_others_cannot_use(name: str, address: str, expected: bool) -> None:
    assert names_loopback(name, address) == expected


def test_address_towards_other_hosts() -> None:
    address = network_address()
    assert address is None or (
        is_local_address(address) and not ipaddress.ip_address(address).is_loopback
    )
