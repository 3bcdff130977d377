"""A file that comes by multipart/form-data, taken in as it comes: counted, given a safe name, never
over another file."""

import asyncio
import os
import re
import tempfile
import unicodedata
from pathlib import Path
from typing import IO

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from paceline.core.errors import ConfigError, RunError
from paceline.core.files import human_bytes

LIMIT_BYTES = 1 << 30
#: What may be uploaded: the kinds of data that paceline.data reads.
SUFFIXES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow", ".txt", ".md")
_FREE_BYTES = 1 << 28  # left on the disk for the runs
_MOST_NAME = 100


class TooLarge(ConfigError):
    """More bytes than are taken (413)."""


def safe_name(given: str) -> str:
    """The base name of what a browser calls a file: letters, digits, ``-``, ``_`` and ``.``.

    Raises:
        ConfigError: nothing is left of it, or it is no kind of data that is read.
    """
    base = unicodedata.normalize("NFC", given).replace("\\", "/").rpartition("/")[2]
    name = re.sub(r"[^\w.-]+", "_", base).strip("._- ")
    stem, suffix = os.path.splitext(name)
    if suffix.lower() not in SUFFIXES or not stem:
        raise ConfigError(
            f"`{base[:100]}` is no data that can be read",
            allowed=", ".join(SUFFIXES),
            fix="rename the file after what is in it",
        )
    while len(os.fsencode(stem)) > _MOST_NAME:
        stem = stem[:-1]
    return stem + suffix.lower()


class _Part:
    """The one file of a form, written to ``aside`` while it comes."""

    def __init__(self, aside: IO[bytes]) -> None:
        self.aside = aside
        self.name: str | None = None
        self.size_bytes = 0
        self._field = self._value = b""
        self._headers: dict[bytes, bytes] = {}
        self._is_file = False

    def parser(self, boundary: bytes) -> MultipartParser:
        return MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": self._add_to_field,
                "on_header_value": self._add_to_value,
                "on_header_end": self._header,
                "on_headers_finished": self._headers_finished,
                "on_part_data": self._data,
            },
        )

    def _add_to_field(self, data: bytes, start: int, end: int) -> None:
        self._field += data[start:end]

    def _add_to_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _begin(self) -> None:
        self._headers, self._is_file = {}, False

    def _header(self) -> None:
        self._headers[self._field.lower()] = self._value
        self._field = self._value = b""

    def _headers_finished(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        given = options.get(b"filename")
        if given is None:
            return
        if self.name is not None:
            raise ConfigError("two files came at once", fix="upload one after the other")
        self.name, self._is_file = safe_name(given.decode("utf-8", "replace")), True

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self.size_bytes += end - start
            self.aside.write(data[start:end])


async def take_upload(
    request: Request, folder: Path, limit_bytes: int = LIMIT_BYTES
) -> tuple[Path, int]:
    """Store the file of a multipart form in ``folder``, under its own name, or with a number where
    that is taken.

    Returns:
        Its path and its size in bytes.

    Raises:
        TooLarge: more than ``limit_bytes`` came.
        ConfigError: no file, or none that is read.
        RunError: it could not be written.
    """
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise ConfigError(
            "no file came",
            allowed="multipart/form-data with one file",
            fix="choose a file and try again",
        )
    try:
        folder.mkdir(exist_ok=True)
        if os.path.realpath(folder) != str(folder):
            raise ConfigError(
                f"{folder} is a link to another place", fix="put a folder in its place"
            )
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".upload-") as aside:
            part = _Part(aside)
            try:
                await _take(request, part.parser(boundary), folder, limit_bytes)
            except FormParserError as error:
                raise ConfigError(
                    f"the upload cannot be read: {error}", fix="choose the file and try again"
                ) from None
            if part.name is None:
                raise ConfigError("no file came", fix="choose a file and try again")
            aside.flush()
            os.fsync(aside.fileno())
            return _claim(folder, part.name, aside.name), part.size_bytes
    except OSError as error:
        raise RunError(
            f"the file could not be written: {error.strerror or error}", fix="free some space"
        ) from error


async def _take(request: Request, parser: MultipartParser, folder: Path, limit_bytes: int) -> None:
    came, looked_at = 0, -1
    async for chunk in request.stream():
        came += len(chunk)
        if came > limit_bytes:
            raise TooLarge(
                f"the file is larger than {human_bytes(limit_bytes)}",
                fix="copy it into the served folder yourself, and choose it from the list",
            )
        if came >> 26 != looked_at:
            looked_at = came >> 26
            disk = os.statvfs(folder)
            if disk.f_bavail * disk.f_frsize < _FREE_BYTES:
                raise RunError(
                    "the disk is nearly full, and what is left is for the runs",
                    fix="free some space",
                )
        await asyncio.to_thread(parser.write, chunk)
    parser.finalize()


def _claim(folder: Path, name: str, aside: str) -> Path:
    """Give what lies at ``aside`` its name, which no other file has: to claim it, an empty file is
    made there first."""
    stem, suffix = os.path.splitext(name)
    for number in range(1, 1000):
        path = folder / (name if number == 1 else f"{stem}-{number}{suffix}")
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        except FileExistsError:
            continue
        os.replace(aside, path)
        with open(aside, "xb"):  # what made it wants to remove it
            pass
        os.chmod(path, 0o644)
        return path
    raise ConfigError(f"there are a thousand files called {name}", fix="rename the file")
