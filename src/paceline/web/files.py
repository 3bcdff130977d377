"""Opening what lies in the served folder, and nothing outside it: a link is not followed, a pipe
does not block."""

import json
import os
import stat
from pathlib import Path
from typing import IO

from pydantic import JsonValue

from paceline.core.formatting import clean

JSONObject = dict[str, JsonValue]


def open_inside(path: Path) -> IO[bytes] | None:
    """A regular file for reading; None where there is none, where it is a link or where its folder
    is reached through one."""
    if os.path.realpath(path.parent) != str(path.parent):
        return None
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        return None
    return open(handle, "rb", buffering=0)


def stat_inside(path: Path | str) -> os.stat_result | None:
    """Of a regular file that is no link; None where there is none."""
    try:
        found = os.lstat(path)
    except (OSError, ValueError):
        return None
    return found if stat.S_ISREG(found.st_mode) else None


def read_inside(path: Path, limit_bytes: int = 4 << 20) -> bytes | None:
    """Of a file that :func:`open_inside` opens, at most its first ``limit_bytes``."""
    handle = open_inside(path)
    if handle is None:
        return None
    with handle:
        parts, left = [], limit_bytes
        while left > 0 and (part := handle.read(left)):
            parts.append(part)
            left -= len(part)
        return b"".join(parts)


def json_inside(path: Path) -> JSONObject | None:
    """A JSON object from a file; None where there is none, or it holds something else."""
    raw = read_inside(path, 16 << 20)
    try:
        value = json.loads(raw) if raw is not None else None
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def tail_inside(path: Path, size_bytes: int = 1 << 18) -> bytes | None:
    """The last whole lines of a file, of so many bytes; None where there is none."""
    handle = open_inside(path)
    if handle is None:
        return None
    with handle:
        begin = max(0, os.fstat(handle.fileno()).st_size - size_bytes)
        read = os.pread(handle.fileno(), size_bytes, begin)
    return read[read.find(b"\n") + 1 :] if begin else read


def shown(name: str) -> str:
    """A file's name as text, whatever bytes it is made of."""
    return clean(os.fsencode(name).decode("utf-8", errors="replace"))


def as_object(value: object) -> JSONObject:
    """A JSON object from an event log or a report, which may hold anything; empty if it is not
    one."""
    return value if isinstance(value, dict) else {}


def as_text(value: object, limit: int = 500) -> str | None:
    """A text from there, without control characters."""
    return clean(value)[:limit] if isinstance(value, str) else None
