"""Read files of the served folder, and nothing outside it. Symbolic links are not followed, and
opening a pipe does not block."""

import json
import os
import stat
from pathlib import Path
from typing import IO

from pydantic import JsonValue

from paceline.core.formatting import clean

JSONObject = dict[str, JsonValue]


def open_inside(path: Path) -> IO[bytes] | None:
    """Open a regular file for reading. Return None if it does not exist, is a symbolic link, or its
    folder is reached through one."""
    if os.path.realpath(path.parent) != str(path.parent):
        return None
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        return None
    return open(handle, "rb")


def stat_inside(path: Path | str) -> os.stat_result | None:
    """Return the status of a regular file; None if it does not exist or is a symbolic link."""
    try:
        status = os.lstat(path)
    except (OSError, ValueError):
        return None
    return status if stat.S_ISREG(status.st_mode) else None


def read_inside(path: Path, limit_bytes: int = 4 << 20) -> bytes | None:
    """Return at most the first ``limit_bytes`` of a file that :func:`open_inside` opens."""
    handle = open_inside(path)
    if handle is None:
        return None
    with handle:
        return handle.read(limit_bytes)


def json_inside(path: Path) -> JSONObject | None:
    """Return the JSON object in a file; None if there is none."""
    raw = read_inside(path, 16 << 20)
    try:
        value = json.loads(raw) if raw is not None else None
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def tail_inside(path: Path, size_bytes: int = 1 << 18) -> bytes | None:
    """Return the complete lines in the last ``size_bytes`` of a file; None if it does not exist."""
    handle = open_inside(path)
    if handle is None:
        return None
    with handle:
        begin = max(0, os.fstat(handle.fileno()).st_size - size_bytes)
        tail = os.pread(handle.fileno(), size_bytes, begin)
    return tail[tail.find(b"\n") + 1 :] if begin else tail


def shown(name: str) -> str:
    """Return a file name as text, whatever bytes it consists of."""
    return clean(os.fsencode(name).decode("utf-8", errors="replace"))


def as_object(value: object) -> JSONObject:
    """Return a value of an event log or a report as a JSON object; empty if it is not one."""
    return value if isinstance(value, dict) else {}


def as_text(value: object, limit: int = 500) -> str | None:
    """Return a value of an event log or a report without control characters; None if it is not a
    string."""
    return clean(value)[:limit] if isinstance(value, str) else None
