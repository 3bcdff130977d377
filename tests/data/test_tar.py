"""Tar shards in the layout of WebDataset."""

import gzip
import json
from pathlib import Path

import pytest
from tar_shards import write_shard

from paceline.core.errors import ConfigError
from paceline.data.sources.opening import expand_braces
from paceline.data.sources.readers import read_file
from paceline.data.sources.tar import read_tar_file, tar_samples

FILES = {
    "a/001.jpg": b"first",
    "a/001.json": b'{"prompt": "p", "completion": "c", "image": "001.jpg"}',
    "README": b"not a sample",
    "a/002.left.PNG": b"left",
    "a/002.right.PNG": b"right",
    "a/002.txt": "caption é".encode(),
    "a/002.cls": b"7\n",
    "a/.hidden.json": b"{",
    "a/003.npy": b"array",
    "b.c/004.json": b"[1, 2]",
}


def test_rows_are_samples_of_consecutive_files(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "rows.tar", FILES)
    for _ in range(2):  # the second time from the cache
        rows = dict(read_file(path))
        images = [row.pop("images", []) for row in rows.values()]
        other = rows[4].pop("npy")
        assert list(rows.values()) == [
            {"prompt": "p", "completion": "c"},
            {},
            {"text": "caption é", "label": 7},
            {},
            {"json": [1, 2]},
        ]
        contents = [[read_tar_file(image) for image in row] for row in images]
        assert contents == [[b"first"], [], [b"left", b"right"], [], []]
        assert read_tar_file(other) == b"array"
    assert read_tar_file(str(path)) is None


def test_repeated_key_or_extension_begins_a_sample(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "rows.tar", {"1.jpg": b"a", "2.jpg": b"b", "1.txt": b"c"})
    assert [sample.key for sample in tar_samples(path)] == ["1", "2", "1"]


def test_changed_shard_is_read_again(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "rows.tar", {"1.txt": b"old"})
    assert [row for _, row in read_file(path)] == [{"text": "old"}]
    write_shard(path, {"1.txt": b"new", "2.txt": b"more"})
    assert [row for _, row in read_file(path)] == [{"text": "new"}, {"text": "more"}]


def test_numbers_in_braces_are_expanded() -> None:
    assert expand_braces("a-{08..10}.tar") == ["a-08.tar", "a-09.tar", "a-10.tar"]
    assert expand_braces("{0..1}/{0..1}.tar") == ["0/0.tar", "0/1.tar", "1/0.tar", "1/1.tar"]
    assert expand_braces("a.tar") == ["a.tar"]


def test_damaged_shards_are_refused(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "rows.tar", {"1.json": json.dumps({"a": "b" * 5000}).encode()})
    content = path.read_bytes()
    for damaged, message in (
        (content[:3000], "cannot be read as a tar file: unexpected end of data"),
        (b"text " * 1000, "cannot be read as a tar file"),
        (gzip.compress(content), "is compressed with gzip"),
        (content.replace(b'{"a"', b'{"a '), r"`1\.json` in .* is not valid JSON"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match=message):
            list(read_file(path))
