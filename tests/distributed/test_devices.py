"""The choice of devices: the requested ones, or an error."""

from pathlib import Path

import pytest
import torch
from raised import raises_error

from paceline.config.schema.parallel import Parallel
from paceline.core.errors import ConfigError
from paceline.distributed import devices
from paceline.distributed.devices import (
    check_several_ranks,
    choose_devices,
    container_cores,
    cpu_cores,
)
from paceline.parallel.registry import uses_one_device


def notice_text(chosen: devices.Devices) -> str:
    return " | ".join(text for _, text in chosen.notices)


def expect_config_error(parallel: Parallel, num_launched: int | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        choose_devices(parallel, num_launched, uses_one_device(parallel))
    return str(caught.value)


@pytest.fixture(autouse=True)
def all_devices_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the variables that limit the visible devices; tests hide GPUs with them."""
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a machine without an accelerator."""
    monkeypatch.setattr(devices, "accelerators", lambda: (None, []))


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a machine with four GPUs."""
    monkeypatch.setattr(
        devices, "accelerators", lambda: ("cuda", [f"Card {index}" for index in range(4)])
    )


# -- the CPU
def test_cpu_on_request() -> None:
    chosen = choose_devices(Parallel(device="cpu"))
    assert (chosen.type, chosen.count) == ("cpu", min(2, cpu_cores()))
    assert "devices: CPU (`parallel.device: cpu`)" in notice_text(chosen)


def test_warns_about_more_ranks_than_cores() -> None:
    count = cpu_cores() + 1
    chosen = choose_devices(Parallel(device="cpu", num_gpus=count))
    assert chosen.count == count
    assert chosen.notices[-1][0] == "warning"
    assert f"{count} CPU ranks share {cpu_cores()} cores" in notice_text(chosen)


@pytest.mark.usefixtures("no_gpu")
def test_falls_back_to_cpu_without_a_gpu_and_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = choose_devices(Parallel())
    assert (chosen.type, chosen.count) == ("cpu", min(2, cpu_cores()))
    assert "CPU (no GPU was found)" in notice_text(chosen)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES=''" in notice_text(choose_devices(Parallel()))


@pytest.mark.usefixtures("no_gpu")
def test_rejects_gpus_that_are_missing() -> None:
    text = expect_config_error(Parallel(num_gpus=4))
    assert "`parallel.num_gpus: 4`: no GPU was found" in text
    assert "set `parallel.device=cpu` to run 4 ranks" in text
    assert "no accelerator was found" in expect_config_error(Parallel(device="cuda"))
    assert "no accelerator was found" in expect_config_error(
        Parallel(device="cuda", num_gpus=1, mode="single")
    )
    assert "no GPU was found" in expect_config_error(Parallel(num_gpus=1, mode="single"))


def test_single_uses_one_device() -> None:
    parallel = Parallel(device="cpu", mode="single")
    assert choose_devices(parallel, single_device=uses_one_device(parallel)).count == 1
    assert (
        "is not supported with `parallel.mode: single`: it trains on one device"
        in expect_config_error(Parallel(device="cpu", mode="single", num_gpus=2))
    )


# -- accelerators
@pytest.mark.usefixtures("four_gpus")
def test_uses_all_visible_gpus_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    chosen = choose_devices(Parallel())
    assert (chosen.type, chosen.count) == ("cuda", 4)
    assert (
        "4 of 4 visible (CUDA_VISIBLE_DEVICES='0,1,2,3'): cuda:0 Card 0, cuda:1 Card 1"
        in notice_text(chosen)
    )
    single = Parallel(mode="single")
    assert choose_devices(single, single_device=uses_one_device(single)).count == 1
    chosen_three = choose_devices(Parallel(device="cuda", num_gpus=3))
    assert (chosen_three.count, chosen_three.names) == (3, ["Card 0", "Card 1", "Card 2"])
    assert "3 of 4 visible" in notice_text(chosen_three)


@pytest.mark.usefixtures("four_gpus")
def test_rejects_more_gpus_than_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    text = expect_config_error(Parallel(num_gpus=8))
    for part in (
        "`parallel.num_gpus: 8`",
        "only 4 × cuda visible",
        "'4,5,6,7'",
        "Allowed: 1 to 4",
        "`parallel.num_gpus=4`",
    ):
        assert part in text
    assert "this machine has 4 × cuda" in expect_config_error(Parallel(device="xpu"))


# -- an outer launcher
def test_uses_the_number_of_ranks_of_an_outer_launcher() -> None:
    assert choose_devices(Parallel(device="cpu"), num_launched=3).count == 3
    assert choose_devices(Parallel(device="cpu", num_gpus=3), num_launched=3).count == 3
    text = expect_config_error(Parallel(device="cpu", num_gpus=2), num_launched=3)
    assert "the outer launcher, which started 3 ranks" in text
    assert "--nproc-per-node 2" in text


@pytest.mark.usefixtures("four_gpus")
def test_rejects_ranks_of_an_outer_launcher_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    text = expect_config_error(Parallel(), num_launched=8)
    for part in (
        "started 8 ranks on this host",
        "sees only 4 × cuda",
        "'0,1,2,3'",
        "--gpus-per-node",
    ):
        assert part in text
    assert choose_devices(Parallel(), num_launched=4).count == 4


def test_listing_accelerators_initializes_no_device() -> None:
    kind, names = devices.accelerators()
    assert (kind is None) == (names == [])
    assert not torch.cuda.is_initialized()


# -- other accelerators
@pytest.mark.parametrize(("kind", "count"), [("xpu", 2), ("mps", 1), ("cuda", 4)])
def test_any_accelerator_of_torch_is_accepted(
    monkeypatch: pytest.MonkeyPatch, kind: str, count: int
) -> None:
    monkeypatch.setattr(devices, "accelerators", lambda: (kind, ["Card"] * count))
    for device in ("auto", kind):
        chosen = choose_devices(Parallel(device=device))
        assert (chosen.type, chosen.count) == (kind, count)
    assert f"only {count} × {kind}" in expect_config_error(Parallel(device=kind, num_gpus=8))
    other = "cuda" if kind == "xpu" else "xpu"
    assert f"this machine has {count} × {kind}" in expect_config_error(Parallel(device=other))


@pytest.mark.parametrize(
    ("variable", "value"),
    [("HIP_VISIBLE_DEVICES", "0"), ("ROCR_VISIBLE_DEVICES", "1"), ("ZE_AFFINITY_MASK", "0.1")],
)
def test_variables_that_limit_devices_are_named(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setattr(devices, "accelerators", lambda: (None, []))
    monkeypatch.setenv(variable, value)
    assert f"{variable}='{value}'" in expect_config_error(Parallel(num_gpus=2))


def test_several_ranks_on_mps_are_refused() -> None:
    check_several_ranks("mps", 1)
    check_several_ranks("xpu", 8)
    with raises_error(
        ConfigError, code="mps-with-several-ranks", naming="parallel.device"
    ) as caught:
        check_several_ranks("mps", 2)
    assert "`parallel.device: mps` is not supported with 2 ranks" in caught.value.what


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "250000 100000"}, 3),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({}, None),
    ],
)
def test_cores_of_a_container(files: dict[str, str], cores: int | None, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert container_cores(tmp_path) == cores
