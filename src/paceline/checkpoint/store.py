"""Find, inspect and prune the checkpoints of a run. Imports no torch.

A checkpoint is a folder (:mod:`paceline.checkpoint.format`) that appears completely or not at all:
it is written under a hidden name, synced, and renamed (:mod:`paceline.checkpoint.writer`). The next
save removes what an interrupted save left behind.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from paceline.checkpoint.format import META, CheckpointMeta, name_of, names_to_prune, step_of
from paceline.checkpoint.integrity import verify
from paceline.checkpoint.reader import CheckpointReader, TensorDigest, read_meta
from paceline.checkpoint.writer import (
    SavedCheckpoint,
    ShardWriteError,
    ShardWriter,
    commit,
    not_written,
    prepare,
    reason_of,
    remove,
    wait_for_shards,
    write_shards,
)
from paceline.core.errors import ConfigError
from paceline.core.files import fsync_path
from paceline.core.texts import UserText

if TYPE_CHECKING:
    import torch

_NAME = re.compile(r"step-\d{8,}")


def save(
    folder: Path, step: int, state: dict[str, torch.Tensor], meta: CheckpointMeta
) -> SavedCheckpoint:
    """Write a checkpoint of ``step`` below ``folder`` (``RUN/checkpoints``) from full tensors, in a
    single process.

    Raises:
        RunError: the checkpoint could not be written (disk full, permission denied). Earlier
            checkpoints are untouched, and the incomplete one is removed.
    """
    from paceline.parallel.state import TensorShard

    shards = [TensorShard.full(name, value) for name, value in state.items()]
    writer, staging_dir = ShardWriter.local(shards), None
    try:
        staging_dir = prepare(folder, step, num_ranks=1)
        write_shards(staging_dir, 0, 1, shards)
        return commit(folder, step, staging_dir, meta, wait_for_shards(staging_dir, [writer]))
    except (OSError, ValueError, ShardWriteError) as error:
        if staging_dir is not None:
            shutil.rmtree(staging_dir, ignore_errors=True)
        raise not_written(folder, step, writer.size_bytes, reason_of(error)) from error


def prune(
    folder: Path,
    keep: int | None,
    superseded: Collection[int] = (),
    best_steps: Collection[int] = (),
) -> list[Path]:
    """Remove checkpoints; for the arguments, see
    :func:`~paceline.checkpoint.format.names_to_prune`. Return the removed checkpoints.

    Checkpoints are not verified. To make sure that the latest valid one is retained, call this
    right after a checkpoint was written, with every later step in ``superseded``.
    """
    names = [path.name for path in committed(folder)]
    removed = [folder / name for name in names_to_prune(names, keep, superseded, best_steps)]
    for path in removed:
        hidden = folder / f".{path.name}.{os.getpid()}.old"
        # Rename first: if the removal is interrupted, even by a power failure, no incomplete
        # checkpoint has a valid name.
        os.replace(path, hidden)
        fsync_path(folder)
        remove(hidden)
    return removed


def prune_after(
    saved: SavedCheckpoint,
    step: int,
    keep: int | None,
    superseded: Collection[int],
    best_steps: Collection[int],
) -> list[str]:
    """Call :func:`prune` after a checkpoint was saved. Return warnings."""
    folder = saved.path.parent
    try:
        removed = prune(folder, keep, superseded, best_steps)
    except OSError as error:
        return [not_pruned_text(folder, reason_of(error))]
    names = [path.name for path in removed if step_of(path.name) in superseded]
    if not names:
        return []
    return [
        UserText(
            "removed {names} from {folder}: an earlier attempt of this run wrote them after the"
            " step from which this one resumed; {latest} is the latest checkpoint now",
            code="checkpoints-of-attempt-removed",
            names=", ".join(names),
            folder=folder,
            latest=name_of(step),
        )
    ]


def not_pruned_text(place: object, reason: str) -> UserText:
    """Return the warning that older checkpoints remain."""
    return UserText(
        "could not remove older checkpoints in {place}: {reason}",
        code="checkpoints-not-removed",
        place=place,
        reason=reason,
    )


def committed(folder: Path) -> list[Path]:
    """Return the checkpoints below ``folder``, oldest first."""
    if not folder.is_dir():
        return []
    paths = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(paths, key=lambda path: step_of(path.name))


def latest_valid(folder: Path) -> tuple[Path | None, list[str]]:
    """Return the latest valid checkpoint, or None, and what is wrong with each later one."""
    problems: list[str] = []
    for path in reversed(committed(folder)):
        problem = _link_problem(path, folder) or verify(path)
        if problem is None:
            return path, problems
        problems.append(problem)
    return None, problems


def _link_problem(path: Path, folder: Path) -> str | None:
    """Return what is wrong with a checkpoint that is a link to a folder outside of the run, or
    None."""
    target = path.resolve()
    if not path.is_symlink() or any(
        target.is_relative_to(parent.resolve()) for parent in (folder, folder.parent)
    ):
        return None
    return (
        f"{path} is a symbolic link to {target}, outside of the run's folder (to use it, set"
        f" `resume: {target}`)"
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
    """Describe the full tensors of a checkpoint, independent of the shards they are stored in.

    The digest is the SHA-256 of the lines "name dtype shape sha256", sorted by name: equal digests
    mean that the tensors are equal bit for bit.

    Raises:
        ConfigError: the checkpoint is not valid.
    """
    problem = verify(path)
    meta = read_meta(path)
    if problem is not None:
        raise ConfigError(
            "the checkpoint {path} is not valid: {problem}",
            code="invalid-checkpoint",
            fix="use an earlier one, or `resume: auto`, which does",
            path=path,
            problem=problem,
        )
    with CheckpointReader(path) as reader:
        tensors = {name: reader.describe(name) for name in sorted(reader.entries)}
    return {
        "step": meta["step"],
        "strategy": meta["strategy"],
        "world_size": meta["world_size"],
        "digest": _digest(tensors),
        "model_digest": _digest(
            {name: tensor for name, tensor in tensors.items() if name.startswith("model/")}
        ),
        "tensors": tensors,
    }


def _digest(tensors: dict[str, TensorDigest]) -> str:
    lines = [
        f"{name} {tensor['dtype']} {tensor['shape']} {tensor['sha256']}\n"
        for name, tensor in sorted(tensors.items())
    ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def find(path: Path, warn: Callable[[str], None] = lambda text: None) -> Path:
    """Return the checkpoint at ``path``. If ``path`` is the folder of a run or its ``checkpoints``,
    return the latest valid checkpoint in it; ``warn`` receives what is wrong with each later one.

    Raises:
        ConfigError: there is no valid checkpoint.
    """
    if (path / META).is_file():
        return path
    problems: list[str] = []
    for folder in (path, path / "checkpoints"):
        checkpoint, folder_problems = latest_valid(folder)
        if checkpoint is not None:
            for text in folder_problems:
                warn(text)
            return checkpoint
        problems += folder_problems
    allowed = f"the folder of a run, or a checkpoint such as RUN/checkpoints/{name_of(40)}"
    if not path.exists():
        raise ConfigError(
            "{path} does not exist",
            code="missing-checkpoint",
            allowed=allowed,
            fix="check the path",
            path=path,
        )
    reason = f": {'; '.join(problems)}" if problems else ""
    raise ConfigError(
        "{path} contains no valid checkpoint{reason}",
        code="no-checkpoint",
        allowed=allowed,
        path=path,
        reason=reason,
    )
