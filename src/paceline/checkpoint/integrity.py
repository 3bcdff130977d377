"""Verify the files of a checkpoint against its manifest. Imports no torch."""

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
    is_checkpoint_file,
    read_header,
    read_index,
)
from paceline.core.files import sha256_file

_PICKLE_NAME = re.compile(r".+\.(pkl|pickle|pt|pth)", re.IGNORECASE)
#: First bytes of a pickle of protocol 2 or later, and of an archive of ``torch.save``.
_PICKLE_MAGIC = re.compile(rb"\x80[\x02-\x05]|PK\x03\x04")


def verify(path: Path) -> str | None:
    """Return what is wrong with a checkpoint, including the name of the file, or None if every file
    has the size and the SHA-256 that the manifest lists."""
    if (path / MANIFEST).is_symlink():
        return f"{path / MANIFEST} is a symbolic link"
    try:
        manifest = read_manifest(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"{path / MANIFEST} is missing or damaged"
    for name in manifest:
        if name == MANIFEST or not is_checkpoint_file(name):
            return f"{path / MANIFEST} lists {name!r}, which is not a file of a checkpoint"
    for required in (INDEX if INDEX in manifest or (path / INDEX).exists() else STATE, META):
        if required not in manifest:
            return f"{path / MANIFEST} does not list {required}"
    return (
        _files_problem(path, manifest)
        or _foreign_problem(path, manifest)
        or _index_problem(path, manifest)
    )


def read_manifest(path: Path) -> dict[str, tuple[int, str]]:
    """Return the size in bytes and the SHA-256 of each file in the manifest."""
    files = json.loads((path / MANIFEST).read_text())["files"]
    return {
        str(name): (int(entry["size_bytes"]), str(entry["sha256"])) for name, entry in files.items()
    }


def _files_problem(path: Path, manifest: dict[str, tuple[int, str]]) -> str | None:
    for name, (size_bytes, sha256) in manifest.items():
        file = path / name
        expected = f"expected {size_bytes:,} bytes with SHA-256 {_short(sha256)}"
        if file.is_symlink():
            return _link_problem(file)
        if not file.is_file():
            return f"{file} is missing: {expected}"
        if file.stat().st_size != size_bytes:
            return f"{file} has {file.stat().st_size:,} bytes: {expected}"
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        try:
            digests = list(pool.map(sha256_file, [path / name for name in manifest]))
        except OSError as error:
            return f"{error.filename} cannot be read: {error.strerror}"
    for (name, (_, sha256)), actual in zip(manifest.items(), digests, strict=True):
        if actual != sha256:
            return f"{path / name} has SHA-256 {_short(actual)}: expected {_short(sha256)}"
    return None


def _short(sha256: str) -> str:
    return f"{sha256[:16]}…"


def _link_problem(file: Path) -> str:
    return (
        f"{file} is a symbolic link to {os.readlink(file)}: the files of a checkpoint must be in"
        " its folder"
    )


def _index_problem(path: Path, manifest: dict[str, tuple[int, str]]) -> str | None:
    try:
        files = {shard.file for entry in read_index(path).values() for shard in entry.pieces}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{path / INDEX} is damaged: {error}"
    missing = sorted(files - manifest.keys())
    if missing:
        return f"{path / MANIFEST} does not list {missing[0]}"
    for name in sorted(files):
        try:
            read_header(path / name)
        except (OSError, ValueError, AttributeError, RecursionError):
            return f"{path / name} is not a safetensors file"
    return None


def foreign_files(path: Path) -> list[str]:
    """Return the files in the folder of a valid checkpoint that its manifest does not list.
    Paceline never reads them."""
    return sorted({file.name for file in path.iterdir()} - read_manifest(path).keys() - {MANIFEST})


def _foreign_problem(path: Path, manifest: dict[str, tuple[int, str]]) -> str | None:
    """Reject symbolic links, which may lead out of the folder, and pickles, which execute code when
    they are read."""
    for file in sorted(path.iterdir()):
        if file.name in manifest or file.name == MANIFEST:
            continue
        if file.is_symlink():
            return _link_problem(file)
        if file.is_file() and _is_pickle(file):
            return (
                f"{file} is a pickle, which executes code when it is read: checkpoints of Paceline"
                " never contain one"
            )
    return None


def _is_pickle(file: Path) -> bool:
    if _PICKLE_NAME.fullmatch(file.name):
        return True
    try:
        with open(file, "rb") as handle:
            return _PICKLE_MAGIC.match(handle.read(4)) is not None
    except OSError:
        return False
