"""Test that wrong usage of `paceline sweep` is refused before anything is started."""

from pathlib import Path

import pytest
from commands import MICRO, parse

from paceline.commands.sweep import run
from paceline.core.errors import ConfigError


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lora.rank=8"], "needs a key with several values"),
        (["learning_rate=1e-5..1e-3:log"], "only a search samples from ranges"),
        (["lora.rank=8,16", "--no-pruning"], "`--no-pruning` needs `--trials`"),
        (["lora.rnk=8,16"], "did you mean `lora.rank`"),
        (["lora.rank=many,16"], "lora.rank"),
        (["lora.rank=8,16", "--parallel", "0"], "`--parallel 0` is out of range"),
        (["lora.rank=8,16", "--parallel", "64"], "separate cores"),
        (["lora.rank=8,16", "--metric", ""], "`--metric` is empty"),
        (["lora.rank=8,16", "--folder", ""], "`--folder` is empty"),
        (["lora.rank=8,16", "--folder", "/dev/null/x"], "`--folder /dev/null/x` cannot be written"),
        (["lora.rank=8,16", "--maximize", "--minimize"], "is not supported with `--maximize`"),
        (["lora.rank=8,16", "--folder", "used"], "contains a run"),
    ],
)
def test_wrong_usage_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "events.jsonl").touch()
    with pytest.raises(ConfigError, match=message):
        run(parse("sweep", *MICRO, *arguments))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["used"]


def test_sweep_under_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.setenv(name, "0" if "RANK" in name else "2")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    with pytest.raises(ConfigError, match="cannot run under torchrun"):
        run(parse("sweep", *MICRO, "lora.rank=8,16"))
