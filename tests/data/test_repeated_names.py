"""Keys of JSON objects and columns of tables that occur twice are errors, because one of their
values would be lost."""

import gzip
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from raised import raises_error

from paceline.config.schema import Config
from paceline.config.schema.data import DatasetSource
from paceline.core.errors import ConfigError
from paceline.data.encoding.prepare import prepare_tokens
from paceline.data.sources.readers import read_file
from paceline.data.sources.resolve import open_source
from paceline.data.sources.rows import RepeatedKey, parse_json
from paceline.data.streaming.prepare import prepare_stream
from paceline.data.streaming.tables import open_table
from paceline.data.text.formats import RowConverter
from paceline.models.builtin import resolve_model

GOOD = '{"prompt": "a", "completion": "b"}'
REPEATED = [
    ('{"prompt": "a", "prompt": "b", "completion": "c"}', "`prompt` twice."),
    ('{"prompt": "a", "prompt": "a", "completion": "c"}', "`prompt` twice."),
    (
        '{"messages": [{"role": "user", "content": "x"},'
        ' {"role": "user", "content": "x", "content": "y"}]}',
        "`content` twice in `messages[1]`",
    ),
    (
        '{"prompt": "a", "completion": "b", "tools": [{"p": {"q": 1, "q\\u0031": 2, "q1": 3}}]}',
        "`q1` twice in `tools[0].p`",
    ),
    ('{"prompt": "a", "\\u0070rompt": "b", "completion": "c"}', "`prompt` twice"),
]


def error_of(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        list(read_file(path))
    return str(caught.value)


@pytest.mark.parametrize(("row", "text"), REPEATED)
@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.jsonl.gz", "a.json", "b.json"])
def test_key_of_json_that_occurs_twice(tmp_path: Path, name: str, row: str, text: str) -> None:
    content = f"{GOOD}\n\n{row}\n{GOOD}\n"
    place = f"line 3 of `{tmp_path / name}`"
    if name == "b.json":
        content = f"[{GOOD},\n{row},\n{GOOD}]"
        place = f"row 2 of `{tmp_path / name}`"
    raw = content.encode()
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    message = error_of(tmp_path / name)
    assert f"{place} has the key {text}" in message
    assert "keep one of the values" in message
    with raises_error(ConfigError, code="repeated-json-key"):
        list(open_source(DatasetSource(path=str(tmp_path / name))).rows(0))


def test_key_of_json_in_other_layouts(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(f'{{"train": [{GOOD}, {REPEATED[0][0]}]}}')
    assert "has the key `prompt` twice in `train[1]`" in error_of(path)
    path.write_text(f'{{"train": [{GOOD}], "train": [{GOOD}]}}')
    assert "has the key `train` twice" in error_of(path)
    pretty = json.dumps(json.loads(GOOD), indent=1)
    path = tmp_path / "a.jsonl"
    path.write_text(pretty + '\n{\n"prompt": "a",\n"prompt": "b"}\n')
    assert f"row 2 of `{path}` has the key `prompt` twice" in error_of(path)


def test_same_keys_in_different_objects_and_colons_in_texts_are_read() -> None:
    for value in (
        {"a": {"a": {"a": 1}}, "b": [{"a": 1}, {"a": 2}]},
        {"prompt": '{"a": 1, "a": 2}', "completion": '"prompt": "prompt":'},
    ):
        assert parse_json(json.dumps(value)) == value
    with pytest.raises(RepeatedKey):
        parse_json('{"a": 1, "a": 2}')


@pytest.mark.parametrize("header", ["prompt,completion,prompt", "a,prompt,prompt,completion"])
@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("quoted", [False, True])
def test_column_of_csv_that_occurs_twice(
    tmp_path: Path, header: str, delimiter: str, quoted: bool
) -> None:
    names = header.split(",")
    line = delimiter.join(f'"{name}"' if quoted else name for name in names)
    path = tmp_path / ("a.tsv" if delimiter == "\t" else "a.csv")
    path.write_text(f"{line}\n{delimiter.join('x' * len(names))}\n")
    assert f"`{path}` has two columns with the name `prompt`" in error_of(path)
    with raises_error(ConfigError, code="repeated-column", naming="prompt"):
        open_table(path)


def test_columns_without_a_name_may_occur_twice(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("prompt,completion,,\na,b,,\n")
    assert [row for _, row in read_file(path)] == [{"prompt": "a", "completion": "b", "": ""}]


def _tables() -> dict[str, Any]:
    cells = [pa.array(["x"]), pa.array(["y"])]
    structure = pa.StructArray.from_arrays(cells, names=["role", "role"])
    return {
        "`prompt`": pa.Table.from_arrays(cells, names=["prompt", "prompt"]),
        "`turn.role`": pa.table({"turn": structure}),
        "`turns.role`": pa.table({"turns": pa.ListArray.from_arrays([0, 1], structure)}),
    }


@pytest.mark.parametrize("name", ["`prompt`", "`turn.role`", "`turns.role`"])
@pytest.mark.parametrize("kind", ["a.parquet", "stream.arrow", "file.arrow"])
def test_column_of_arrow_that_occurs_twice(tmp_path: Path, name: str, kind: str) -> None:
    table, path = _tables()[name], tmp_path / kind
    if kind == "a.parquet":
        pq.write_table(table, path)
    else:
        new = pa.ipc.new_stream if kind.startswith("stream") else pa.ipc.new_file
        with new(path, table.schema) as writer:
            writer.write_table(table)
    assert f"two columns with the name {name}" in error_of(path)
    with raises_error(ConfigError, code="repeated-column"):
        open_table(path)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("a.jsonl", "repeated-json-key"),
        ("a.csv", "repeated-column"),
        ("a.parquet", "repeated-column"),
    ],
)
def test_streams_refuse_repeated_names(tmp_path: Path, name: str, code: str) -> None:
    path = tmp_path / name
    if name == "a.jsonl":
        path.write_text(f"{GOOD}\n{REPEATED[0][0]}\n")
    elif name == "a.csv":
        path.write_text("prompt,prompt,completion\na,b,c\n")
    else:
        pq.write_table(_tables()["`prompt`"], path)
    config = Config(
        model="builtin:qwen2-micro", dataset=str(path), streaming=True, train_args={"max_steps": 1}
    )
    with raises_error(ConfigError, code=code, naming="prompt"):
        prepare_stream(config, "sft", resolve_model)


def test_files_of_a_tar_sample_with_the_same_column(tmp_path: Path) -> None:
    def shard(files: dict[str, str]) -> Path:
        with tarfile.open(tmp_path / "a.tar", "w") as archive:
            for name, content in files.items():
                info = tarfile.TarInfo(name)
                info.size = len(content.encode())
                archive.addfile(info, io.BytesIO(content.encode()))
        return tmp_path / "a.tar"

    path = shard({"1.json": '{"text": "a", "n": 1}', "1.txt": "a", "2.json": '{"text": "b"}'})
    assert [row["text"] for _, row in read_file(path)] == ["a", "b"]
    text = error_of(shard({"1.json": '{"text": "a"}', "1.txt": "b"}))
    assert "the sample `1`" in text
    assert "`1.json` and in `1.txt`" in text
    text = error_of(shard({"1.json": '{"text": "a", "text": "b"}'}))
    assert "`1.json` in" in text
    assert "has the key `text` twice" in text


QUESTION = '{"role": "user", "content": "q"}'
ANSWER = '{"role": "assistant", "content": "a"}'
TWICE = '{"role": "assistant", "content": "a", "content": "b"}'
CALL = '{"name": "f", "arguments": {"city": "Bonn", "city": "Rome"}}'


def with_call(call: Any) -> list[dict[str, Any]]:
    """Return a chat with a call."""
    return [json.loads(QUESTION), {"role": "assistant", "content": "", "tool_calls": call}]


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"messages": f"[{QUESTION}, {TWICE}]"}, "`content` twice in `[1]`"),
        ({"prompt": f"[{QUESTION}]", "completion": f"[{TWICE}]"}, "`content` twice in `[0]`"),
        ({"instruction": "q", "output": "a", "history": '[{"a": 1, "a": 2}]'}, "`a` twice"),
        ({"messages": with_call(f"[{CALL}]")}, "`city` twice in `[0].arguments`"),
        ({"messages": with_call([CALL])}, "`city` twice in `arguments`"),
        (
            {"messages": with_call([{"name": "f", "arguments": '{"city": 1, "city": 2}'}])},
            "`city` twice.",
        ),
        ({"messages": with_call(["{'name': 'f', 'name': 'g'}"])}, "`name` twice."),
        (
            {"messages": [json.loads(QUESTION), json.loads(ANSWER)],
             "tools": '[{"name": "f", "name": "g"}]'},
            "`name` twice in `[0]`",
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_key_of_json_text_in_a_cell_that_occurs_twice(
    tmp_path: Path, kind: str, row: dict[str, Any], text: str
) -> None:
    path = tmp_path / f"rows.{kind}"
    if kind == "jsonl":
        path.write_text(json.dumps(row) + "\n")
    else:
        pq.write_table(pa.Table.from_pylist([row]), path)
    config = Config(model="builtin:qwen2-micro", dataset=str(path), chat_template="qwen3")
    for prepare in (prepare_tokens, prepare_stream):
        with pytest.raises(ConfigError) as caught:
            prepare(config, "sft", resolve_model)
        message = str(caught.value)
        assert f"1 of {path}: JSON text in a value of the row has the key {text}" in message
        assert "keep one of the values" in message


def test_texts_that_look_like_json_with_a_repeated_key_stay_texts() -> None:
    for text in ('[{"a": 1, "a": 2}]', '{"role": "x", "role": "y"}', "{'a': 1, 'a': 2}"):
        sample = RowConverter("data")({"prompt": text, "completion": text})
        assert sample.pair == (text, text)
