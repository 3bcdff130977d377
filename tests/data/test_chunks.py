"""Tokenization in several processes: the same files and the same account as in one; errors and interruptions leave nothing."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.data import build
from paceline.data.progress import Progress
from paceline.data.sources import open_source
from paceline.data.templates import AskedTemplate
from paceline.models.builtin import resolve_model

MODEL = "builtin:qwen2-micro"


def rows(count: int, first: int = 0) -> list[Any]:
    """Rows of several formats, some of which are dropped or truncated, for several reasons."""
    out: list[Any] = []
    for n in range(first, first + count):
        if n % 7 == 0:
            out.append({"messages": [{"role": "user", "content": f"What is {n}?"}, {"role": "assistant", "content": f"{n}."}]})
        elif n % 11 == 0:
            out.append({"question": f"q{n}", "answer": ""})
        elif n % 13 == 0:
            out.append({"text": f"plain text {n} " * (n % 30 + 1)})
        elif n % 101 == 0:
            out.append({"foo": n})
        else:
            out.append({"instruction": f"Double {n}", "output": f"It is {2 * n}. " * (n % 40 + 1), "note": n % 3 == 0})
    return out


def save(path: Path, some: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in some))
    return str(path)


def config_of(*datasets: str, **train_args: Any) -> Config:
    return Config(model=MODEL, dataset=list(datasets), train_args={"max_length": 96, **train_args})


def built(folder: Path, config: Config, workers: int | None) -> tuple[dict[str, bytes], dict[str, Any]]:
    folder.mkdir()
    sources = [open_source(one) for one in config.sources()]
    meta = build.build_entry(folder, sources, config, "sft", Path(resolve_model(MODEL)), AskedTemplate(), workers=workers)
    return {one.name: one.read_bytes() for one in folder.iterdir()}, meta


def many_rows(tmp_path: Path, count: int) -> Config:
    text = save(tmp_path / "a.jsonl", rows(count)) + ""
    with open(tmp_path / "b.csv", "w") as handle:
        handle.write("prompt,completion\n" + "".join(f"p{n},answer {n}\n" for n in range(700)))
    (tmp_path / "c.json").write_text(json.dumps(rows(600, first=10_000)))
    return config_of(text, str(tmp_path / "b.csv"), str(tmp_path / "c.json"))


def test_two_workers_write_what_one_does(tmp_path: Path) -> None:
    config = many_rows(tmp_path, 1500)
    files, meta = built(tmp_path / "one", config, 1)
    assert built(tmp_path / "two", config, 2) == (files, meta)
    assert meta["counts"]["read"] == 1500 + 700 + 600
    assert meta["counts"]["truncated"] > 0
    assert len(meta["counts"]["dropped"]) >= 2
    assert not psutil.Process().children(recursive=True) or all(
        "spawn_main" not in " ".join(one.cmdline()) for one in psutil.Process().children(recursive=True)
    )


@pytest.mark.soak
def test_sixteen_workers_write_what_one_does(tmp_path: Path) -> None:
    config = many_rows(tmp_path, 9000)
    assert built(tmp_path / "one", config, 1) == built(tmp_path / "many", config, 16)


def test_the_first_broken_row_is_reported_by_any_number_of_workers(tmp_path: Path) -> None:
    lines = [json.dumps(row) for row in rows(1200)]
    lines[700] = lines[700][:-5]
    lines[1100] = "{"
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    texts = []
    for workers in (1, 2):
        with pytest.raises(ConfigError) as caught:
            built(tmp_path / str(workers), config_of(str(tmp_path / "a.jsonl")), workers)
        texts.append(str(caught.value))
    assert "line 701 of" in texts[0]
    assert texts[0] == texts[1]


def test_worker_processes_are_for_much_data_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [open_source(one) for one in config_of(save(tmp_path / "a.jsonl", rows(50))).sources()]
    assert build._workers(sources) == 1
    monkeypatch.setattr(build, "_PARALLEL_BYTES", 1000)
    assert build._workers(sources) == min(len(os.sched_getaffinity(0)), 32)
    (tmp_path / "d.txt").write_text("x" * 5000)
    assert build._workers([open_source(one) for one in config_of(str(tmp_path / "d.txt")).sources()]) == 1


def test_an_interrupted_tokenization_leaves_no_entry_and_no_process(tmp_path: Path) -> None:
    data = save(tmp_path / "a.jsonl", [{"instruction": f"Say {n}", "output": "word " * 300} for n in range(40_000)])
    code = (
        "import sys\nfrom paceline.config.schema import Config\nfrom paceline.data.tokenize import prepare_tokens\n"
        f"prepare_tokens(Config(model={MODEL!r}, dataset=sys.argv[1]), 'sft')\n"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    process = subprocess.Popen([sys.executable, "-c", code, data], env=environment, stderr=subprocess.PIPE, text=True)
    try:
        entries = tmp_path / "cache" / "paceline" / "tokens"
        deadline = time.monotonic() + 120
        while not [one for one in entries.glob(".*.tmp/tokens.bin") if one.stat().st_size > 0]:
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        workers = psutil.Process(process.pid).children(recursive=True)
        assert len(workers) >= 2 or len(os.sched_getaffinity(0)) == 1
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode != 0
    assert list(entries.iterdir()) == []
    assert psutil.wait_procs(workers, timeout=10)[1] == []


def test_the_progress_line() -> None:
    progress = Progress(2000, io.StringIO())
    progress.add(100, 500)
    assert progress.text(2.0) == "[#####...............] 25%  tokenizing: 100 rows  50 rows/s  ETA 0:06"
    unknown = Progress(None, io.StringIO())
    unknown.add(100, 0)
    assert unknown.text(2.0) == "tokenizing: 100 rows  50 rows/s"
    assert unknown.stream.getvalue() == ""  # type: ignore[attr-defined]  (short work prints nothing)
