"""Images at https addresses. They are downloaded while rows are tokenized, and their contents are
stored with the tokens, so that training opens no connection.

A content is kept in the cache under the digest of its address: tokenizing again, with another
template or another length, downloads nothing.
"""

from __future__ import annotations

import hashlib
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from http.client import HTTPException, HTTPMessage
from typing import IO

from paceline.core.errors import RunError, first_line
from paceline.core.files import cache_dir, human_bytes, write_atomic
from paceline.data.cache import locked_entry
from paceline.data.cache_entries import note_use
from paceline.data.sources.rows import MalformedRow

SCHEME = "https://"
MAX_IMAGE_BYTES = 32 << 20
#: Limit of one download, from the request to the last byte.
DOWNLOAD_TIMEOUT_S = 30.0
_ATTEMPTS, _RETRY_WAIT_S = 3, 1.0
_MAX_THREADS = 8
_CHUNK_BYTES = 1 << 16
#: Answers of a server that may differ later. Other errors reject the row.
_TRANSIENT_STATUSES = (408, 425, 429, 500, 502, 503, 504)
#: Some servers refuse requests that name no program.
_HEADERS = {"User-Agent": "paceline", "Accept": "image/*"}


def is_address(image: str) -> bool:
    """Return whether an image is downloaded; otherwise it is the path of a file."""
    return image.lower().startswith(SCHEME)


def download_images(addresses: Iterable[str]) -> dict[str, bytes | MalformedRow]:
    """Return the content of each image, or why a row with the image cannot be used.

    Raises:
        RunError: a server does not answer, or answers with an error that may be over later.
    """
    unique = [*dict.fromkeys(addresses)]
    if not unique:
        return {}
    with ThreadPoolExecutor(min(_MAX_THREADS, len(unique))) as pool:
        return dict(zip(unique, pool.map(_cached, unique), strict=True))


def _cached(address: str) -> bytes | MalformedRow:
    digest = hashlib.sha256(address.encode()).hexdigest()
    # One of 256 folders is an entry of the cache: a lock for each image would be a file for each.
    entry = cache_dir() / "images" / digest[:2]
    path = entry / digest
    if not path.is_file():
        note_use(entry)
        entry.mkdir(parents=True, exist_ok=True)
        with locked_entry(entry):
            if not path.is_file():
                try:
                    write_atomic(path, _download(address))
                except MalformedRow as reason:
                    return reason
    return path.read_bytes()


def _download(address: str) -> bytes:
    """Return the content of an image.

    Raises:
        MalformedRow: the server has no such image, or the image is too large.
        RunError: the server does not answer, or not now.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return _read(address)
        except urllib.error.HTTPError as error:
            if error.code not in _TRANSIENT_STATUSES:
                raise MalformedRow(
                    f"an image cannot be downloaded (HTTP status {error.code})"
                ) from None
            reason = f"HTTP status {error.code}"
        except (OSError, HTTPException) as error:
            reason = first_line(getattr(error, "reason", None) or error) or type(error).__name__
        except ValueError as error:  # an address that urllib cannot read
            raise MalformedRow(f"the address of an image is invalid ({error})") from None
        if attempt < _ATTEMPTS:
            time.sleep(attempt * _RETRY_WAIT_S)
    raise RunError(
        "the image {address} cannot be downloaded: {reason}",
        code="image-download-failed",
        fix="check the network and run the command again, which keeps the images that were"
        " downloaded; or remove the row",
        address=address,
        reason=reason,
    )


def _read(address: str) -> bytes:
    ends_at = time.monotonic() + DOWNLOAD_TIMEOUT_S
    request = urllib.request.Request(address, headers=_HEADERS)
    content = bytearray()
    with _opener().open(request, timeout=DOWNLOAD_TIMEOUT_S) as response:
        # `read1` returns after one packet, so that a slow server cannot exceed the limit.
        while chunk := response.read1(_CHUNK_BYTES):
            content += chunk
            if len(content) > MAX_IMAGE_BYTES:
                raise MalformedRow(f"an image of more than {human_bytes(MAX_IMAGE_BYTES)}")
            if time.monotonic() > ends_at:
                raise TimeoutError(f"no complete answer within {DOWNLOAD_TIMEOUT_S:g} s")
    return bytes(content)


class _SecureRedirects(urllib.request.HTTPRedirectHandler):
    """Follows a redirect only to another https address."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        if not is_address(newurl):
            raise MalformedRow("an image whose server redirects to an address without https")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


@cache
def _opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(_SecureRedirects)
