"""Checkpoints: a folder that appears whole or not at all, with a manifest of sizes and SHA-256. No pickle, no torch here.

What lies in the folder is said in :mod:`paceline.engine.checkpoint_format`. It is written beside under a hidden name, synced,
and renamed (:mod:`paceline.engine.checkpoint_write`); what is left over of a save that was cut is cleared by the next.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.errors import ConfigError
from paceline.core.files import sha256_file
from paceline.engine.checkpoint_format import INDEX, MANIFEST, META, STATE, name_of, read_index
from paceline.engine.checkpoint_read import CheckpointReader, read_state
from paceline.engine.checkpoint_write import (
    PartFailed,
    Saved,
    Writer,
    commit,
    not_written,
    prepare,
    reason_of,
    wait_for_parts,
    write_errors,
    write_part,
)

if TYPE_CHECKING:
    import torch

__all__ = [
    "CheckpointReader",
    "Saved",
    "committed",
    "find",
    "inspect",
    "name_of",
    "newest_whole",
    "prune",
    "read_meta",
    "read_state",
    "reason_of",
    "save",
    "verify",
    "write_errors",
]

_NAME = re.compile(r"step-(\d{8,})")


def save(folder: Path, step: int, state: dict[str, torch.Tensor], meta: dict[str, Any]) -> Saved:
    """Write a checkpoint of ``step`` below ``folder`` (``RUN/checkpoints``) out of whole tensors, in this process alone.

    Raises:
        RunError: it could not be written (full disk, no permission); every earlier checkpoint is untouched and what was
            begun is removed.
    """
    from paceline.parallel.parts import Part

    parts = [Part.whole(name, one) for name, one in state.items()]
    writer, aside = Writer.here(parts), None
    try:
        aside = prepare(folder, step, num_ranks=1)
        write_part(aside, 0, 1, parts)
        return commit(folder, step, aside, meta, wait_for_parts(aside, [writer]))
    except (OSError, ValueError, PartFailed) as error:
        if aside is not None:
            shutil.rmtree(aside, ignore_errors=True)
        raise not_written(folder, step, writer.size_bytes, reason_of(error)) from error


def prune(folder: Path, keep: int | None) -> list[Path]:
    """Remove all but the newest ``keep`` checkpoints (None keeps all). Returns what was removed."""
    if keep is None:
        return []
    removed = []
    for path in committed(folder)[:-keep]:
        aside = folder / f".{path.name}.{os.getpid()}.old"
        os.replace(path, aside)  # gone in one step: a cut here leaves no half checkpoint under a good name
        shutil.rmtree(aside, ignore_errors=True)
        removed.append(path)
    return removed


def committed(folder: Path) -> list[Path]:
    """The checkpoints below ``folder``, oldest first."""
    if not folder.is_dir():
        return []
    found = [(int(match[1]), one) for one in folder.iterdir() if (match := _NAME.fullmatch(one.name)) and one.is_dir()]
    return [path for _, path in sorted(found)]


def verify(path: Path) -> str | None:
    """None where every file is there with the size and SHA-256 of the manifest; else what is wrong."""
    try:
        files = json.loads((path / MANIFEST).read_text())["files"]
        said_of = {str(name): (int(said["size_bytes"]), str(said["sha256"])) for name, said in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{path / MANIFEST} is missing or broken"
    state = INDEX if INDEX in said_of or (path / INDEX).exists() else STATE
    for needed in (state, META):
        if needed not in said_of:
            return f"{path / MANIFEST} does not name {needed}"
    for name, (size_bytes, _) in said_of.items():
        file = path / name
        if Path(name).name != name or file.is_symlink() or not file.is_file():
            return f"{file} is missing"
        if file.stat().st_size != size_bytes:
            return f"{file} has {file.stat().st_size:,} bytes, the manifest says {size_bytes:,}"
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        found = pool.map(sha256_file, [path / name for name in said_of])
        for (name, (_, sha256)), actual in zip(said_of.items(), found, strict=True):
            if actual != sha256:
                return f"{path / name} does not have the SHA-256 that the manifest says ({sha256[:16]}…)"
    return _index_problem(path, set(said_of))


def _index_problem(path: Path, files: set[str]) -> str | None:
    try:
        needed = {piece.file for entry in read_index(path).values() for piece in entry.pieces}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{path / INDEX} is broken: {error}"
    missing = sorted(needed - files)
    return f"{path / MANIFEST} does not name {missing[0]}" if missing else None


def newest_whole(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that is whole, and what is wrong with each newer one."""
    wrong: list[str] = []
    for path in reversed(committed(folder)):
        problem = verify(path)
        if problem is None:
            return path, wrong
        wrong.append(problem)
    return None, wrong


def read_meta(path: Path) -> dict[str, Any]:
    """``meta.json`` of a checkpoint.

    Raises:
        ConfigError: ``path`` is no checkpoint.
    """
    try:
        meta = json.loads((path / META).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} is no checkpoint: {META} is missing or broken",
            allowed=f"a folder such as RUN/checkpoints/{name_of(40)}",
            fix="list them with `ls RUN/checkpoints`",
        ) from error
    return dict(meta)


def inspect(path: Path) -> dict[str, Any]:
    """What a checkpoint holds: ``{step, strategy, world_size, digest, model_digest, tensors: {name: {dtype, shape, sha256}}}``,
    over the whole tensors, whatever pieces they were written in.

    The digest is the SHA-256 over the lines "name dtype shape sha256" in order of name: equal digests mean equal bits.
    """
    problem = verify(path)
    meta = read_meta(path)
    if problem is not None:
        raise ConfigError(
            f"the checkpoint {path} is not whole: {problem}", fix="use the one before it, or resume: auto, which does"
        )
    with CheckpointReader(path) as reader:
        tensors = {name: reader.describe(name) for name in reader.names}
    return {
        "step": meta["step"],
        "strategy": meta["strategy"],
        "world_size": meta["world_size"],
        "digest": _digest(tensors),
        "model_digest": _digest({name: one for name, one in tensors.items() if name.startswith("model/")}),
        "tensors": tensors,
    }


def _digest(tensors: dict[str, dict[str, Any]]) -> str:
    lines = [f"{name} {one['dtype']} {one['shape']} {one['sha256']}\n" for name, one in sorted(tensors.items())]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def find(path: Path) -> Path:
    """The checkpoint meant by ``path``: itself, or the newest whole one of a run's folder or its ``checkpoints``.

    Raises:
        ConfigError: there is none.
    """
    if (path / META).is_file():
        return path
    for folder in (path, path / "checkpoints"):
        newest, _ = newest_whole(folder)
        if newest is not None:
            return newest
    raise ConfigError(
        f"{path} holds no whole checkpoint" if path.exists() else f"{path} does not exist",
        allowed=f"a run's folder, or a checkpoint such as RUN/checkpoints/{name_of(40)}",
        fix=None if path.exists() else "check the path",
    )
