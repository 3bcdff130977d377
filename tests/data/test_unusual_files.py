"""Files as other programs write them: each is read as meant, or the message says what to do."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from prepared_tokens import expect_error, prepare

from paceline.config.schema import Config
from paceline.config.schema.data import DatasetSource
from paceline.core.errors import ConfigError
from paceline.data.encoding.prepare import prepare_tokens
from paceline.data.sources.csv_rows import NOT_CSV
from paceline.data.sources.opening import take_count, with_slashes
from paceline.data.sources.readers import LineBlock
from paceline.data.sources.resolve import check_local_sources, open_source, rows_of_block
from paceline.data.sources.rows import MalformedRow
from paceline.data.streaming.tables import open_table
from paceline.data.vision_language.rows import ImageChat, with_paths
from paceline.models.builtin import resolve_model

ROWS = [{"prompt": f"What is {n}?", "completion": f"It is „{n}“."} for n in range(5)]


def rows_of(path: Path | str) -> list[Any]:
    return [row for _, row in open_source(DatasetSource(path=str(path))).rows(0)]


def places_of(path: Path) -> list[str]:
    return [place for place, _ in open_source(DatasetSource(path=str(path))).rows(0)]


def error_of(path: Path | str) -> str:
    with pytest.raises(ConfigError) as caught:
        rows_of(path)
    return str(caught.value)


def streamed(path: Path) -> list[Any]:
    table = open_table(path)
    assert table is not None
    rows = []
    for number in range(table.num_rows):
        raw = table.row(number)
        rows += [row for _, row in rows_of_block(raw)] if isinstance(raw, LineBlock) else [raw[1]]
    return rows


CSV = "prompt,completion\n" + "".join(f"{row['prompt']},{row['completion']}\n" for row in ROWS)
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)


@pytest.mark.parametrize(("name", "text"), [("a.csv", CSV), ("a.jsonl", LINES)])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_lines_that_end_with_carriage_returns(
    tmp_path: Path, name: str, text: str, encoding: str
) -> None:
    for end in ("\r", "\r\n"):
        raw = text.replace("\n", end).encode(encoding)
        (tmp_path / name).write_bytes(raw)
        assert rows_of(tmp_path / name) == ROWS
        first = 2 if name == "a.csv" else 1
        assert places_of(tmp_path / name)[1] == f"line {first + 1} of {tmp_path / name}"
        if encoding != "utf-16":
            assert streamed(tmp_path / name) == ROWS
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(raw))
        assert rows_of(tmp_path / f"{name}.gz") == ROWS


def test_long_first_line_before_line_feeds(tmp_path: Path) -> None:
    rows = [{"text": "a\rb" + "x" * 9000}, {"text": "c"}]
    path = tmp_path / "a.csv"
    path.write_bytes(b"text\r\n" + "".join(f'"{row["text"]}"\n' for row in rows).encode())
    assert rows_of(path) == rows
    path.write_bytes(b'"te\rxt' + b"x" * 9000 + b'"\na\n')
    assert list(rows_of(path)[0].values()) == ["a"]


def test_quoted_line_ends_with_carriage_returns(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'prompt,completion\r"a\rb",c\r\rd,e')
    expected = [{"prompt": "a\rb", "completion": "c"}, {"prompt": "d", "completion": "e"}]
    assert rows_of(path) == expected
    assert streamed(path) == expected


def test_csv_row_with_more_fields_than_the_header(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("prompt,completion\na,b\nHello, you,c\nd,e,\nf\n")
    for mode in (False, True):
        settings = {"train_args": {"max_steps": 1}} if mode else {}
        if not mode:
            prepared = prepare(str(path), **settings)
            (reason,) = [name for name in prepared.counts.dropped if "more fields" in name]
            assert prepared.counts.dropped[reason] == 1
            text = "\n".join(message for _, message in prepared.notices)
            assert f"(first: line 3 of {path})" in text
            assert prepared.counts.kept == 2
    assert [getattr(row, "reason", None) for row in streamed(path)] == [None, reason, None, None]
    path.write_text("prompt,completion\nHello, you,c\n")
    assert "more fields than the header has columns" in expect_error(str(path))


def test_csv_with_stated_delimiter_and_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('sep=;\nprompt;completion\n"a;b";c\n')
    expected = [{"prompt": "a;b", "completion": "c"}]
    assert rows_of(path) == expected
    assert streamed(path) == expected
    assert places_of(path) == [f"line 3 of {path}"]
    path.write_text("\n\nprompt|completion\na;b|c\n")
    assert rows_of(path) == expected
    assert streamed(path) == expected


def test_csv_quote_that_is_not_closed(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('prompt,completion\na,b\n"c,d\ne,f\ng,h\n')
    assert f"line 3 of `{path}` has a quote that is not closed" in error_of(path)
    assert [getattr(row, "reason", None) for row in streamed(path)] == [None, NOT_CSV]
    # A field of several lines at the end of the file is closed.
    path.write_text('prompt,completion\na,b\n"c\nd","e\nf"\n')
    assert rows_of(path)[1] == {"prompt": "c\nd", "completion": "e\nf"}
    assert places_of(path) == [f"line 2 of {path}", f"line 3 of {path}"]
    assert streamed(path) == rows_of(path)


def test_quote_in_a_field_without_quotes_loses_no_rows_silently(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('prompt,completion\n5" disk,a\nb,c\n7" disk,d\ne,f\n')
    assert [row["prompt"] for row in rows_of(path)] == ['5" disk', "b", '7" disk', "e"]
    # The index of a stream takes the lines between the quotes for one row.
    assert [getattr(row, "reason", None) for row in streamed(path)] == [NOT_CSV, None]


def test_names_of_columns_have_no_spaces_around_them(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("prompt, completion \na,b\n")
    assert rows_of(path) == streamed(path) == [{"prompt": "a", "completion": "b"}]


@pytest.mark.parametrize("orient", ["columns", "index", "split", "records", "table"])
@pytest.mark.parametrize("num_rows", [1, 2, 5])
def test_tables_of_pandas(tmp_path: Path, orient: Any, num_rows: int) -> None:
    pandas = pytest.importorskip("pandas")
    path = tmp_path / "a.json"
    pandas.DataFrame(ROWS[:num_rows]).to_json(path, orient=orient)
    rows = [{key: row[key] for key in ("prompt", "completion")} for row in rows_of(path)]
    assert rows == ROWS[:num_rows]


def test_objects_on_one_line_and_hints_for_invalid_json(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.json"):
        (tmp_path / name).write_text("".join(json.dumps(row) for row in ROWS))
        assert rows_of(tmp_path / name) == ROWS
        (tmp_path / name).write_text(
            "".join(json.dumps(row) + " " * (row != ROWS[2]) for row in ROWS)
        )
        assert rows_of(tmp_path / name) == ROWS
    path = tmp_path / "a.jsonl"
    path.write_text(LINES.replace("}\n", "},\n"))
    assert "remove the comma at the end of each line" in error_of(path)
    path.write_text("{'prompt': 'a'}\n")
    assert "json.dumps" in error_of(path)


@pytest.mark.parametrize("indent", [1, 4, "\t"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.json", "a.jsonl.gz"])
def test_objects_of_several_lines(tmp_path: Path, indent: Any, name: str) -> None:
    text = "\n".join(json.dumps(row, indent=indent, ensure_ascii=False) for row in ROWS)
    for content in (text, "\n\n" + text + "\n", text.replace("\n}\n{", "\n} {"), f"\ufeff{text}"):
        raw = content.encode()
        (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
        assert rows_of(tmp_path / name) == ROWS
        assert places_of(tmp_path / name)[2] == f"row 3 of {tmp_path / name}"
    if not name.endswith(".gz"):
        assert open_table(tmp_path / name) is None
    assert list(open_source(DatasetSource(path=str(tmp_path / name))).parts(0))[1][1] == ROWS[1]


def test_compact_objects_of_several_lines_and_one_object(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a",\n "completion": "b"}\n{"prompt": "c",\n "completion": "d"}\n')
    assert [row["prompt"] for row in rows_of(path)] == ["a", "c"]
    path.write_text(json.dumps(ROWS[0], indent=2))
    assert rows_of(path) == ROWS[:1]


def test_error_in_objects_of_several_lines_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(ROWS[0], indent=1) + '\n{\n "prompt": oops\n}\n')
    assert f"line 6 of `{path}` is not valid JSON" in error_of(path)
    # A first line that was cut is not taken for such an object.
    path.write_text('{"prompt": "a", "comp\n' + LINES)
    assert f"line 1 of `{path}` is not valid JSON" in error_of(path)


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("a.xlsx", "save the sheet as CSV in UTF-8"),
        ("a.xls", "save the sheet as CSV in UTF-8"),
        ("a.ods", "save the sheet as CSV in UTF-8"),
        ("a.pkl", "JSON lines or Parquet"),
        ("a.docx", "save its text as .txt"),
        ("a.sqlite", "export the table as CSV"),
        ("a.yaml", "write the rows as JSON lines"),
    ],
)
def test_files_of_other_programs(tmp_path: Path, name: str, fix: str) -> None:
    (tmp_path / name).write_bytes(b"PK\x03\x04")
    assert fix in error_of(tmp_path / name)
    assert fix in error_of(tmp_path)


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (b"PK\x03\x04\x14\x00\x06\x00", "a spreadsheet of Excel or another zip archive"),
        (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "a document of an older Excel or Word"),
        (b"PAR1\x15\x04\x15\x00", "Parquet"),
        (b"SQLite format 3\x00", "an SQLite database"),
        (b"%PDF-1.7\n", "a PDF document"),
        (b"ARROW1\x00\x00", "Arrow"),
    ],
)
@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.json", "a.txt"])
def test_content_that_the_name_does_not_show(
    tmp_path: Path, head: bytes, kind: str, name: str
) -> None:
    (tmp_path / name).write_bytes(head + bytes(200))
    assert f"the content of `{tmp_path / name}` is {kind}" in error_of(tmp_path / name)


def test_windows_paths_of_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").write_text(LINES)
    for name in (r"data\a.jsonl", r".\data\a.jsonl", r"data\*.jsonl", "data\\", r"data\a.jsonl#5"):
        assert rows_of(name) == ROWS
        check_local_sources(Config(model="builtin:qwen2-micro", dataset=name))
    assert len(rows_of(r"data\a.jsonl#2")) == 2
    assert "did you mean `data/a.jsonl`?" in error_of(r"data\b.jsonl")
    text = error_of(r"C:\Users\me\a.jsonl")
    assert "this is a path of Windows" in text
    assert "/mnt/c/Users/me/a.jsonl" in text
    assert "backslash in double quotes" in error_of("data\train.jsonl")
    # A file with a backslash in its name is that file.
    (tmp_path / r"odd\a.jsonl").write_text(LINES)
    assert take_count(r"odd\a.jsonl") == (r"odd\a.jsonl", None)
    assert with_slashes("user/dataset") == "user/dataset"


def test_windows_paths_of_images(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    Image.new("RGB", (2, 2)).save(tmp_path / "pictures" / "a.png")
    place = f"line 1 of {tmp_path / 'rows.jsonl'}"
    expected = (str(tmp_path / "pictures" / "a.png"),)
    for image in (r"pictures\a.png", "pictures/a.png", r".\pictures\a.png"):
        images = with_paths(ImageChat(images=(image,)), place, None).images
        assert [Path(path) for path in images if isinstance(path, str)] == [Path(expected[0])]
    assert (
        with_paths(ImageChat(images=("a.png",)), place, f"{tmp_path}\\pictures").images == expected
    )
    with pytest.raises(MalformedRow, match="a drive of Windows"):
        with_paths(ImageChat(images=(r"C:\pictures\a.png",)), place, None)
    shard = "/data/x.tar/a\\b.png@512+10"
    assert with_paths(ImageChat(images=(shard,)), place, None).images == (shard,)


@pytest.mark.parametrize("is_folder", [False, True])
def test_messages_from_the_cache_name_the_current_file(tmp_path: Path, is_folder: bool) -> None:
    def path_of(name: str) -> Path:
        return tmp_path / name / "rows.jsonl" if is_folder else tmp_path / f"{name}.jsonl"

    settings = [tmp_path / name if is_folder else path_of(name) for name in ("first", "second")]
    for name in ("first", "second"):
        path_of(name).parent.mkdir(exist_ok=True)
        path_of(name).write_text(
            LINES
            + '{"prompt": "", "completion": ""}\n{"first": 1}\n{"text": "in the first", "b": 3}\n'
        )
    prepared = [
        prepare_tokens(Config(model="builtin:qwen2-micro", dataset=str(path)), "sft", resolve_model)
        for path in settings
    ]
    assert prepared[0].train_folder == prepared[1].train_folder
    before, after = ("\n".join(message for _, message in each.notices[:-1]) for each in prepared)
    assert f"of {path_of('first')}" in before
    assert "read from the token cache" in prepared[1].notices[-1][1]
    assert str(path_of("first")) not in after
    assert (
        before.replace(str(path_of("first")), str(path_of("second"))).replace(
            f"{settings[0]}:", f"{settings[1]}:"
        )
        == after
    )
    assert prepared[1].sources[0]["dataset"] == str(settings[1])
