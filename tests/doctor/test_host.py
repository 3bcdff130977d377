"""Test the checks of a single host under real conditions."""

import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.config.load import load_config
from paceline.core.network import interfaces
from paceline.distributed.devices import cpu_cores
from paceline.doctor.checks import (
    check_clock,
    check_disk,
    check_driver,
    check_interface,
    check_packages,
    check_writing,
    existing,
    nvidia_driver,
)
from paceline.launch.passes.host_checks import (
    check_open_files,
    check_port,
    check_shared_memory,
    check_threads,
    quick_checks,
)
from paceline.planner.machine import profile as machine_profile
from paceline.planner.machine.profile import DeviceRates, MeasuredLink, ProductCurve


def test_warns_about_too_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", str(cpu_cores()))
    assert check_threads(1).ok
    check = check_threads(2)
    assert not check.ok
    assert not check.fatal
    assert f"OMP_NUM_THREADS={cpu_cores()}" in check.value
    assert f"OMP_NUM_THREADS={max(1, cpu_cores() // 2)}" in str(check.advice)


def test_warns_about_low_open_files_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        check = check_open_files()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not check.ok
    assert "256" in check.value
    assert "ulimit -n" in str(check.advice)


def test_shared_memory_check_needs_loader_workers(tmp_path: Path) -> None:
    assert check_shared_memory(2, 0, accelerator=False).ok
    script = (
        "from paceline.launch.passes import host_checks as checks; import pathlib; checks._SHARED ="
        " pathlib.Path('/')\nchecks._MIN_SHARED_BYTES = 1 << 60\nprint("
        "checks.check_shared_memory(2, 2, False).ok, checks.check_shared_memory(2, 0, False).ok)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "True"]


def test_clock_check() -> None:
    check = check_clock()
    assert check.ok
    assert "synchronized" in check.value or check.value == "not known"


def test_missing_interface_is_fatal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ("lo", "127.0.0.1") in list(interfaces())
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch7")
    check = check_interface()
    assert check.fatal
    assert "GLOO_SOCKET_IFNAME=nosuch7" in check.value
    assert "lo" in str(check.advice)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert check_interface().ok


def test_free_port_check() -> None:
    assert check_port().ok


def test_reports_package_of_wrong_version(tmp_path: Path) -> None:
    assert check_packages().ok
    folder = tmp_path / "rich-1.0.dist-info"  # shadows the installed package
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: rich\nVersion: 1.0\n")
    script = (
        "from paceline.doctor.checks import check_packages; check = check_packages();"
        " print(check.fatal, check.value, '|', check.advice)"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=env
    )
    assert done.stdout.startswith("True rich 1.0 is installed, rich")
    assert ">=13.7 is required" in done.stdout
    assert "pip install --upgrade 'paceline'" in done.stdout


def test_reads_nvidia_driver_version(tmp_path: Path) -> None:
    file = tmp_path / "version"
    assert nvidia_driver(file) is None
    file.write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Tue Jan 14 2026\nGCC version:"
        " 12\n"
    )
    assert nvidia_driver(file) == "570.86.15"


def test_missing_device_is_fatal() -> None:
    import torch

    assert check_driver("cpu").ok
    if not torch.accelerator.is_available():
        assert check_driver("cuda").fatal


def test_disk_space_check(tmp_path: Path) -> None:
    enough = check_disk(tmp_path / "not" / "yet", 1000, 1000, 2)
    assert enough.ok
    assert str(tmp_path) in enough.value
    assert check_disk(tmp_path, 1 << 60, 0, 1).fatal
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    tight = check_disk(tmp_path, free // 2, 0, 4)
    assert not tight.ok
    assert not tight.fatal
    unlimited = check_disk(tmp_path, free // 4, 0, None)
    assert unlimited.ok
    assert "all of them are kept" in unlimited.value


def test_unwritable_folder_is_fatal(tmp_path: Path) -> None:
    assert check_writing("output_dir", tmp_path / "run").ok
    assert list(tmp_path.iterdir()) == []
    assert existing(tmp_path / "a" / "b") == tmp_path
    assert check_writing("output_dir", Path("/proc/self")).fatal


def test_profile_is_only_used_on_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert machine_profile.read("cpu") is None
    path = machine_profile.save("cpu", MeasuredLink(2, 1, 1e-4, 1e9))
    profile = machine_profile.read("cpu")
    assert profile is not None
    assert profile.link is not None
    assert (profile.host, profile.link.bandwidth_bytes_s) == (socket.gethostname(), 1e9)
    assert machine_profile.read("cuda") is None
    path.write_text(path.read_text().replace(socket.gethostname(), "another"))
    assert machine_profile.read("cpu") is None
    path.write_text("{")
    assert machine_profile.read("cpu") is None


def test_planner_reads_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.planner.machine.local import local_machine

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = local_machine(2, True, False)
    machine_profile.save("cpu", MeasuredLink(2, 1, 1e-4, 123e6))
    after = local_machine(2, True, False)
    assert after.link_bytes_s == 123e6 != before.link_bytes_s
    assert any("paceline doctor" in note for note in after.notes)
    assert local_machine(1, True, False).notes == before.notes


def test_planner_uses_measured_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.planner.machine.local import local_machine

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    alone, both = (
        DeviceRates(ranks, {"float32": ProductCurve(rate, 8.0, 16.0)}, 1e9, 1e10, 1e-6)
        for ranks, rate in ((1, 8e10), (2, 5e10))
    )
    machine_profile.save("cpu", None, [alone])
    machine_profile.save("cpu", MeasuredLink(2, 1, 1e-4, 1e9), [both])
    machine = local_machine(2, True, None)
    assert machine.rates_of(1) == alone
    assert machine.rates_of(2) == both
    scaled = machine.rates_of(4)
    assert scaled is not None
    assert scaled.products["float32"] == ProductCurve(2.5e10, 8.0, 16.0)
    assert scaled.operation_s == both.operation_s
    assert machine.message_s == 1e-4


def test_checks_extras_that_the_config_needs() -> None:
    config = load_config(
        None,
        {
            "model": "builtin:qwen2-micro",
            "dataset": "builtin:python-docs",
            "report_to": ["tensorboard"],
        },
    ).config
    assert "tensorboard" in check_packages(config).value
    assert "tensorboard" not in check_packages().value


def test_quick_checks_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(
        None, {"model": "builtin:qwen2-micro", "dataset": "builtin:python-docs"}
    ).config
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", str(4 * cpu_cores()))
    assert [check.name for check in quick_checks(config, "cpu", 2)] == ["threads"]
    assert quick_checks(config, "cuda", 2) == []
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert quick_checks(config, "cpu", 2) == []
