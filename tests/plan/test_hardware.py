"""Sizes and devices by name."""

from __future__ import annotations

import pytest

from paceline.core.errors import ConfigError
from paceline.plan.hardware import TABLE, cpu_machine, find_device, named_machine, parse_size, recognise
from paceline.world.host import available_memory


def test_sizes() -> None:
    assert parse_size("80GB") == 80 * 10**9
    assert parse_size(" 24 GiB ") == 24 * 2**30
    assert parse_size("0.5tb") == 5 * 10**11


@pytest.mark.parametrize("text", ["24", "", "GB", "24 parsecs", "-3GB", "0GB", "1e3GB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError, match="--device-memory"):
        parse_size(text)


def test_devices_by_name() -> None:
    assert find_device("h100").name == "H100-SXM"
    assert find_device("rtx 4090").name == find_device("4090").name == "RTX-4090"
    assert find_device("A100-40GB").memory_bytes == 40 * 10**9
    assert [find_device(one.name) for one in TABLE] == list(TABLE)
    with pytest.raises(ConfigError, match="L40S"):
        find_device("L41")


@pytest.mark.parametrize(
    ("driver", "memory_gib", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", 79.2, "A100-80GB"),
        ("NVIDIA A100-PCIE-40GB", 39.4, "A100-40GB"),
        ("NVIDIA H100 80GB HBM3", 79.1, "H100-SXM"),
        ("NVIDIA H100 PCIe", 79.1, "H100-PCIe"),
        ("NVIDIA H200", 139.8, "H200"),
        ("NVIDIA GeForce RTX 3090", 23.6, "RTX-3090"),
        ("NVIDIA L4", 22.0, "L4"),
        ("NVIDIA L40S", 44.4, "L40S"),
        ("Tesla V100-SXM2-16GB", 15.8, "V100-16GB"),
        ("Tesla T4", 14.6, "T4"),
        ("AMD Instinct MI300X", 191.0, None),
    ],
)
def test_devices_as_the_driver_names_them(driver: str, memory_gib: float, name: str | None) -> None:
    found = recognise(driver, round(memory_gib * 2**30))
    assert (None if found is None else found.name) == name


def test_machines() -> None:
    named = named_machine(find_device("A100-80GB"), None, 8, low_precision=True)
    assert named.flops_s == pytest.approx(0.4 * 312e12)
    assert named.link_bytes_s == 300e9
    assert named_machine(find_device("A100-80GB"), None, 16, low_precision=True).link_bytes_s == 25e9
    by_size = named_machine(None, 24 * 10**9, 8, low_precision=False)
    assert by_size.name == "RTX-4090"
    assert "no device is named" in by_size.notes[0]
    cpu = cpu_machine(4, low_precision=False)
    assert 0 < cpu.memory_bytes <= available_memory() * 1.1 / 4
    assert cpu.flops_s > 0
