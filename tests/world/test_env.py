"""Who this process is among the ranks."""

from __future__ import annotations

import pytest

from paceline.core.errors import ConfigError
from paceline.world.env import RankEnv, from_environment, outer_launcher

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "1234",
}  # fmt: skip


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*TORCHRUN, "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


def test_alone() -> None:
    assert outer_launcher() is None
    assert from_environment() == RankEnv(0, 1, 0, 1)


def test_a_world_size_left_in_the_environment_alone_means_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):  # as notebooks and clusters leave them
        monkeypatch.setenv(name, TORCHRUN[name])
    assert outer_launcher() is None


def test_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert outer_launcher() == RankEnv(rank=3, world_size=4, local_rank=1, local_world_size=2)


def test_one_host_where_the_local_size_is_not_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        if name != "LOCAL_WORLD_SIZE":
            monkeypatch.setenv(name, value)
    found = outer_launcher()
    assert found is not None
    assert found.local_world_size == 4


@pytest.mark.parametrize("missing", ["WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_half_a_launcher_is_refused(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    for name, value in TORCHRUN.items():
        if name != missing:
            monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"not {missing}.*unset RANK"):
        outer_launcher()


def test_a_rank_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(ConfigError, match="RANK='first'"):
        outer_launcher()
