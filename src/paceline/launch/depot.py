"""The depot in the head's launcher: takes what ranks on hosts without the run's folder send for a checkpoint, and hands the
checkpoint that a life goes on from to those hosts. What is said on the way stands in :mod:`paceline.engine.carry`."""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import shutil
import socket
import socketserver
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from paceline.core.files import sha256_file
from paceline.engine.carry import MOST_FRAME, SILENCE_S, Lost, read_frame, read_some, send_frame
from paceline.engine.checkpoint_format import MANIFEST, is_file_of_checkpoint, state_file
from paceline.engine.checkpoint_verify import read_manifest
from paceline.engine.checkpoint_write import aside_name, awaits, deliver, reason_of

Say = Callable[[str, str], None]

_CHUNK_BYTES = 1 << 22
_REQUEST_WITHIN_S = 10.0
_MOST_CONNECTIONS = 512
_MOST_PROBE_BYTES = 1 << 26


class _Damaged(Exception):
    """What came is not what was sent."""


class Depot:
    """Listens at ``address``, on a port of its own. Each life of the run has a token of its own: what an earlier one left under
    way ends with it.

    Args:
        checkpoints: of the run's folder.
    """

    def __init__(self, address: str, checkpoints: Path, say: Say) -> None:
        self.checkpoints, self.say = checkpoints, say
        self._token = ""
        self._offered: Path | None = None
        self._links: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._server = _server(address, self._serve)
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, args=(0.2,), name="depot", daemon=True).start()

    def begin_life(self) -> dict[str, Any]:
        """What the hosts of a new life must know: ``port`` and ``token``."""
        self._token, self._offered = uuid.uuid4().hex, None
        self._drop()
        return {"port": self.port, "token": self._token}

    def offer(self, path: Path) -> None:
        """The checkpoint that this life goes on from."""
        self._offered = path

    def close(self) -> None:
        self._token = ""
        self._server.shutdown()
        self._server.server_close()
        self._drop()

    def _drop(self) -> None:
        with self._lock:
            for link in self._links:
                with suppress(OSError):
                    link.shutdown(socket.SHUT_RDWR)

    # -- a connection, in a thread of its own ---------------------------------------------------------------------------------
    def _serve(self, link: socket.socket) -> None:
        with self._lock:
            if len(self._links) >= _MOST_CONNECTIONS:
                return
            self._links.add(link)
        try:
            link.settimeout(_REQUEST_WITHIN_S)
            request = read_frame(link)
            token = str(request["token"])
            if not (self._token and hmac.compare_digest(token.encode(), self._token.encode())):
                return
            link.settimeout(SILENCE_S)
            {"part": self._take, "probe": self._probe, "manifest": self._manifest, "file": self._file}[request["do"]](
                link, request
            )
        except (Lost, OSError, ValueError, KeyError, TypeError, RecursionError):
            return  # whoever asked hears that it is closed; a part has been told of
        finally:
            with self._lock:
                self._links.discard(link)

    def _probe(self, link: socket.socket, request: dict[str, Any]) -> None:
        left = _number(request, "size_bytes", _MOST_PROBE_BYTES)
        memory = memoryview(bytearray(min(left, _CHUNK_BYTES)))
        while left:
            left -= read_some(link, memory[: min(left, len(memory))])
        send_frame(link, {"ok": True})

    # -- parts ----------------------------------------------------------------------------------------------------------
    def _take(self, link: socket.socket, request: dict[str, Any]) -> None:
        """A rank's part, into the hidden folder of the save that waits for it. What goes wrong fails that save, by the same
        mark as of a rank that writes there by itself."""
        num_ranks = _number(request, "num_ranks", 99_999)
        rank = _number(request, "rank", num_ranks - 1)
        aside = self.checkpoints / aside_name(_number(request, "step"), _number(request, "leader_pid"))
        host = str(request["host"])[:200]
        if not awaits(aside, rank):
            send_frame(link, {"problem": "no save waits for it"})
            return
        with _same_folder(aside) as is_same:
            write = self._come(link, request, aside / state_file(rank, num_ranks), host)
            if write is None or not is_same():  # or the save was given up, and another one of this step has begun
                return
            failed = deliver(aside, rank, num_ranks, write)
        with suppress(OSError):
            send_frame(link, {"ok": True} if failed is None else {"problem": reason_of(failed)})

    def _come(
        self, link: socket.socket, request: dict[str, Any], path: Path, host: str
    ) -> Callable[[Path], dict[str, Any]] | None:
        """Receive a part. What is returned says of it what a rank that writes by itself would say, or raises why it did not
        come; None where it is sent once more."""
        try:
            said = self._receive(link, request, path)
            return lambda _: said
        except _Damaged as error:
            if not request["last"]:
                self.say("warning", f"{error}, from host {host} (rank {request['rank']}): it is sent once more")
                send_frame(link, {"again": True})
                return None
            problem: Exception = ValueError(f"{error}, once more, from host {host}")
        except Lost as error:
            problem = ValueError(f"its part did not come whole from host {host}: {error}")
        except Exception as error:  # the disk; or what no rank of ours would send
            problem = error

        def fail(_: Path) -> dict[str, Any]:
            raise problem

        return fail

    def _receive(self, link: socket.socket, request: dict[str, Any], path: Path) -> dict[str, Any]:
        if "problem" in request:
            raise ValueError(str(request["problem"])[:2000])
        left = size_bytes = _number(request, "size_bytes")
        if shutil.disk_usage(path.parent).free < size_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        send_frame(link, {"go": True})
        digest = hashlib.sha256()
        memory = memoryview(bytearray(min(_CHUNK_BYTES, size_bytes)))
        with open(path, "wb", buffering=0) as handle:
            while left:
                chunk = memory[: read_some(link, memory[: min(left, len(memory))])]
                left -= len(chunk)
                digest.update(chunk)
                while len(chunk):
                    chunk = chunk[handle.write(chunk) :]
            told = read_frame(link, MOST_FRAME)
            if told["sha256"] != digest.hexdigest():
                raise _Damaged(f"a part of {size_bytes:,} bytes has arrived with another SHA-256 than it was sent with")
            os.fsync(handle.fileno())
        return {"file": path.name, "size_bytes": size_bytes, "sha256": told["sha256"], "tensors": told["tensors"]}

    # -- a checkpoint ---------------------------------------------------------------------------------------------------
    def _manifest(self, link: socket.socket, _request: dict[str, Any]) -> None:
        path = self._offered
        if path is None:
            return
        raw = (path / MANIFEST).read_bytes()
        send_frame(link, {"name": path.name, "size_bytes": len(raw)})
        link.sendall(raw)

    def _file(self, link: socket.socket, request: dict[str, Any]) -> None:
        path, name = self._offered, request["name"]
        if path is None or not is_file_of_checkpoint(name) or name not in read_manifest(path):
            return
        file = path / name
        if file.is_symlink():
            return
        with open(file, "rb") as handle:
            send_frame(link, {"size_bytes": os.fstat(handle.fileno()).st_size})
            link.sendfile(handle)


@contextmanager
def _same_folder(folder: Path) -> Iterator[Callable[[], bool]]:
    """Whether what has the name is the folder that had it at first: while that is held open, no other gets its inode."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)

    def is_same() -> bool:
        try:
            return os.path.samestat(os.fstat(handle), os.lstat(folder))
        except OSError:
            return False

    try:
        yield is_same
    finally:
        os.close(handle)


def _number(request: dict[str, Any], name: str, most: int = 1 << 62) -> int:
    value = request[name]
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{name}: {value!r}")
    return value


def _server(address: str, serve: Callable[[socket.socket], None]) -> socketserver.ThreadingTCPServer:
    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            serve(self.request)

    class Server(socketserver.ThreadingTCPServer):
        address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        daemon_threads = True
        block_on_close = False
        request_queue_size = 128

        def handle_error(self, request: Any, client_address: Any) -> None:
            """What a stranger sends is nobody's concern."""

    return Server((address, 0), Handler)


def manifest_print(path: Path) -> str:
    """By which two copies of a checkpoint are known to be the same."""
    return sha256_file(path / MANIFEST)
