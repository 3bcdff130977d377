"""Tokenization in several processes writes the same files and row counts as a single process, and
leaves nothing behind after an error or an interruption."""

import bz2
import codecs
import gzip
import io
import json
import lzma
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from raised import raises_error

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.data.encoding import build
from paceline.data.encoding.chunks import make_chunks
from paceline.data.progress import RowProgress
from paceline.data.sources.resolve import open_source
from paceline.models.builtin import resolve_model

MODEL = "builtin:qwen2-micro"


def make_rows(count: int, first: int = 0) -> list[Any]:
    """Return rows of several formats, some of which are dropped or truncated."""
    result: list[Any] = []
    for n in range(first, first + count):
        if n % 7 == 0:
            result.append(
                {
                    "messages": [
                        {"role": "user", "content": f"What is {n}?"},
                        {"role": "assistant", "content": f"{n}."},
                    ]
                }
            )
        elif n % 11 == 0:
            result.append({"question": f"q{n}", "answer": ""})
        elif n % 13 == 0:
            result.append({"text": f"plain text {n} " * (n % 30 + 1)})
        elif n % 101 == 0:
            result.append({"foo": n})
        else:
            result.append(
                {
                    "instruction": f"Double {n}",
                    "output": f"It is {2 * n}. " * (n % 40 + 1),
                    "note": n % 3 == 0,
                }
            )
    return result


def save(path: Path, records: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in records))
    return str(path)


def config_of(*datasets: str, **train_args: Any) -> Config:
    return Config(model=MODEL, dataset=list(datasets), train_args={"max_length": 96, **train_args})


def build_tokens(
    folder: Path, config: Config, workers: int | None
) -> tuple[dict[str, bytes], dict[str, Any]]:
    folder.mkdir()
    sources = [open_source(spec) for spec in config.sources()]
    meta = build.build_entry(
        folder,
        sources,
        config,
        "sft",
        Path(resolve_model(MODEL)),
        workers=workers,
    )
    return {file.name: file.read_bytes() for file in folder.iterdir()}, meta


def large_dataset_config(tmp_path: Path, count: int) -> Config:
    text = save(tmp_path / "a.jsonl", make_rows(count)) + ""
    with open(tmp_path / "b.csv", "w") as handle:
        handle.write("prompt,completion\n" + "".join(f"p{n},answer {n}\n" for n in range(700)))
    (tmp_path / "c.json").write_text(json.dumps(make_rows(600, first=10_000)))
    return config_of(text, str(tmp_path / "b.csv"), str(tmp_path / "c.json"))


def test_two_workers_write_same_files_as_one(tmp_path: Path) -> None:
    config = large_dataset_config(tmp_path, 1500)
    files, meta = build_tokens(tmp_path / "one", config, 1)
    assert build_tokens(tmp_path / "two", config, 2) == (files, meta)
    assert meta["counts"]["read"] == 1500 + 700 + 600
    assert meta["counts"]["truncated"] > 0
    assert len(meta["counts"]["dropped"]) >= 2
    assert not psutil.Process().children(recursive=True) or all(
        "spawn_main" not in " ".join(process.cmdline())
        for process in psutil.Process().children(recursive=True)
    )


def write_json_lines_files(folder: Path) -> None:
    """Write a JSON Lines file for each variation that the reader handles separately."""
    lines = [
        json.dumps(row, ensure_ascii=False).encode() + b"\n"
        for row in [*make_rows(700), {"text": "Grüße, 你好"}]
    ]
    text = b"".join(lines)
    (folder / "plain.jsonl").write_bytes(text)
    (folder / "no-trailing-newline.jsonl").write_bytes(text[:-1])
    (folder / "crlf.ndjson").write_bytes(text.replace(b"\n", b"\r\n"))
    (folder / "bom.jsonl").write_bytes(codecs.BOM_UTF8 + text)
    (folder / "bom-on-blank-line.jsonl").write_bytes(codecs.BOM_UTF8 + b" \n" + text)
    (folder / "utf16.jsonl").write_bytes(text.decode().encode("utf-16"))
    (folder / "blank.jsonl").write_bytes(
        b"\n \n" + b"\n\t\r\n\xc2\xa0\xe3\x80\x80\n".join(lines) + b"\n\n"
    )
    (folder / "long.jsonl").write_bytes(
        b"".join(json.dumps({"text": "word " * 90_000}).encode() + b"\n" for _ in range(9))
    )
    (folder / "list.jsonl").write_text(json.dumps(make_rows(300)))
    (folder / "compressed.jsonl.gz").write_bytes(gzip.compress(text))
    (folder / "empty.jsonl").write_bytes(b"")


def test_chunks_contain_all_rows_with_locations(tmp_path: Path) -> None:
    write_json_lines_files(tmp_path)
    (tmp_path / "rows.json").write_text(json.dumps(make_rows(300)))
    names = [
        *(path.name for path in sorted(tmp_path.iterdir())),
        "",
        "*.jsonl",
        "plain.jsonl#301",
        "#1000",
    ]
    for name in names:
        source = open_source(
            config_of(str(tmp_path) + ("/" + name if name[:1] != "#" else name)).sources()[0]
        )
        chunks = list(make_chunks(0, source, 42))
        assert [row for chunk in chunks for row in chunk.rows()] == list(source.rows(42)), name
        assert all(chunk.num_rows == 256 or chunk.num_chars >= 2 << 20 for chunk in chunks[:-1]), (
            name
        )
        assert all(chunk.num_rows <= 256 and chunk.num_chars < 3 << 20 for chunk in chunks), name


def test_row_location_is_its_line_number(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(
        codecs.BOM_UTF8 + b'\n{"text": "x"}\r\n  \n\xc2\xa0\n{"text": "y"}\n\n{"text": "z"}'
    )
    source = open_source(config_of(str(tmp_path / "a.jsonl")).sources()[0])
    (chunk,) = make_chunks(0, source, 42)
    assert [place for place, _ in chunk.rows()] == [
        f"line {number} of {tmp_path / 'a.jsonl'}" for number in (2, 5, 7)
    ]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b'{"text": "a\xff"}', "line 803 of `{}` is not UTF-8 text (byte 0xff at position 11)"),
        (b'{"text": ', "line 803 of `{}` is not valid JSON: Expecting value at column 10, near `"),
        (
            b'{"prompt": "a", "chosen": "b", "rejected": "c"}',
            "line 803 of {}: the rows are preference pairs",
        ),
    ],
)
def test_error_names_line_and_file(tmp_path: Path, line: bytes, text: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"\n\n" + b'{"text": "x"}\n' * 800 + line + b"\n{\n")
    with pytest.raises(ConfigError) as caught:
        build_tokens(tmp_path / "out", config_of(str(file)), 1)
    assert str(caught.value).startswith(text.format(file))


@pytest.mark.parametrize("content", [b"", b"\n \r\n", b"\xc2\xa0\n\xe3\x80\x80", codecs.BOM_UTF8])
def test_rejects_dataset_without_rows(tmp_path: Path, content: bytes) -> None:
    first, last = (
        save(tmp_path / "a.jsonl", make_rows(20)),
        save(tmp_path / "c.jsonl", make_rows(20)),
    )
    (tmp_path / "b.jsonl").write_bytes(content)
    with raises_error(ConfigError, code="no-rows-in-source"):
        build_tokens(tmp_path / "out", config_of(first, str(tmp_path / "b.jsonl"), last), 1)


def test_first_unusable_dataset_is_reported(tmp_path: Path) -> None:
    unusable = save(tmp_path / "a.jsonl", [{"question": "q", "answer": ""}] * 3)
    (tmp_path / "b.jsonl").write_bytes(b"")
    with raises_error(ConfigError, code="no-usable-rows"):
        build_tokens(tmp_path / "out", config_of(unusable, str(tmp_path / "b.jsonl")), 1)


def write_all_file_types(folder: Path) -> None:
    table_rows = [{"prompt": f"p{n}", "completion": f"answer {n} " * 40} for n in range(2000)]
    text = "".join(json.dumps(row) + "\n" for row in table_rows).encode()
    (folder / "lines.jsonl").write_bytes(text)
    (folder / "utf16.jsonl").write_bytes(text.decode().encode("utf-16"))
    (folder / "list.json").write_text(json.dumps(table_rows))
    (folder / "table.csv").write_text(
        "prompt,completion\n"
        + "".join(f"{row['prompt']},{row['completion']}\n" for row in table_rows)
    )
    table = pa.Table.from_pylist(table_rows)
    pq.write_table(table, folder / "table.parquet")
    for name, new_writer in (("stream.arrow", pa.ipc.new_stream), ("file.arrow", pa.ipc.new_file)):
        with new_writer(str(folder / name), table.schema) as writer:
            writer.write_table(table, max_chunksize=300)
    (folder / "lines.jsonl.gz").write_bytes(gzip.compress(text))
    (folder / "lines.jsonl.bz2").write_bytes(bz2.compress(text))
    (folder / "lines.jsonl.xz").write_bytes(lzma.compress(text))
    with pa.output_stream(str(folder / "lines.jsonl.zst"), compression="zstd") as stream:
        stream.write(text)


def test_chunk_sizes_sum_to_file_size_for_every_file_type(
    tmp_path: Path,
) -> None:
    write_all_file_types(tmp_path)
    for name in [*(path.name for path in sorted(tmp_path.iterdir())), "*.*", "lines.jsonl#1500"]:
        source = open_source(config_of(str(tmp_path / name)).sources()[0])
        total = source.text_bytes() or 0
        sizes = [chunk.size_bytes for chunk in make_chunks(0, source, 42)]
        assert sum(sizes) == total > 0, name
        assert min(sizes) >= 0, name
        # Compressed, these rows fit in a single read.
        if not name.endswith((".gz", ".bz2", ".xz", ".zst")):
            assert 0 < sum(sizes[: len(sizes) // 2]) < total, name


@pytest.mark.soak
def test_worker_count_does_not_change_output_for_any_file_type(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    write_json_lines_files(data)
    config = config_of(str(data), str(data / "plain.jsonl#301"))
    expected = build_tokens(tmp_path / "one", config, 1)
    for workers in (2, 16):
        assert build_tokens(tmp_path / str(workers), config, workers) == expected


@pytest.mark.soak
def test_sixteen_workers_write_same_files_as_one(tmp_path: Path) -> None:
    config = large_dataset_config(tmp_path, 9000)
    assert build_tokens(tmp_path / "one", config, 1) == build_tokens(tmp_path / "many", config, 16)


def test_first_malformed_row_is_reported_with_any_worker_count(tmp_path: Path) -> None:
    lines = [json.dumps(row) for row in make_rows(1200)]
    lines[700] = lines[700][:-5]
    lines[1100] = "{"
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    messages = []
    for workers in (1, 2):
        with pytest.raises(ConfigError) as caught:
            build_tokens(tmp_path / str(workers), config_of(str(tmp_path / "a.jsonl")), workers)
        messages.append(str(caught.value))
    assert "line 701 of" in messages[0]
    assert messages[0] == messages[1]


def test_worker_processes_are_used_only_for_large_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = [
        open_source(spec) for spec in config_of(save(tmp_path / "a.jsonl", make_rows(50))).sources()
    ]
    assert build._num_workers(sources) == 1
    monkeypatch.setattr(build, "_PARALLEL_BYTES", 1000)
    assert build._num_workers(sources) == min(len(os.sched_getaffinity(0)), 32)
    (tmp_path / "d.txt").write_text("x" * 5000)
    assert (
        build._num_workers(
            [open_source(spec) for spec in config_of(str(tmp_path / "d.txt")).sources()]
        )
        == 1
    )


@pytest.mark.soak
def test_interrupted_tokenization_leaves_no_cache_entry_or_process(tmp_path: Path) -> None:
    data = save(
        tmp_path / "a.jsonl",
        [{"instruction": f"Say {n}", "output": "word " * 300} for n in range(40_000)],
    )
    code = (
        "import sys\nfrom paceline.config.schema import Config\nfrom paceline.data.encoding.prepare"
        " import prepare_tokens\nfrom paceline.models.builtin import resolve_model\n"
        f"prepare_tokens(Config(model={MODEL!r}, dataset=sys.argv[1]), 'sft', resolve_model)\n"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    process = subprocess.Popen(
        [sys.executable, "-c", code, data], env=environment, stderr=subprocess.PIPE, text=True
    )
    try:
        entries = tmp_path / "cache" / "paceline" / "tokens"
        deadline = time.monotonic() + 120
        while not [file for file in entries.glob(".*.tmp/tokens.bin") if file.stat().st_size > 0]:
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


def test_progress_line() -> None:
    stream = io.StringIO()
    progress = RowProgress(2000, stream)
    progress.add(100, 500)
    assert (
        progress.text(2.0)
        == "[#####...............] 25%  tokenizing: 100 rows  50 rows/s  ETA 0:06"
    )
    without_total = RowProgress(None, stream)
    without_total.add(100, 0)
    assert without_total.text(2.0) == "tokenizing: 100 rows  50 rows/s"
    assert stream.getvalue() == ""  # nothing if it is fast
