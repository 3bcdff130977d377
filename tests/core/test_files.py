"""Test that files and folders are replaced atomically."""

import hashlib
import json
import os
from pathlib import Path

import pytest
from disks import mount_tmpfs

from paceline.core.files import (
    cache_dir,
    human_bytes,
    replace_dir,
    sha256_file,
    sync_tree,
    write_atomic,
    write_json_atomic,
)


def file_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_write_atomic_replaces_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_atomic(path, "old")
    write_atomic(path, "süß".encode())
    assert path.read_text(encoding="utf-8") == "süß"
    write_json_atomic(path, {"b": "ä", "a": [1]})
    assert json.loads(path.read_text(encoding="utf-8")) == {"b": "ä", "a": [1]}
    assert path.read_text().index('"b"') < path.read_text().index('"a"')
    assert file_names(tmp_path) == ["a.txt"]


def test_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.mkdir()
    (path / "inside").write_text("x")
    with pytest.raises(OSError, match=r"directory|empty|exists"):
        write_atomic(path, "new")
    assert file_names(tmp_path) == ["a.txt"]
    assert file_names(path) == ["inside"]


def test_full_disk_keeps_the_old_file(tmp_path: Path) -> None:
    with mount_tmpfs(tmp_path / "small", "size=64k") as mounted:
        if mounted:
            path = tmp_path / "small" / "a.txt"
            write_atomic(path, "old")
            with pytest.raises(OSError, match="No space left"):
                write_atomic(path, b"x" * 100_000)
            assert path.read_text() == "old"
            assert file_names(path.parent) == ["a.txt"]


@pytest.mark.parametrize("target_exists", [False, True])
def test_replace_dir_replaces_the_target(tmp_path: Path, target_exists: bool) -> None:
    staging_dir, final = tmp_path / "staging", tmp_path / "final"
    (staging_dir / "deep").mkdir(parents=True)
    (staging_dir / "deep" / "new").write_text("n")
    if target_exists:
        final.mkdir()
        (final / "old").write_text("o")
    replace_dir(staging_dir, final)
    assert file_names(tmp_path) == ["final"]
    assert file_names(final) == ["deep"]
    sync_tree(final)


def test_sha256_file_matches_hashlib(tmp_path: Path) -> None:
    raw = os.urandom((1 << 20) + 7)
    (tmp_path / "x").write_bytes(raw)
    assert sha256_file(tmp_path / "x") == hashlib.sha256(raw).hexdigest()


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (5 << 20, "5.0 MiB"),
        (3 << 30, "3.0 GiB"),
        (2 << 40, "2.0 TiB"),
    ],
)
def test_human_bytes_uses_binary_units(size: int, text: str) -> None:
    assert human_bytes(size) == text


def test_cache_dir_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "paceline"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "paceline"
