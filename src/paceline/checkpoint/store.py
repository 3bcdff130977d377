"""Checkpoints: a folder that appears whole or not at all, with a manifest of sizes and SHA-256. No
pickle, no torch here.

What lies in the folder is said in :mod:`paceline.checkpoint.format`. It is written beside under a
hidden name, synced, and renamed (:mod:`paceline.checkpoint.writer`); what is left over of a save
that was cut is cleared by the next.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from paceline.checkpoint.format import META, CheckpointMeta, name_of
from paceline.checkpoint.integrity import foreign_files, verify
from paceline.checkpoint.reader import CheckpointReader, TensorDigest, read_meta, read_state
from paceline.checkpoint.writer import (
    SavedCheckpoint,
    ShardWriteError,
    ShardWriter,
    commit,
    not_written,
    prepare,
    reason_of,
    remove,
    wait_for_parts,
    write_errors,
    write_part,
)
from paceline.core.errors import ConfigError
from paceline.core.files import fsync_dir

if TYPE_CHECKING:
    import torch

__all__ = [
    "CheckpointReader",
    "SavedCheckpoint",
    "committed",
    "find",
    "foreign_files",
    "inspect",
    "name_of",
    "newest_whole",
    "prune",
    "read_meta",
    "read_state",
    "reason_of",
    "save",
    "step_of",
    "verify",
    "write_errors",
]

_NAME = re.compile(r"step-(\d{8,})")


def save(
    folder: Path, step: int, state: dict[str, torch.Tensor], meta: CheckpointMeta
) -> SavedCheckpoint:
    """Write a checkpoint of ``step`` below ``folder`` (``RUN/checkpoints``) out of whole tensors,
    in this process alone.

    Raises:
        RunError: it could not be written (full disk, no permission); every earlier checkpoint is
            untouched and what was begun is removed.
    """
    from paceline.parallel.state import TensorShard

    parts = [TensorShard.whole(name, one) for name, one in state.items()]
    writer, aside = ShardWriter.here(parts), None
    try:
        aside = prepare(folder, step, num_ranks=1)
        write_part(aside, 0, 1, parts)
        return commit(folder, step, aside, meta, wait_for_parts(aside, [writer]))
    except (OSError, ValueError, ShardWriteError) as error:
        if aside is not None:
            shutil.rmtree(aside, ignore_errors=True)
        raise not_written(folder, step, writer.size_bytes, reason_of(error)) from error


def prune(folder: Path, keep: int | None, superseded: Collection[int] = ()) -> list[Path]:
    """Remove all but the newest ``keep`` checkpoints (None keeps all), and those of the steps
    ``superseded``, which do not count among the newest. Returns what was removed.

    Which are whole is not looked at. So that the newest whole one is never removed, call it when a
    checkpoint has just been written, with every later step ``superseded``.
    """
    gone = [one for one in committed(folder) if step_of(one) in superseded]
    if keep is not None:
        gone += [one for one in committed(folder) if one not in gone][:-keep]
    for path in gone:
        aside = folder / f".{path.name}.{os.getpid()}.old"
        # gone in one step: a cut here leaves no half checkpoint under a good name
        os.replace(path, aside)
        fsync_dir(folder)  # nor does a power cut
        remove(aside)
    return gone


def prune_after(
    saved: SavedCheckpoint, step: int, keep: int | None, superseded: Collection[int]
) -> list[str]:
    """:func:`prune` when a checkpoint was saved. Returns warnings."""
    folder = saved.path.parent
    try:
        removed = prune(folder, keep, superseded)
    except OSError as error:
        return [f"older checkpoints in {folder} could not be removed: {reason_of(error)}"]
    names = [path.name for path in removed if step_of(path) in superseded]
    if not names:
        return []
    text = (
        f"removed from {folder}: {', '.join(names)}, of an earlier attempt of this run beyond the"
        f" step from which it resumed; {name_of(step)} takes their place"
    )
    return [text]


def committed(folder: Path) -> list[Path]:
    """The checkpoints below ``folder``, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(
        (one for one in folder.iterdir() if _NAME.fullmatch(one.name) and one.is_dir()), key=step_of
    )


def step_of(path: Path) -> int:
    """The step of a checkpoint below a run's folder, by its name."""
    return int(path.name.rpartition("-")[2])


def newest_whole(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that is whole, and what is wrong with each newer one."""
    wrong: list[str] = []
    for path in reversed(committed(folder)):
        problem = _leads_out(path, folder) or verify(path)
        if problem is None:
            return path, wrong
        wrong.append(problem)
    return None, wrong


def _leads_out(path: Path, folder: Path) -> str | None:
    """What is wrong with a checkpoint that lies elsewhere than in the run's own folder."""
    if not path.is_symlink():
        return None
    target = path.resolve()
    if any(target.is_relative_to(one.resolve()) for one in (folder, folder.parent)):
        return None
    return (
        f"{path} is a link that leads out of the run's folder, to {target}; `resume: {target}`"
        " takes it"
    )


class CheckpointContents(TypedDict):
    """What ``paceline inspect`` shows of a checkpoint."""

    step: int
    strategy: str
    world_size: int
    digest: str
    model_digest: str
    tensors: dict[str, TensorDigest]


def inspect(path: Path) -> CheckpointContents:
    """What a checkpoint holds, over the whole tensors, whatever pieces they were written in.

    The digest is the SHA-256 over the lines "name dtype shape sha256" in order of name: equal
    digests mean equal bits.
    """
    problem = verify(path)
    meta = read_meta(path)
    if problem is not None:
        raise ConfigError(
            f"the checkpoint {path} is not whole: {problem}",
            fix="use the one before it, or resume: auto, which does",
        )
    with CheckpointReader(path) as reader:
        tensors = {name: reader.describe(name) for name in reader.names}
    return {
        "step": meta["step"],
        "strategy": meta["strategy"],
        "world_size": meta["world_size"],
        "digest": _digest(tensors),
        "model_digest": _digest(
            {name: one for name, one in tensors.items() if name.startswith("model/")}
        ),
        "tensors": tensors,
    }


def _digest(tensors: dict[str, TensorDigest]) -> str:
    lines = [
        f"{name} {one['dtype']} {one['shape']} {one['sha256']}\n"
        for name, one in sorted(tensors.items())
    ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def find(path: Path, say: Callable[[str], None] = lambda text: None) -> Path:
    """The checkpoint meant by ``path``: itself, or the newest whole one of a run's folder or its
    ``checkpoints``. ``say`` gets what is wrong with each newer one.

    Raises:
        ConfigError: there is none.
    """
    if (path / META).is_file():
        return path
    wrong: list[str] = []
    for folder in (path, path / "checkpoints"):
        newest, problems = newest_whole(folder)
        if newest is not None:
            for text in problems:
                say(text)
            return newest
        wrong += problems
    what = f"{path} holds no whole checkpoint{': ' if wrong else ''}{'; '.join(wrong)}"
    raise ConfigError(
        what if path.exists() else f"{path} does not exist",
        allowed=f"a run's folder, or a checkpoint such as RUN/checkpoints/{name_of(40)}",
        fix=None if path.exists() else "check the path",
    )
