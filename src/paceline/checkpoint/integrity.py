"""Whether a checkpoint's folder holds what its manifest says, and nothing that it should not. No
torch here."""

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from paceline.checkpoint.format import (
    INDEX,
    MANIFEST,
    META,
    STATE,
    is_file_of_checkpoint,
    read_header,
    read_index,
)
from paceline.core.files import sha256_file

_PICKLE_NAME = re.compile(r".+\.(pkl|pickle|pt|pth)", re.IGNORECASE)
#: A pickle of protocol 2 or later, and the archive of ``torch.save``.
_PICKLE_BEGINS = re.compile(rb"\x80[\x02-\x05]|PK\x03\x04")


def verify(path: Path) -> str | None:
    """None where every file is there with the size and SHA-256 of the manifest; else what is wrong,
    with the file's name."""
    if (path / MANIFEST).is_symlink():
        return f"{path / MANIFEST} is a link"
    try:
        said_of = read_manifest(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"{path / MANIFEST} is missing or broken"
    for name in said_of:
        if name == MANIFEST or not is_file_of_checkpoint(name):
            return f"{path / MANIFEST} names {name!r}, which is no file of a checkpoint"
    for needed in (INDEX if INDEX in said_of or (path / INDEX).exists() else STATE, META):
        if needed not in said_of:
            return f"{path / MANIFEST} does not name {needed}"
    return (
        _files_problem(path, said_of)
        or _foreign_problem(path, set(said_of))
        or _index_problem(path, set(said_of))
    )


def read_manifest(path: Path) -> dict[str, tuple[int, str]]:
    """name → (bytes, SHA-256)"""
    files = json.loads((path / MANIFEST).read_text())["files"]
    return {
        str(name): (int(said["size_bytes"]), str(said["sha256"])) for name, said in files.items()
    }


def _files_problem(path: Path, said_of: dict[str, tuple[int, str]]) -> str | None:
    for name, (size_bytes, sha256) in said_of.items():
        file, wanted = (
            path / name,
            f"the manifest says {size_bytes:,} with the SHA-256 {_short(sha256)}",
        )
        if file.is_symlink():
            return (
                f"{file} is a link to {os.readlink(file)}; a checkpoint's files lie in its own"
                " folder"
            )
        if not file.is_file():
            return f"{file} is missing; {wanted.replace(' with', ' bytes with')}"
        if file.stat().st_size != size_bytes:
            return f"{file} has {file.stat().st_size:,} bytes, {wanted}"
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        try:
            found = list(pool.map(sha256_file, [path / name for name in said_of]))
        except OSError as error:
            return f"{error.filename} cannot be read: {error.strerror}"
    for (name, (_, sha256)), actual in zip(said_of.items(), found, strict=True):
        if actual != sha256:
            return (
                f"{path / name} does not have the SHA-256 that the manifest says"
                f" ({_short(sha256)}), but {_short(actual)}"
            )
    return None


def _short(sha256: str) -> str:
    return f"{sha256[:16]}…"


def _index_problem(path: Path, files: set[str]) -> str | None:
    try:
        needed = {piece.file for entry in read_index(path).values() for piece in entry.pieces}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{path / INDEX} is broken: {error}"
    missing = sorted(needed - files)
    if missing:
        return f"{path / MANIFEST} does not name {missing[0]}"
    for name in sorted(needed):
        try:
            read_header(path / name)
        except (OSError, ValueError, AttributeError, RecursionError):
            return f"{path / name} is no safetensors file"
    return None


def foreign_files(path: Path) -> list[str]:
    """What lies in the folder of a whole checkpoint and is not in its manifest. It is never
    read."""
    return sorted({one.name for one in path.iterdir()} - read_manifest(path).keys() - {MANIFEST})


def _foreign_problem(path: Path, said: set[str]) -> str | None:
    """Links, which may lead out of the folder, and pickles, which run what they like when they are
    read."""
    for file in sorted(path.iterdir()):
        if file.name in said or file.name == MANIFEST:
            continue
        if file.is_symlink():
            return (
                f"{file} is a link to {os.readlink(file)}; a checkpoint's files lie in its own"
                " folder"
            )
        if file.is_file() and _is_pickle(file):
            return (
                f"{file} is a pickle, which runs code when it is read: no checkpoint of Paceline"
                " holds one"
            )
    return None


def _is_pickle(file: Path) -> bool:
    if _PICKLE_NAME.fullmatch(file.name):
        return True
    try:
        with open(file, "rb") as handle:
            return _PICKLE_BEGINS.match(handle.read(4)) is not None
    except OSError:
        return False
