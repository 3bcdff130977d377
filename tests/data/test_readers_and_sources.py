"""Every type of file and source that `dataset:` accepts, and the errors for malformed ones."""

import bz2
import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from paceline.config.schema.data import DatasetSource
from paceline.core.errors import ConfigError
from paceline.data.sources.csv_rows import TOO_MANY_FIELDS
from paceline.data.sources.readers import DOCUMENT
from paceline.data.sources.resolve import open_source
from paceline.data.sources.rows import BrokenRow

ROWS = [{"prompt": f"What is {n}?", "completion": f"It is {n}."} for n in range(5)]


def read_rows(path: Path | str, seed: int = 0, **settings: Any) -> list[Any]:
    return [row for _, row in open_source(DatasetSource(path=str(path), **settings)).rows(seed)]


def expect_error(path: Path | str, **settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read_rows(path, **settings)
    return str(caught.value)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def json_lines(records: list[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in records)


def compress(path: Path, raw: bytes) -> Path:
    """Write ``raw`` with the compression that the last suffix of ``path`` names."""
    compressors = {
        ".gz": gzip.compress,
        ".bz2": bz2.compress,
        ".xz": lzma.compress,
        ".zst": pa.Codec("zstd").compress,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(compressors[path.suffix](raw)))
    return path


CONTENTS = {
    ".jsonl": json_lines(ROWS),
    ".ndjson": json_lines(ROWS),
    ".json": json.dumps(ROWS, indent=1),
    ".csv": (
        "prompt,completion\n" + "".join(f"{row['prompt']},{row['completion']}\n" for row in ROWS)
    ),
    ".tsv": (
        "prompt\tcompletion\n" + "".join(f"{row['prompt']}\t{row['completion']}\n" for row in ROWS)
    ),
}


@pytest.mark.parametrize("packed", [".gz", ".bz2", ".xz", ".zst"])
@pytest.mark.parametrize("kind", CONTENTS)
def test_reads_compressed_files(tmp_path: Path, kind: str, packed: str) -> None:
    path = compress(tmp_path / f"rows{kind}{packed}", CONTENTS[kind].encode())
    assert read_rows(path) == ROWS
    places = [place for place, _ in open_source(DatasetSource(path=str(path))).rows(0)]
    assert places[2] in (f"line 3 of {path}", f"line 4 of {path}", f"row 3 of {path}")


def test_compressed_utf16_and_misleading_file_names(tmp_path: Path) -> None:
    assert read_rows(compress(tmp_path / "a.txt.gz", "Grüße\n".encode())) == [{DOCUMENT: "Grüße\n"}]
    assert read_rows(compress(tmp_path / "b.jsonl.zst", json_lines(ROWS).encode("utf-16"))) == ROWS
    compress(tmp_path / "c.gz", json_lines(ROWS).encode()).rename(tmp_path / "c.jsonl")
    assert read_rows(tmp_path / "c.jsonl") == ROWS  # compressed, although the name does not show it
    write(tmp_path / "d.jsonl.gz", json_lines(ROWS))
    assert read_rows(tmp_path / "d.jsonl.gz") == ROWS  # not compressed, despite its name


def test_compressed_file_with_several_members(tmp_path: Path) -> None:
    all_rows = [{"prompt": f"{n} " * 20, "completion": str(n)} for n in range(20_000)]
    halves = [json_lines(all_rows[:7000]).encode(), json_lines(all_rows[7000:]).encode()]
    for name, pack in (
        (".gz", gzip.compress),
        (".zst", lambda raw: bytes(pa.Codec("zstd").compress(raw))),
    ):
        path = tmp_path / f"a.jsonl{name}"
        path.write_bytes(b"".join(map(pack, halves)))
        assert read_rows(path) == all_rows


@pytest.mark.parametrize("kind", [*CONTENTS, ".txt"])
@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-be", "utf-32"])
def test_strips_byte_order_mark(tmp_path: Path, kind: str, encoding: str) -> None:
    text = CONTENTS.get(kind, "Grüße\n").replace("is", "süß")
    mark = "\ufeff" if encoding == "utf-16-be" else ""
    (tmp_path / f"a{kind}").write_bytes((mark + text).encode(encoding))
    plain = write(tmp_path / "plain" / f"a{kind}", text)
    assert read_rows(tmp_path / f"a{kind}") == read_rows(plain)


def test_undecodable_text_is_reported(tmp_path: Path) -> None:
    for order in ("le", "be"):
        (tmp_path / "a.jsonl").write_bytes(json_lines(ROWS).encode(f"utf-16-{order}"))
        text = expect_error(tmp_path / "a.jsonl")
        assert "UTF-16 without a byte order mark" in text
        assert f"iconv -f utf-16{order} -t utf-8" in text
    (tmp_path / "a.json").write_bytes(json.dumps(ROWS).encode("utf-16")[:-1])
    assert "is not UTF-16 text" in expect_error(tmp_path / "a.json")
    (tmp_path / "a.jsonl").write_bytes(json_lines(ROWS).encode("utf-16")[:-3])
    assert "line 5 of" in expect_error(tmp_path / "a.jsonl") or "UTF-16" in expect_error(
        tmp_path / "a.jsonl"
    )
    (tmp_path / "a.csv").write_bytes(bytes(range(256)) * 20)
    assert "zero bytes" in expect_error(tmp_path / "a.csv")


@pytest.mark.parametrize("packed", [".gz", ".bz2", ".xz", ".zst"])
def test_damaged_compressed_file_is_reported(tmp_path: Path, packed: str) -> None:
    path = compress(tmp_path / f"a.jsonl{packed}", json_lines(ROWS * 500).encode())
    path.write_bytes(path.read_bytes()[:-20])
    text = expect_error(path)
    assert "cannot be decompressed" in text
    assert "truncated while it was copied" in text
    path.write_bytes(path.read_bytes()[:40] + b"\xff" * 60)
    assert "cannot be decompressed" in expect_error(path) or "is not" in expect_error(path)


def test_rejects_unsupported_compressed_files(tmp_path: Path) -> None:
    assert "rows.jsonl.gz" in expect_error(compress(tmp_path / "rows.gz", b"x"))
    assert "unpack it" in expect_error(write(tmp_path / "rows.zip", "x"))
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    assert "decompress it first" in expect_error(
        compress(tmp_path / "b.parquet.gz", (tmp_path / "a.parquet").read_bytes())
    )


def test_glob_patterns_and_folders(tmp_path: Path) -> None:
    compress(tmp_path / "data" / "a.jsonl.gz", json_lines(ROWS[:2]).encode())
    compress(tmp_path / "data" / "b.csv.zst", CONTENTS[".csv"].encode())
    write(tmp_path / "data" / "deep" / "c.jsonl", json_lines(ROWS[2:]))
    write(tmp_path / "data" / "notes.pdf", "x")
    assert read_rows(tmp_path / "data") == [*ROWS[:2], *ROWS, *ROWS[2:]]
    assert read_rows(f"{tmp_path}/data/*.jsonl.gz") == ROWS[:2]
    assert read_rows(f"{tmp_path}/data/**/*.jsonl*") == ROWS
    assert len(read_rows(f"{tmp_path}/data/*.gz#1")) == 1
    source = open_source(DatasetSource(path=f"{tmp_path}/data/*"))
    assert [text for _, text in source.notices] == [
        f"{tmp_path}/data/*: 2 data files",
        f"{tmp_path}/data/*: skipped notes.pdf",
    ]
    text = expect_error(f"{tmp_path}/data/*.parquet")
    assert "matches no data files" in text
    assert "nothing" in text
    write(tmp_path / "odd[1].jsonl", json_lines(ROWS))
    # A file with exactly this name takes precedence.
    assert read_rows(tmp_path / "odd[1].jsonl") == ROWS


@pytest.mark.parametrize(
    ("value", "split", "expected", "level", "texts"),
    [
        (
            {"train": ROWS[:3], "test": ROWS[3:]},
            "train",
            ROWS[:3],
            "info",
            ("using split `train`", "test (2 rows)"),
        ),
        (
            {"test": ROWS[3:], "training": ROWS[:3]},
            "train",
            ROWS[:3],
            "info",
            ("using split `training`", "test (2 rows)"),
        ),
        (
            {"train": ROWS[:3], "dev": ROWS[3:]},
            "validation",
            ROWS[3:],
            "info",
            ("using split `dev`", "train (3 rows)"),
        ),
        (
            {"train": ROWS[:3], "extra": ROWS[3:]},
            "extra",
            ROWS[3:],
            "info",
            ("using split `extra`", "train (3 rows)"),
        ),
        ({"test": ROWS}, "train", ROWS, "warning", ("using split `test`",)),
        (
            {
                "train": {"prompt": ["a", "b"], "completion": ["c", "d"]},
                "test": {"prompt": ["e"], "completion": ["f"]},
            },
            "train",
            [{"prompt": "a", "completion": "c"}, {"prompt": "b", "completion": "d"}],
            "info",
            ("using split `train`", "test (1 rows)"),
        ),
    ],
)
def test_json_object_with_splits(
    tmp_path: Path, value: Any, split: str, expected: list[Any], level: str, texts: tuple[str, ...]
) -> None:
    source = open_source(
        DatasetSource(path=str(write(tmp_path / "a.json", json.dumps(value))), split=split)
    )
    assert [row for _, row in source.rows(0)] == expected
    ((notice_level, text),) = source.notices
    assert notice_level == level
    assert all(part in text for part in texts), text


def test_json_object_without_requested_split(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", json.dumps({"validation": ROWS, "test": ROWS}))
    text = expect_error(path)
    assert "no split `train`; it has validation, test" in text
    assert read_rows(path, split="test") == ROWS


def test_json_lines_with_blank_lines(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl", "\ufeff" + json_lines(ROWS[:2]) + "\n  \n" + json_lines(ROWS[2:])
    )
    assert read_rows(path) == ROWS
    places = [place for place, _ in open_source(DatasetSource(path=str(path))).rows(0)]
    assert places[2] == f"line 5 of {path}"  # blank lines are counted


@pytest.mark.parametrize(
    "value",
    [
        ROWS,
        {"version": 1, "data": ROWS},
        {
            "prompt": [row["prompt"] for row in ROWS],
            "completion": [row["completion"] for row in ROWS],
        },
    ],
    ids=["array", "object with a list", "object of columns"],
)
def test_json_layouts(tmp_path: Path, value: Any) -> None:
    assert read_rows(write(tmp_path / "a.json", json.dumps(value, indent=1))) == ROWS
    assert read_rows(write(tmp_path / "b.jsonl", json.dumps(ROWS, indent=1))) == ROWS


def test_json_file_with_json_lines_strings_or_single_row(tmp_path: Path) -> None:
    assert read_rows(write(tmp_path / "a.json", json_lines(ROWS))) == ROWS
    assert read_rows(write(tmp_path / "b.json", '["one", "two"]')) == [
        {"text": "one"},
        {"text": "two"},
    ]
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    assert read_rows(write(tmp_path / "c.json", json.dumps(chat))) == [chat]
    assert (
        read_rows(
            write(tmp_path / "d.json", json.dumps({"train": ROWS, "test": ROWS[:1]})), split="test"
        )
        == ROWS[:1]
    )


def test_csv_and_tsv(tmp_path: Path) -> None:
    text = 'prompt,completion\n"a, ""b""","two\nlines"\nc,d\n'
    expected = [
        {"prompt": 'a, "b"', "completion": "two\nlines"},
        {"prompt": "c", "completion": "d"},
    ]
    assert read_rows(write(tmp_path / "a.csv", text)) == expected
    assert read_rows(write(tmp_path / "a.tsv", "prompt\tcompletion\nc\td\n")) == expected[1:]
    assert read_rows(write(tmp_path / "b.csv", "prompt;completion\nc;d\n")) == expected[1:]
    assert read_rows(write(tmp_path / "c.csv", "prompt,completion\na,b,c\nc,d\n")) == [
        BrokenRow(TOO_MANY_FIELDS),
        expected[1],
    ]  # counted when it is converted


def test_parquet_and_arrow(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    pq.write_table(table, tmp_path / "a.parquet")
    assert read_rows(tmp_path / "a.parquet") == ROWS
    for name, new_writer in (("stream.arrow", pa.ipc.new_stream), ("file.arrow", pa.ipc.new_file)):
        with new_writer(tmp_path / name, table.schema) as writer:
            writer.write_table(table)
        assert read_rows(tmp_path / name) == ROWS
    assert "cannot be read as Parquet" in expect_error(write(tmp_path / "b.parquet", "no table"))


@pytest.mark.soak
def test_folder_saved_by_datasets_library(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    DatasetDict(
        {"train": Dataset.from_list(ROWS), "test": Dataset.from_list(ROWS[:1])}
    ).save_to_disk(tmp_path / "saved")
    assert read_rows(tmp_path / "saved") == ROWS
    assert read_rows(tmp_path / "saved", split="test") == ROWS[:1]


def test_plain_text(tmp_path: Path) -> None:
    assert read_rows(write(tmp_path / "a.txt", "one\n\ntwo\n")) == [{DOCUMENT: "one\n\ntwo\n"}]
    assert read_rows(write(tmp_path / "empty.md", " \n")) == []


def test_folder_is_read_in_name_order_and_skipped_files_are_reported(tmp_path: Path) -> None:
    write(tmp_path / "d/b/2.jsonl", json_lines(ROWS[3:]))
    write(tmp_path / "d/a.json", json.dumps(ROWS[:3]))
    write(tmp_path / "d/README.md", "about")
    write(tmp_path / "d/.hidden.jsonl", "broken")
    source = open_source(DatasetSource(path=str(tmp_path / "d")))
    assert [row for _, row in source.rows(0)] == ROWS
    assert any("README.md" in text for _, text in source.notices)
    write(tmp_path / "t/x.txt", "one")
    write(tmp_path / "t/y.md", "two")
    assert read_rows(tmp_path / "t") == [{DOCUMENT: "one"}, {DOCUMENT: "two"}]


def test_folder_with_split_files(tmp_path: Path) -> None:
    write(tmp_path / "data/train-00000-of-00001.jsonl", json_lines(ROWS))
    write(tmp_path / "data/test-00000-of-00001.jsonl", json_lines(ROWS[:1]))
    source = open_source(DatasetSource(path=str(tmp_path)))
    assert [row for _, row in source.rows(0)] == ROWS
    assert any("skipped files of other splits: test-00000" in text for _, text in source.notices)
    assert read_rows(tmp_path, split="test") == ROWS[:1]


def test_numbers_in_braces_name_files(tmp_path: Path) -> None:
    for number in range(8, 11):
        write(tmp_path / f"a-{number:02}.jsonl", json_lines(ROWS[number - 8 : number - 7]))
    assert read_rows(tmp_path / "a-{09..10}.jsonl") == ROWS[1:3]
    assert "a-07.jsonl` does not exist" in expect_error(tmp_path / "a-{07..09}.jsonl")


def test_number_suffix_selects_first_n_of_seeded_shuffle(tmp_path: Path) -> None:
    all_rows = [{"text": str(n)} for n in range(100)]
    path = write(tmp_path / "a.jsonl", json_lines(all_rows))
    selection = read_rows(f"{path}#10")
    assert len(selection) == 10
    assert selection == read_rows(f"{path}#10")
    assert selection != read_rows(f"{path}#10", seed=1)
    # A larger N includes the rows of a smaller one.
    assert all(row in read_rows(f"{path}#20") for row in selection)
    source = open_source(DatasetSource(path=f"{path}#1_000"))
    assert len(list(source.rows(0))) == 100
    notices = [text for _, text in source.notices]
    assert any("1,000 rows requested, but the dataset has 100" in text for text in notices)
    assert "selects 0 rows" in expect_error(f"{path}#0")
    assert read_rows(f"{path}#10%") == selection
    assert len(read_rows(f"{path}#0.1%")) == 1
    assert read_rows(f"{path}#100%") == all_rows
    assert "selects more than all rows" in expect_error(f"{path}#101%")
    assert "selects 0 rows" in expect_error(f"{path}#0%")


def test_file_name_that_contains_number_sign(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl#2", "")
    path.rename(tmp_path / "a#2")
    write(tmp_path / "b#2.jsonl", json_lines(ROWS))
    assert len(read_rows(tmp_path / "b#2.jsonl")) == 5
    assert len(read_rows(f"{tmp_path}/b#2.jsonl#3")) == 3


def test_builtin_source_with_number_suffix() -> None:
    assert len(read_rows("builtin:python-docs#7")) == 7
    assert "`builtin:python-docs`" in expect_error("builtin:python-doc")


def test_invalid_json_error_names_line(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl",
        json_lines(ROWS[:2]) + '{"prompt": "x", "completion" "y"}\n' + json_lines(ROWS[2:]),
    )
    message = expect_error(path)
    assert f"line 3 of `{path}`" in message
    assert '"completion" "y"' in message
    assert "line 3" in expect_error(path.rename(tmp_path / "a.json"))
    truncated_file = write(tmp_path / "b.jsonl", json_lines(ROWS)[:-20])
    assert "line 5" in expect_error(truncated_file)
    assert "truncated" in expect_error(truncated_file)
    array = write(tmp_path / "c.json", '[{"a": 1},\n {"a": 2},\n {"a" 3}]')
    assert "line 3" in expect_error(array)


def test_invalid_utf8_error_names_line(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.json", "a.csv", "a.txt"):
        (tmp_path / name).write_bytes(b'{"text": "ok"}\n{"text": "caf\xe9"}\n')
        assert "not UTF-8" in expect_error(tmp_path / name)
    assert "line 2" in expect_error(tmp_path / "a.jsonl")


def test_missing_file_error_suggests_similar_name(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", json_lines(ROWS))
    assert f"did you mean `{tmp_path / 'train.jsonl'}`" in expect_error(tmp_path / "trian.jsonl")
    (tmp_path / "datasets").mkdir()
    assert f"did you mean `{tmp_path / 'datasets'}`" in expect_error(
        tmp_path / "dataset" / "train.jsonl"
    )
    assert "did you mean `alpaca-en`" in expect_error("alpaca-eng")


def test_rejects_folder_without_data_and_unknown_file_types(tmp_path: Path) -> None:
    write(tmp_path / "d/weights.bin", "x")
    assert "no data files in the folder" in expect_error(tmp_path / "d")
    assert "is not a supported data file (the suffix `.bin`)" in expect_error(
        tmp_path / "d/weights.bin"
    )
    assert "single int" in expect_error(write(tmp_path / "a.json", "3"))
    assert "several lists: a, b" in expect_error(
        write(tmp_path / "b.json", json.dumps({"a": ROWS, "b": ROWS}))
    )


@pytest.mark.parametrize(
    "name", ["alpaca-en", "Alpaca_EN", "tatsu-lab/alpaca", "tatsu-lab/alpaca#100", "gsm8k"]
)
def test_offline_hub_error_suggests_local_path(name: str) -> None:
    message = expect_error(name)  # access to the hub is disabled for all tests
    assert "cannot be downloaded" in message
    assert "dataset=/path/to/data" in message


def test_fingerprint_depends_on_content(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", json_lines(ROWS))
    first = open_source(DatasetSource(path=str(path))).fingerprint()
    copy = write(tmp_path / "b.jsonl", json_lines(ROWS))
    assert open_source(DatasetSource(path=str(copy))).fingerprint() == first
    write(path, json_lines(ROWS).replace("0", "9"))  # same size
    assert open_source(DatasetSource(path=str(path))).fingerprint() != first
