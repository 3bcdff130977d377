"""Test that wrong usage of `paceline sweep` is refused before anything is started."""

from pathlib import Path

import pytest
from commands import MICRO, parse
from raised import raises_error

from paceline.commands.sweep import run
from paceline.core.errors import ConfigError


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["lora.rank=8"], ("missing-sweep-values", "")),
        (["learning_rate=1e-5..1e-3:log"], ("range-without-search", "")),
        (["lora.rank=8,16", "--no-pruning"], ("no-pruning-without-trials", "")),
        (["lora.rnk=8,16"], ("unknown-key", "")),
        (["lora.rank=many,16"], ("wrong-type", "lora.rank")),
        (["lora.rank=8,16", "--parallel", "0"], ("invalid-option", "--parallel 0")),
        (["lora.rank=8,16", "--parallel", "64"], ("not-enough-cores", "")),
        (["lora.rank=8,16", "--metric", ""], ("invalid-option", "--metric")),
        (["lora.rank=8,16", "--folder", ""], ("invalid-option", "--folder")),
        (["lora.rank=8,16", "--folder", "/dev/null/x"], ("not-writable", "")),
        (["lora.rank=8,16", "--maximize", "--minimize"], ("invalid-arguments", "")),
        (["lora.rank=8,16", "--folder", "used"], ("folder-contains-run", "")),
    ],
)
def test_wrong_usage_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], error: tuple[str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "events.jsonl").touch()
    with raises_error(ConfigError, code=error[0], naming=error[1]):
        run(parse("sweep", *MICRO, *arguments))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["used"]


def test_sweep_under_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.setenv(name, "0" if "RANK" in name else "2")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    with raises_error(ConfigError, code="nested-launcher"):
        run(parse("sweep", *MICRO, "lora.rank=8,16"))
