"""Tar shards in the layout of WebDataset: consecutive files whose names differ only after the first
dot of the file name are one sample, such as ``0001.jpg`` and ``0001.json``.

Shards are not unpacked. The places of their files are found in one pass over the headers and stored
in the cache, and a file is read when it is needed.
"""

from __future__ import annotations

import json
import os
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError, first_line
from paceline.core.files import cache_dir
from paceline.data.cache import build_once, fingerprint, key_of
from paceline.data.sources.json_rows import repeated_key
from paceline.data.sources.opening import compression_of, data_suffix, encoding_fix
from paceline.data.sources.rows import RepeatedKey, Row, parse_json

TAR_SUFFIX = ".tar"
IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "jp2")
CLASS_SUFFIX = "cls"
_TEXT_SUFFIXES = ("txt", "text")
#: The key of a sample, and the extension.
_NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)", re.DOTALL)
#: The path of a file in a shard; see :meth:`TarFile.path`.
_FILE_PATH = re.compile(r"(.+\.tar)/(.+)@(\d+)\+(\d+)", re.DOTALL | re.IGNORECASE)
_NAMES, _SPANS = "names.json", "spans.npy"
#: Smaller shards are identified by a hash of their content.
_HASHED_BYTES = 16 << 20


@dataclass(frozen=True)
class TarFile:
    """A file in a shard."""

    shard: Path
    name: str
    offset: int
    size: int

    @property
    def path(self) -> str:
        """An absolute path with which :func:`read_tar_file` reads the file: the path of the
        shard, and the file's name and place in it."""
        return f"{self.shard.absolute()}/{self.name}@{self.offset}+{self.size}"

    def read(self, size: int | None = None) -> bytes:
        """Return the content, or its first ``size`` bytes."""
        with open(self.shard, "rb") as file:
            file.seek(self.offset)
            return file.read(self.size if size is None else min(size, self.size))


@dataclass(frozen=True)
class TarSample:
    """The files of a sample by their extensions in lower case; none for a file without one."""

    key: str
    files: dict[str, TarFile]

    def images(self) -> list[TarFile]:
        """Return the images, in the order of the shard."""
        return [file for name, file in self.files.items() if _kind(name) in IMAGE_SUFFIXES]


def is_tar(name: str) -> bool:
    """Return whether a path, pattern or URL names tar shards (those that are compressed are refused
    when they are read)."""
    return data_suffix(Path(name)) == TAR_SUFFIX


def is_tar_file(path: str) -> bool:
    """Return whether a path names a file in a shard; see :attr:`TarFile.path`."""
    return _FILE_PATH.fullmatch(path) is not None


def read_tar_file(path: str) -> bytes | None:
    """Return the content of a file in a shard, or None if ``path`` names another file."""
    match = _FILE_PATH.fullmatch(path)
    if match is None:
        return None
    shard, name, offset, size = match.groups()
    return TarFile(Path(shard), name, int(offset), int(size)).read()


def tar_samples(shard: Path) -> Iterator[TarSample]:
    """Yield the samples of a shard in order.

    Raises:
        ConfigError: the file is not an uncompressed tar file, or it is damaged.
    """
    sample: TarSample | None = None
    for file in _files(shard):
        match = _NAME.fullmatch(file.name)
        key, suffix = match.groups() if match is not None else (file.name, "")
        suffix = suffix.lower()
        if sample is not None and (sample.key != key or suffix in sample.files or not suffix):
            yield sample
            sample = None
        if sample is None:
            sample = TarSample(key, {})
        if suffix:
            sample.files[suffix] = file
    if sample is not None:
        yield sample


def tar_rows(shard: Path) -> Iterator[tuple[int, Row]]:
    """Yield the samples of a shard as rows, each with its number: the object of a JSON file, the
    column ``text`` of a text, ``label`` of a class, and ``images`` with the paths of the images.

    Raises:
        ConfigError: the shard is damaged, or a JSON file or a text in it is invalid.
    """
    for number, sample in enumerate(tar_samples(shard), 1):
        yield number, _row(sample)


def sample_class(sample: TarSample) -> str | None:
    """Return the name of the class of an image, from a file ``.cls`` or the key ``label`` or
    ``cls`` of a JSON file; None without one."""
    if (file := sample.files.get(CLASS_SUFFIX)) is not None:
        return file.read().decode("utf-8", errors="replace").strip() or None
    row = _json(sample.files["json"]) if "json" in sample.files else {}
    value = row.get("label", row.get(CLASS_SUFFIX)) if isinstance(row, dict) else None
    return str(value) if isinstance(value, str | int) and str(value).strip() else None


def _row(sample: TarSample) -> Row:
    row: Row = {}
    origins: dict[str, str] = {}

    def add(column: str, value: Any, file: TarFile) -> None:
        if row.setdefault(column, value) != value:
            raise ConfigError(
                "the sample `{sample}` in `{shard}` has two values of the column `{column}`: in"
                " `{origins}` and in `{file}`",
                code="two-values-of-column",
                fix="remove or rename one of them, and write the shard again",
                sample=sample.key,
                shard=file.shard,
                column=column,
                origins=origins[column],
                file=file.name,
            )
        origins.setdefault(column, file.name)

    for suffix, file in sample.files.items():
        kind = _kind(suffix)
        if kind == "json":
            value = _json(file)
            for column, cell in (value if isinstance(value, dict) else {suffix: value}).items():
                add(column, cell, file)
        elif kind in _TEXT_SUFFIXES:
            add("text", _text(file), file)
        elif kind == CLASS_SUFFIX:
            text = _text(file).strip()
            add("label", int(text) if text.isdecimal() else text, file)
        elif kind not in IMAGE_SUFFIXES:
            add(suffix, file.path, file)
    if images := sample.images():
        row.pop("image", None)  # its name
        row["images"] = [image.path for image in images]
    return row


def _kind(suffix: str) -> str:
    return suffix.rpartition(".")[2]


def _json(file: TarFile) -> Any:
    try:
        return parse_json(_text(file))
    except RepeatedKey as error:
        raise repeated_key(f"`{file.name}` in `{file.shard}`", error) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            "`{file}` in `{shard}` is not valid JSON: {reason}",
            code="invalid-json-in-shard",
            fix="correct the file and write the shard again",
            file=file.name,
            shard=file.shard,
            reason=first_line(error),
        ) from error


def _text(file: TarFile) -> str:
    try:
        return file.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            "`{file}` in `{shard}` is not UTF-8 text",
            code="shard-not-utf8",
            fix="{encoding_fix}; then write the shard again",
            file=file.name,
            shard=file.shard,
            encoding_fix=encoding_fix(error.object, Path(file.name)),
        ) from error


def _files(shard: Path) -> Iterator[TarFile]:
    """Yield the regular files of a shard, without hidden ones; from the cache, if it was read
    before."""
    import numpy as np  # slow, and not needed by commands that only print their help

    key = key_of(["tar", *fingerprint(shard, _HASHED_BYTES)])
    folder = cache_dir() / "rows" / key

    def build(staging: Path) -> None:
        names, spans = _scan(shard)
        np.save(staging / _SPANS, np.array(spans, dtype=np.int64).reshape(-1, 2))
        (staging / _NAMES).write_text(json.dumps(names))

    build_once(folder, _NAMES, build)
    names, spans = json.loads((folder / _NAMES).read_text()), np.load(folder / _SPANS)
    for name, (offset, size) in zip(names, spans.tolist(), strict=True):
        yield TarFile(shard, name, offset, size)


def _scan(shard: Path) -> tuple[list[str], list[tuple[int, int]]]:
    """Return the names, and the offsets and sizes, of the files of a shard."""
    if (kind := compression_of(shard)) is not None:
        raise ConfigError(
            "`{shard}` is compressed with {kind}: the files in it cannot be read one by one",
            code="compressed-tar",
            allowed="uncompressed tar files; images have a compression of their own",
            fix="decompress it, for example with `{kind} -d`",
            shard=shard,
            kind=kind,
        )
    names: list[str] = []
    spans: list[tuple[int, int]] = []
    size = os.path.getsize(shard)
    try:
        with tarfile.open(shard, "r:") as archive:
            for member in archive:
                if member.offset_data + member.size > size:
                    raise tarfile.ReadError("unexpected end of data")
                base = member.name.rpartition("/")[2]
                if member.isreg() and not base.startswith((".", "__")):
                    names.append(member.name)
                    spans.append((member.offset_data, member.size))
    except (tarfile.TarError, OSError, EOFError) as error:
        raise ConfigError(
            "`{shard}` cannot be read as a tar file: {reason}",
            code="damaged-shard",
            fix="check the file; it may have been truncated while it was copied",
            shard=shard,
            reason=first_line(error),
        ) from error
    return names, spans
