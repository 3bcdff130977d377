"""Test the parsing of memory sizes and the table of devices."""

import pytest
from raised import raises_error

from paceline.core.errors import ConfigError
from paceline.core.processes import available_memory
from paceline.models.shape.dims import LanguageDims
from paceline.planner.devices import devices, find_device, recognize
from paceline.planner.machine.hardware import (
    cpu_machine,
    named_machine,
    parse_size,
    unknown_machine,
)
from paceline.planner.setup import TrainingSetup
from paceline.planner.time.rates import rates_of


def test_parse_size_reads_units() -> None:
    assert parse_size("80GB") == 80 * 10**9
    assert parse_size(" 24 GiB ") == 24 * 2**30
    assert parse_size("0.5tb") == 5 * 10**11


@pytest.mark.parametrize("text", ["24", "", "GB", "24 parsecs", "-3GB", "0GB", "1e3GB"])
def test_parse_size_rejects_invalid_sizes(text: str) -> None:
    with pytest.raises(ConfigError, match="--device-memory"):
        parse_size(text)


def find_name(name: str, memory_bytes: int | None = None) -> str:
    return find_device(name, memory_bytes)[0].name


def test_table_of_devices_is_complete_and_plausible() -> None:
    expected_names = (
        "A10 A10G A16 A30 A40 A100-40GB A100-80GB H100-PCIe H100-SXM H100-NVL H200 H20 GH200 B200"
        " L4 L20 L40 L40S T4 V100-16GB V100-32GB P100 RTX-3060 RTX-3070 RTX-3080 RTX-3090 RTX-4060"
        " RTX-4070 RTX-4080 RTX-4090 RTX-5070 RTX-5080 RTX-5090 RTX-6000-Ada MI210 MI250X MI300X"
    )
    for name in expected_names.split():
        assert find_name(name).startswith(name)
    assert len({row.name for row in devices()}) == len(devices())
    for row in devices():
        assert find_device(row.name) == (row, "")
        assert row.source
        assert row.interconnect
        assert 4e9 < row.memory_bytes < 400e9
        assert 1e11 < row.memory_bandwidth_bytes_s < 1e13
        for rate in (row.bfloat16_flops_s, row.float16_flops_s, row.tf32_flops_s):
            assert rate is None or row.float32_flops_s <= rate <= 40 * row.float32_flops_s
        assert row.network_bytes_s <= row.link_bytes_s <= row.memory_bandwidth_bytes_s
    without_bfloat16 = {row.name for row in devices() if not row.supports_bfloat16}
    assert {"T4", "V100-16GB", "V100-32GB", "P100-PCIe-16GB", "RTX-2080-Ti"} <= without_bfloat16
    assert not without_bfloat16 & {"A10", "A100-80GB", "RTX-3090", "MI210", "L4"}


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("a100 40gb", "A100-40GB"),
        ("rtx 4090", "RTX-4090"),
        ("4090", "RTX-4090"),
        ("Tesla T4", "T4"),
        ("NVIDIA A10G", "A10G"),
        ("RTX A4000", "RTX-A4000"),
        ("RTX 4090 Laptop GPU", "RTX-4090-Laptop"),
        ("rtx_4070-ti SUPER", "RTX-4070-Ti-Super"),
        ("RTX 3060 Ti", "RTX-3060-Ti"),
        ("H20", "H20"),
        ("RTX 6000 Ada", "RTX-6000-Ada"),
        ("Quadro RTX 6000", "Quadro-RTX-6000"),
    ],
)
def test_finds_devices_by_spelling(spelling: str, name: str) -> None:
    device, notice = find_device(spelling)
    assert (device.name, notice) == (name, "")


def test_ambiguous_name_is_resolved_by_memory_or_reported() -> None:
    device, notice = find_device("h100")
    assert device.name == "H100-SXM"
    assert (
        notice
        == "`--device h100` can be H100-SXM, H100-PCIe or H100-NVL: this plan is for H100-SXM"
    )
    assert find_name("A100") == "A100-80GB"
    assert find_name("A100", 40 * 10**9) == "A100-40GB"
    assert find_name("RTX 4060 Ti", 16 * 10**9) == "RTX-4060-Ti-16GB"


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("A1", "A10, A10G"),
        ("V1", "V100-32GB"),
        ("L41", "L40"),
        ("RTX 4090 Ti", "RTX-4090"),
        ("H", "H20"),
        ("GeForce", ""),
        ("", ""),
    ],
)
def test_rejects_partial_names(name: str, suggestion: str) -> None:
    with raises_error(ConfigError, code="unknown-device") as error:
        find_device(name)
    assert suggestion in str(error.value.allowed)


@pytest.mark.parametrize(
    ("driver", "memory_gib", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", 79.2, "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "A100-40GB"),
        ("NVIDIA A100-PCIE-40GB", 39.4, "A100-PCIe-40GB"),
        ("NVIDIA A100 80GB PCIe", 79.2, "A100-PCIe-80GB"),
        ("NVIDIA H100 80GB HBM3", 79.1, "H100-SXM"),
        ("NVIDIA H100 PCIe", 79.1, "H100-PCIe"),
        ("NVIDIA H100 NVL", 93.1, "H100-NVL"),
        ("NVIDIA H200", 139.8, "H200"),
        ("NVIDIA GH200 480GB", 95.0, "GH200-96GB"),
        ("NVIDIA B200", 178.4, "B200"),
        ("NVIDIA A10", 22.5, "A10"),
        ("NVIDIA A10G", 22.1, "A10G"),
        ("NVIDIA GeForce RTX 3090", 23.6, "RTX-3090"),
        ("NVIDIA GeForce RTX 3080", 9.8, "RTX-3080-10GB"),
        ("NVIDIA GeForce RTX 3080", 11.8, "RTX-3080-12GB"),
        ("NVIDIA GeForce RTX 3060 Ti", 7.8, "RTX-3060-Ti"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 15.7, "RTX-4090-Laptop"),
        ("NVIDIA RTX 6000 Ada Generation", 47.5, "RTX-6000-Ada"),
        ("NVIDIA RTX A6000", 47.5, "RTX-A6000"),
        ("Quadro RTX 6000", 23.6, "Quadro-RTX-6000"),
        ("NVIDIA L4", 22.0, "L4"),
        ("NVIDIA L40S", 44.4, "L40S"),
        ("Tesla V100-SXM2-16GB", 15.8, "V100-16GB"),
        ("Tesla V100-SXM2-32GB", 31.7, "V100-32GB"),
        ("Tesla V100-PCIE-16GB", 15.8, "V100-PCIe-16GB"),
        ("Tesla P100-PCIE-16GB", 15.9, "P100-PCIe-16GB"),
        ("Tesla T4", 14.6, "T4"),
        ("AMD Instinct MI300X", 191.7, "MI300X"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4.7, None),
        ("NVIDIA A10", 7.5, None),  # a partition of the device
        ("NVIDIA GeForce RTX 4090 Ti", 47.0, None),
        ("GRID A100-10C", 10.0, None),
        ("Some Accelerator 100", 24.0, None),
    ],
)
def test_recognizes_names_of_the_driver(driver: str, memory_gib: float, name: str | None) -> None:
    device = recognize(driver, round(memory_gib * 2**30))
    assert (None if device is None else device.name) == name


def test_machine_has_the_rates_of_its_device() -> None:
    a100, v100 = find_device("A100-80GB")[0], find_device("V100-32GB")[0]
    named = named_machine(a100, None, 8, "bfloat16")
    assert named.timed_as is a100
    assert named.link_bytes_s == 300e9
    assert named_machine(a100, None, 16, "bfloat16").link_bytes_s == 25e9
    no_bfloat16 = named_machine(v100, None, 1, "bfloat16")
    assert "no bfloat16 units" in no_bfloat16.notes[0]
    by_size = named_machine(None, 24 * 10**9, 8, None)
    assert by_size.name == "RTX-4090"
    assert "no device is named" in by_size.notes[0]
    unknown = unknown_machine("Some Accelerator 100", 20 * 10**9, 2)
    assert (unknown.memory_bytes, unknown.rates_known) == (20 * 10**9, False)
    assert "rates are not known" in unknown.notes[0]
    cpu = cpu_machine(4, None)
    assert 0 < cpu.memory_bytes <= available_memory() * 1.1 / 4
    rates = cpu.rates_of(4)
    assert rates is not None
    assert rates.num_ranks == 4
    assert rates.products["float32"].flops_s > 0


def test_tf32_is_used_where_the_device_has_it() -> None:
    a100, t4 = find_device("A100-80GB")[0], find_device("T4")[0]
    setup = TrainingSetup(LanguageDims(64, 1, 1, 1, 64, 64, 64, 64))
    assert rates_of(setup, a100, "tf32").flops_s == 156e12
    assert rates_of(setup, a100, None).flops_s == 19.5e12
    without = named_machine(t4, None, 1, "tf32")
    assert rates_of(setup, t4, "tf32").flops_s == rates_of(setup, t4, None).flops_s
    assert any("T4 has no tf32 units" in note for note in without.notes)
