"""Test `paceline data` with several ranks and with Ray, and that it removes its temporary files."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from commands import end_with_signal, find_spawned_workers, parse, run, start
from raised import raises_error

from paceline.commands.data_count import make_spec
from paceline.core.errors import ConfigError
from paceline.core.formatting import printable

_LEAVE_STALE_FOLDER = """
import os, signal, sys
from paceline.core.files import Scratch

scratch = Scratch("paceline-count-", sys.argv[1])
os.kill(os.getpid(), signal.SIGKILL)
"""


def most_frequent(counts: Counter[str], number: int) -> list[list[Any]]:
    by_frequency = sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))
    return [list(entry) for entry in by_frequency[:number]]


def test_count_combines_the_counts_of_all_ranks(tmp_path: Path) -> None:
    files = [Path(json.__file__), Path(json.decoder.__file__)]
    counts = Counter(text for path in files for text in path.read_text(encoding="utf-8").split())
    output, temporary = tmp_path / "words.tsv", tmp_path / "tmp"
    temporary.mkdir()
    subprocess.run([sys.executable, "-c", _LEAVE_STALE_FOLDER, str(temporary)], check=False)
    assert len(list(temporary.iterdir())) == 1
    args = [
        *map(str, files),
        "--ranks",
        "2",
        "--memory-per-rank=1.1MiB",
        "--top",
        "7",
        "--json",
        "--output",
        str(output),
    ]
    completed = run("count", *args, verb="data", env={**os.environ, "TMPDIR": str(temporary)})
    result = json.loads(completed.stdout)
    assert (result["total"], result["distinct"], result["top"]) == (
        counts.total(),
        len(counts),
        most_frequent(counts, 7),
    )
    table = dict(line.split("\t") for line in output.read_text(encoding="utf-8").split("\n")[:-1])
    assert {text: int(number) for text, number in table.items()} == counts
    assert list(temporary.iterdir()) == []
    assert f"wrote {output}" in completed.stderr


@pytest.mark.soak
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray, an optional extra, is not installed")
def test_ray_and_local_engines_count_the_same(tmp_path: Path) -> None:
    text = "a b\u2028b \x00c 😀 \ufeffd " * 50 + " ".join(
        str(number % 97) for number in range(3000)
    )
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode() + b" x\xff")
    counts = Counter([*text.split(), "x\ufffd"])
    before = set(Path("/tmp").glob("pl-ray-*"))
    completed = run(
        "count",
        str(path),
        "--engine",
        "ray",
        "--ranks",
        "1",
        "--decode-errors",
        "replace",
        "--top",
        "1000",
        "--json",
        verb="data",
    )
    result = json.loads(completed.stdout)
    assert (result["total"], result["distinct"], result["top"]) == (
        counts.total(),
        len(counts),
        most_frequent(counts, 1000),
    )
    assert result["replaced"] == 1
    assert result["engine"] == "ray"
    assert set(Path("/tmp").glob("pl-ray-*")) <= before
    assert completed.stderr.startswith("counting words: ")  # Ray prints nothing
    assert len(completed.stderr.splitlines()) == 2


def test_missing_ray_is_an_error_with_the_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.data.count.ray_engine.find_spec", lambda name: None)
    (tmp_path / "a.txt").touch()
    with raises_error(ConfigError, code="missing-ray-for-count"):
        make_spec(parse("data", "count", str(tmp_path / "a.txt"), "--engine", "ray"))


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "needs a file"),
        (["missing.txt"], "file not found"),
        (["."], "is a folder"),
        (["/dev/null"], "not a regular file"),
        (["a.txt", "--rank"], "did you mean `--ranks`?"),
        (["a.txt", "--ranks", "0"], "1 to 64"),
        (["a.txt", "--ranks", "-1"], "1 to 64"),
        (["a.txt", "--top", "-1"], "0 to 100,000"),
        (["a.txt", "--memory-per-rank", "10KB"], "1.0 MiB or more"),
        (["a.txt", "--memory-per-rank", "0.5MB"], "1.0 MiB or more"),
        (["a.txt", "--unit", "word"], "did you mean `words`?"),
        (["a.txt", "--unit", "tokens"], "--tokenizer"),
        (["a.txt", "--tokenizer", "builtin:qwen2-micro"], "--unit tokens"),
        (["a.txt", "--unit", "tokens", "--tokenizer", "./missing/x"], "does not exist"),
        (["a.txt", "--engine", "spark"], "local, ray"),
        (["a.txt", "--decode-errors", "ignore"], "strict, replace"),
        (["a.txt", "--field", ""], "`--field` is empty"),
        (["a.txt", "--output", "missing/x.tsv"], "an existing folder"),
        (["--output", "a.txt", "a.txt"], "one of the files to count"),
    ],
)
def test_rejects_invalid_arguments(
    tokens: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("a word")
    with pytest.raises(ConfigError) as caught:
        make_spec(parse("data", "count", *tokens))
    assert message in str(caught.value)
    assert (tmp_path / "a.txt").read_text() == "a word"


def test_invalid_input_exits_with_2(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"good words \xff")
    output = tmp_path / "words.tsv"
    completed = run(
        "count", str(path), "--ranks", "2", "--output", str(output), verb="data", expect=2
    )
    assert f"`{path}` is not UTF-8 text: byte 0xff at offset 11" in completed.stderr
    assert not output.exists()
    with raises_error(ConfigError, code="unknown-command"):
        parse("data", "cont")
    with raises_error(ConfigError, code="missing-command"):
        parse("data")


def test_stats_of_a_dataset(tmp_path: Path) -> None:
    page = tmp_path / "stats.html"
    args = [
        "dataset=builtin:python-docs#40",
        "model=builtin:qwen2-micro",
        "--json",
        "--output",
        str(page),
    ]
    result = json.loads(run("stats", *args, verb="data").stdout)
    assert result["samples"] == 40
    assert {"histogram", "duplicates", "vocabulary", "limits", "max_length"} <= set(result)
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(
    ("settings", "samples"),
    [
        (["dataset=builtin:digits#50", "model=builtin:small-cnn", "task=classify"], 50),
        (["dataset=builtin:python-kinds#60", "model=builtin:qwen2-micro", "task=classify"], 60),
    ],
    ids=["images", "texts"],
)
def test_stats_of_other_tasks(tmp_path: Path, settings: list[str], samples: int) -> None:
    page = tmp_path / "stats.html"
    result = json.loads(
        run("stats", *settings, "--json", "--output", str(page), verb="data").stdout
    )
    assert result["samples"] == samples
    assert sum(each["samples"] for each in result["classes"]) == samples
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    if "builtin:digits" in settings[0]:
        completed = run("stats", *settings, "--languages", verb="data", expect=2)
        assert "`--languages` is not supported" in completed.stderr


def test_control_characters_are_escaped() -> None:
    assert printable("a\x1b[31m\x00\ud800é") == "a\\x1b[31m\\x00\\ud800é"
    assert printable("x" * 100) == "x" * 60 + "…"


@pytest.mark.skipif(sys.platform != "linux", reason="reads the process table")
@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_all_ranks_and_removes_temporary_files(
    signal_number: signal.Signals, tmp_path: Path
) -> None:
    path, temporary, output = tmp_path / "a.txt", tmp_path / "tmp", tmp_path / "out.tsv"
    temporary.mkdir()
    with open(path, "wb") as handle:  # more than can be counted before the signal
        for start_at in range(0, 4_000_000, 400_000):
            handle.write(" ".join(map(str, range(start_at, start_at + 400_000))).encode() + b"\n")
    process = start(
        "count", str(path), "--ranks=2", "--memory-per-rank=2MB", f"--output={output}", verb="data",
        start_new_session=True, env={**os.environ, "TMPDIR": str(temporary)},
    )  # fmt: skip
    spilled = "paceline-count-*/rank-*/run-*"
    stderr = end_with_signal(
        process,
        signal_number,
        2,
        ready=lambda: any(temporary.glob(spilled)),
        find_ranks=find_spawned_workers,
    )
    assert process.returncode == 128 + signal_number
    assert "nothing was written" in stderr
    assert list(temporary.iterdir()) == []
    assert not output.exists()
