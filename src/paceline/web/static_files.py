"""The files of the page, from memory: a page is some twenty of them, and shall be there before one
has looked for it."""

import gzip
import hashlib
import mimetypes
import os
from dataclasses import dataclass
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

_SMALL_BYTES = 1000  # is sent as it is
_TYPES = {
    ".js": "text/javascript",
    ".css": "text/css",
    ".html": "text/html",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True)
class _File:
    changed: tuple[int, int]  # when it was read: time and size
    raw: bytes
    packed: bytes | None
    etag: str
    type: str


class StaticFiles:
    """An ASGI app for the files below ``folder``, those that are there as it is made; ``/`` is
    ``index.html``. A path is looked up among their names, so none leads elsewhere. A file that has
    changed is read anew."""

    def __init__(self, folder: Path) -> None:
        self._paths = {
            f"/{path.relative_to(folder).as_posix()}": path
            for path in folder.rglob("*")
            if path.is_file()
        }
        self._paths["/"] = self._paths["/index.html"]
        self._files: dict[Path, _File] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = self._paths.get(scope["path"])
        if path is None:
            raise HTTPException(404)
        if scope["method"] not in ("GET", "HEAD"):
            raise HTTPException(405, headers={"allow": "GET, HEAD"})
        await _answer(self._read(path), Request(scope))(scope, receive, send)

    def _read(self, path: Path) -> _File:
        found = os.stat(path)
        changed = (found.st_mtime_ns, found.st_size)
        known = self._files.get(path)
        if known is None or known.changed != changed:
            raw = path.read_bytes()
            packed = gzip.compress(raw, 6, mtime=0) if len(raw) > _SMALL_BYTES else None
            kind = (
                _TYPES.get(path.suffix)
                or mimetypes.guess_type(path.name)[0]
                or "application/octet-stream"
            )
            known = _File(changed, raw, packed, f'"{hashlib.sha256(raw).hexdigest()[:24]}"', kind)
            self._files[path] = known
        return known


def _answer(file: _File, request: Request) -> Response:
    headers = {"etag": file.etag, "vary": "Accept-Encoding"}
    if file.etag in [
        one.strip().removeprefix("W/")
        for one in request.headers.get("if-none-match", "").split(",")
    ]:
        return Response(status_code=304, headers=headers)
    packed = file.packed if "gzip" in request.headers.get("accept-encoding", "") else None
    if packed is not None:
        headers["content-encoding"] = "gzip"
    return Response(file.raw if packed is None else packed, headers=headers, media_type=file.type)
