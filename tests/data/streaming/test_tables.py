"""Rows that are read by their number equal the rows that are read in order."""

import csv
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from raised import raises_error

from paceline.config.schema import Config
from paceline.core.errors import ConfigError, RunError
from paceline.data.sources.csv_rows import NOT_CSV
from paceline.data.sources.readers import LineBlock, read_file
from paceline.data.sources.resolve import rows_of_block
from paceline.data.sources.rows import BrokenRow
from paceline.data.streaming import line_index
from paceline.data.streaming.prepare import prepare_stream
from paceline.data.streaming.tables import open_table
from paceline.models.builtin import resolve_model

ROWS = [{"prompt": f"Frage {n} „süß“", "completion": "x" * (n % 7)} for n in range(60)]


def write(path: Path) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist(ROWS)
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=7)
    elif path.suffix == ".arrow":
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=9)
    elif path.suffix == ".csv":
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ["prompt", "completion"])
            writer.writeheader()
            for number, row in enumerate(ROWS):
                quoted = {"prompt": f'a "quoted"\nline, {number}', "completion": row["completion"]}
                writer.writerow(quoted if number % 5 == 0 else row)
    else:
        lines = [json.dumps(row, ensure_ascii=False) for row in ROWS]
        lines[3:3] = ["", "  "]
        path.write_text("\ufeff\r\n" + "\r\n".join(lines), encoding="utf-8", newline="")
    return path


def numbered(raw: Any) -> tuple[str, Any]:
    [(place, row)] = rows_of_block(raw) if isinstance(raw, LineBlock) else [raw]
    return place, row


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet", ".arrow"])
def test_rows_by_number_equal_rows_in_order(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_index, "_SCAN_BYTES", 37)  # rows span several reads
    path = write(tmp_path / f"rows{suffix}")
    expected = list(read_file(path))
    table = open_table(path)
    assert table is not None
    rows = []
    for number in range(table.num_rows):
        raw = pickle.loads(pickle.dumps(table)).row(number)
        if isinstance(raw, LineBlock) and raw.lines[0].isspace():
            continue
        rows.append(numbered(raw))
    assert [row for _, row in rows] == [row for _, row in expected]
    if suffix == ".jsonl":
        assert [place for place, _ in rows] == [f"line {n} of {path}" for n, _ in expected]
    assert int(table.block_sizes.sum()) == table.num_rows


def test_index_is_read_from_cache_until_file_changes(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n')
    first, again = line_index.open_index(path), line_index.open_index(path)
    assert first.folder == again.folder
    assert first.num_rows == 1
    path.write_text('{"text": "a"}\n{"text": "b"}\n')
    assert line_index.open_index(path).num_rows == 2


@pytest.mark.parametrize(
    ("name", "text"), [("rows.jsonl", '[{"text": "a"}]'), ("rows.json", "{}"), ("rows.xml", "a")]
)
def test_other_files_have_no_table(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    assert open_table(tmp_path / name) is None


@pytest.mark.parametrize("shift", [1, -1])
def test_changed_file_ends_the_run(shift: int, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    lines = "".join(json.dumps({"prompt": f"{number}" * 9}) + "\n" for number in range(9))
    path.write_text(lines)
    table = open_table(path)
    assert table is not None
    path.write_text(lines[shift:] + lines[:shift])
    with pytest.raises(RunError, match=r"has changed since it was indexed: bytes .* not a row"):
        table.row(4)
    path.write_text(lines[:-5])
    with pytest.raises(RunError, match="has changed"):
        table.row(8)
    path.write_text(lines * 2)  # rows that are appended are not used
    assert numbered(table.row(8)) == (f"line 9 of {path}", {"prompt": "8" * 9})


def test_csv_row_that_is_not_text_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b"prompt,completion\na,b\n\xff\xfe,c\nd," + b"e " * 100_000 + b"\n")
    table = open_table(path)
    assert table is not None
    assert table.row(1) == (f"line 3 of {path}", BrokenRow(NOT_CSV))
    assert numbered(table.row(2))[1]["completion"] == "e " * 100_000


def test_error_of_lines_without_a_row_names_the_first(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "q", "completion": "a"},\n' * 3)
    config = Config(model="builtin:qwen2-micro", dataset=str(path), streaming=True)
    with raises_error(ConfigError, code="invalid-json", naming="JSON"):
        prepare_stream(config, "sft", resolve_model)
    path.write_text('{"prompt": "q", "completion": "a"}\n{"prompt": "q"}\n{"x\n')
    notices = "\n".join(text for _, text in prepare_stream(config, "sft", resolve_model).notices)
    assert "2 of 3 rows that were checked are dropped. " in notices
    assert f"malformed line: 1 (first: line 3 of {path})" in notices
