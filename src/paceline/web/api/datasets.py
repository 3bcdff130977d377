"""Routes for datasets: upload one, and preview its rows.

An uploaded file is stored while it is received: its size is limited, its name is made safe, and no
existing file is replaced.
"""

import asyncio
import os
import re
import tempfile
import unicodedata
from pathlib import Path
from typing import IO

from fastapi import APIRouter, Request
from pydantic import Field
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.responses import Response

from paceline.core.errors import ConfigError, RunError
from paceline.core.files import human_bytes
from paceline.web.api.launch import ConfigText
from paceline.web.files import JSONObject
from paceline.web.responses import problem
from paceline.web.state import Panel

router = APIRouter()

LIMIT_BYTES = 1 << 30
#: The file types that can be uploaded: those that paceline.data reads.
SUFFIXES = (
    ".json",
    ".jsonl",
    ".ndjson",
    ".csv",
    ".tsv",
    ".parquet",
    ".arrow",
    ".tar",
    ".txt",
    ".md",
)
_MIN_FREE_BYTES = 1 << 28  # reserved for the runs
_MAX_NAME_BYTES = 100

_UPLOADS = "datasets"

_UPLOAD_FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file"],
                    "properties": {"file": {"type": "string", "format": "binary"}},
                }
            }
        },
    }
}


class PreviewRequest(ConfigText):
    """A config, and the number of rows to show of each of its datasets."""

    rows: int = Field(5, ge=1, le=100)


@router.post("/api/upload", openapi_extra=_UPLOAD_FORM, response_model=None)
async def upload(request: Request, panel: Panel) -> dict[str, str | int] | Response:
    """Store a data file of at most 1 GiB. ``path`` is its path in a config; no existing file
    is replaced."""
    try:
        path, size_bytes = await take_upload(request, panel.folder / _UPLOADS)
    except TooLarge as error:
        return problem(413, error)
    return {"path": panel.folders.named(path), "size_bytes": size_bytes}


@router.post("/api/preview")
async def preview(body: PreviewRequest, panel: Panel) -> JSONObject:
    """Return the first rows as the model gets them (``paceline data preview --json``)."""
    args = ["data", "preview", "CONFIG", "--rows", str(body.rows)]
    cwd = panel.config_folder(body.run)
    return await panel.commands.run("preview", args, body.yaml, cwd=cwd)


class TooLarge(ConfigError):
    """The file is larger than the limit (413)."""


def safe_name(file_name: str) -> str:
    """Return the base name of an uploaded file, reduced to letters, digits, ``-``, ``_`` and ``.``.

    Raises:
        ConfigError: no name is left, or the file type is not supported.
    """
    base = unicodedata.normalize("NFC", file_name).replace("\\", "/").rpartition("/")[2]
    name = re.sub(r"[^\w.-]+", "_", base).strip("._- ")
    stem, suffix = os.path.splitext(name)
    if suffix.lower() not in SUFFIXES or not stem:
        raise ConfigError(
            "`{base}` is not a supported data file",
            code="unknown-file-type",
            allowed=", ".join(SUFFIXES),
            fix="rename the file so that its extension matches its contents",
            base=base[:100],
        )
    while len(os.fsencode(stem)) > _MAX_NAME_BYTES:
        stem = stem[:-1]
    return stem + suffix.lower()


class _UploadedFile:
    """The file of a multipart form, written to ``output`` while it is received."""

    def __init__(self, output: IO[bytes]) -> None:
        self.output = output
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
        file_name = options.get(b"filename")
        if file_name is None:
            return
        if self.name is not None:
            raise ConfigError(
                "the upload contains more than one file",
                code="several-uploads",
                fix="upload one file at a time",
            )
        self.name, self._is_file = safe_name(file_name.decode("utf-8", "replace")), True

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self.size_bytes += end - start
            self.output.write(data[start:end])


async def take_upload(
    request: Request, folder: Path, limit_bytes: int = LIMIT_BYTES
) -> tuple[Path, int]:
    """Store the file of a multipart form in ``folder``, with a number added to its name if that is
    taken.

    Returns:
        Its path and its size in bytes.

    Raises:
        TooLarge: the request is larger than ``limit_bytes``.
        ConfigError: the request has no file, or not a supported one.
        RunError: the file cannot be written.
    """
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise ConfigError(
            "the request contains no file",
            code="upload-without-file",
            allowed="multipart/form-data with one file",
            fix="choose a file and try again",
        )
    try:
        folder.mkdir(exist_ok=True)
        if os.path.realpath(folder) != str(folder):
            raise ConfigError(
                "{folder} is a symbolic link",
                code="upload-folder-is-link",
                fix="replace it with a folder",
                folder=folder,
            )
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".upload-") as output:
            part = _UploadedFile(output)
            try:
                await _take(request, part.parser(boundary), folder, limit_bytes)
            except FormParserError as error:
                raise ConfigError(
                    "cannot parse the upload: {reason}",
                    code="upload-not-parsed",
                    fix="choose the file and try again",
                    reason=error,
                ) from None
            if part.name is None:
                raise ConfigError(
                    "the request contains no file",
                    code="upload-without-file",
                    fix="choose a file and try again",
                )
            output.flush()
            os.fsync(output.fileno())
            return _rename(output.name, folder, part.name), part.size_bytes
    except OSError as error:
        raise RunError(
            "cannot write the file: {reason}",
            code="upload-not-written",
            fix="free some disk space",
            reason=error.strerror or error,
        ) from error


async def _take(request: Request, parser: MultipartParser, folder: Path, limit_bytes: int) -> None:
    received_bytes, last_check = 0, -1
    async for chunk in request.stream():
        received_bytes += len(chunk)
        if received_bytes > limit_bytes:
            raise TooLarge(
                "the file is larger than {limit_bytes}",
                code="upload-too-large",
                fix="copy it into the served folder, and choose it from the list",
                limit_bytes=human_bytes(limit_bytes),
            )
        if received_bytes >> 26 != last_check:  # every 64 MiB
            last_check = received_bytes >> 26
            disk = os.statvfs(folder)
            if disk.f_bavail * disk.f_frsize < _MIN_FREE_BYTES:
                raise RunError(
                    "less than {min_free_bytes} of disk space would be left for the runs",
                    code="too-little-disk-space",
                    fix="free some disk space",
                    min_free_bytes=human_bytes(_MIN_FREE_BYTES),
                )
        await asyncio.to_thread(parser.write, chunk)
    parser.finalize()


def _rename(temporary: str, folder: Path, name: str) -> Path:
    """Rename a temporary file to a name that no other file has. An empty file is created first to
    reserve the name."""
    stem, suffix = os.path.splitext(name)
    for number in range(1, 1000):
        path = folder / (name if number == 1 else f"{stem}-{number}{suffix}")
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        except FileExistsError:
            continue
        os.replace(temporary, path)
        # NamedTemporaryFile removes its file at the end, and fails if that does not exist.
        Path(temporary).touch()
        os.chmod(path, 0o644)
        return path
    raise ConfigError(
        "there are already 1,000 files named {name}",
        code="too-many-files",
        fix="rename the file",
        name=name,
    )
